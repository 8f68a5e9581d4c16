"""Bytes -> named fields: the syntax half of decoding, one class per encoding.

Who calls it: `schemas.codec.decode_request` opens a record here; `schemas.validation` asks it for
fields by name.
What must stay true: memory stays within a small multiple of the record whatever its bytes claim;
no input overruns the stack; both encodings yield the same plain values by the same rules, so that
validation need not know which one it reads:

- a lone surrogate becomes U+FFFD, a surrogate pair is joined; other invalid UTF-8 is refused;
- a repeated field name, trailing bytes, NaN and infinity literals, ext types are refused;
- only `metadata` is free-form; every other field is read no deeper than the contract nests.

msgpack is read in two steps. The first checks the structure of the whole record and hands out its
fields as slices, building nothing: afterwards every declared length is known to be backed by real
bytes. The second decodes a field when it is asked for, with a decoder that only takes what that
field may hold. JSON has no declared lengths; it is parsed at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, Protocol

import msgpack
import msgspec

from .errors import (
    ContentType,
    InvalidRequest,
    ItemTooLarge,
    TooDeep,
    TooManyItems,
    UndecodableRecord,
)
from .headers import JSON, MSGPACK
from .requests import Limits

Pairs = list[tuple[str, Any]]

_SCALAR: Final = msgspec.msgpack.Decoder(str | int | float | bool | None)
_BYTES: Final = msgspec.msgpack.Decoder(bytes)
_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_TEXTS: Final = msgspec.msgpack.Decoder(list[str])
_IDS: Final = msgspec.msgpack.Decoder(list[int])
_RAWS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MAX_OUTPUTS: Final = 64
MAX_SHOWN_NAME_CHARS: Final = 64
BYTES_PER_TOKEN_ID: Final = 8


class Record(Protocol):
    """One opened record."""

    names: Iterable[str]
    content_type: ContentType
    n_bytes: int
    repeated: bool  # a field name occurs twice

    def value(self, name: str) -> Any:
        """The plain value of a field that is present. Raises a typed error at that field's path."""
        ...

    def metadata(self) -> Any:
        """The free-form field, with its size already checked."""
        ...


def sniff(body: bytes) -> ContentType | None:
    """The encoding that the first byte announces, None when it is neither."""
    first = body[:1]
    if first == b"{":
        return JSON
    if b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf"):
        return MSGPACK
    if first in (b" ", b"\t", b"\r", b"\n") and body.lstrip(b" \t\r\n")[:1] == b"{":
        return JSON
    return None


def open_record(body: bytes, declared: ContentType | None, limits: Limits) -> Record:
    """Parse the outside of a record.

    Raises:
        UndecodableRecord: the bytes are no msgpack map or JSON object, or not the declared one.
        TooDeep: nesting that no parser should follow.
    """
    actual = sniff(body)
    if actual is None:
        raise UndecodableRecord(_why_undecodable(body))
    if declared is not None and declared != actual:
        raise UndecodableRecord(
            f"the content-type header says {declared}, but the record begins like {actual}"
        )
    if actual == JSON:
        return JsonRecord(body, limits)
    return MsgpackRecord(body, limits)


def _why_undecodable(body: bytes) -> str:
    if not body:
        return "the record is empty"
    if body.startswith(b"\xef\xbb\xbf"):
        return "the record begins with a byte order mark; send UTF-8 JSON without it"
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the record looks like UTF-16; send UTF-8 JSON or msgpack"
    if body.lstrip(b" \t\r\n")[:1] == b"[" or b"\x90" <= body[:1] <= b"\x9f":
        return "the record is a list; one record is one map (one JSON object)"
    if body[:1] == b"\x00":
        return "the record begins with a zero byte; schema-registry framing is not supported"
    return "the record is neither a msgpack map nor a JSON object"


def repair(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD; other text is unchanged."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def safe_name(name: str) -> str:
    """A sender's field name, fit to be shown: printable and short."""
    shown = "".join(c if c.isprintable() else "?" for c in name[:MAX_SHOWN_NAME_CHARS])
    return shown + "..." if len(name) > MAX_SHOWN_NAME_CHARS else shown


def _utf8(data: bytes, path: str) -> str:
    try:
        return repair(data.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        raise InvalidRequest("the string is not UTF-8", path=path) from None


def unique_pairs(pairs: Pairs) -> dict[str, Any]:
    """A map from its pairs. Raises `InvalidRequest` for a repeated name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("a field name is repeated inside one map")
    return found


# ---------------------------------------------------------------------------------------- msgpack


def _length(raw: bytes) -> int:
    """Entries (or pairs) that a msgpack array or map header declares."""
    first = raw[0]
    if first & 0xF0 in (0x80, 0x90):
        return first & 0x0F
    return int.from_bytes(raw[1:3] if first in (0xDC, 0xDE) else raw[1:5], "big")


def _kind(first: int) -> str:
    """What a msgpack value is, by its first byte: str, int, list, map or other."""
    if first <= 0x7F or first >= 0xE0 or 0xCC <= first <= 0xD3:
        return "int"
    if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB:
        return "str"
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return "list"
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "map"
    return "bin" if 0xC4 <= first <= 0xC6 else "other"


def _first_entry(raw: bytes) -> int:
    """Offset of the first entry of a msgpack array."""
    return {0xDC: 3, 0xDD: 5}.get(raw[0], 1)


def _str_payload(raw: bytes) -> bytes:
    first = raw[0]
    return raw[{0xD9: 2, 0xDA: 3, 0xDB: 5}.get(first, 1) :]


def _refuse_type(error: msgspec.ValidationError, path: str) -> NoReturn:
    """Turn msgspec's message (type names and a path, never a value) into ours."""
    message, _, where = str(error).partition(" - at `$")
    raise InvalidRequest(message.replace("`", ""), path=path + where.rstrip("`")) from None


class MsgpackRecord:
    """A msgpack map whose fields are decoded when they are asked for."""

    content_type: ContentType = MSGPACK

    def __init__(self, body: bytes, limits: Limits) -> None:
        self.n_bytes = len(body)
        self._limits = limits
        try:
            self._fields = _MAP.decode(body)
        except msgspec.ValidationError:
            raise InvalidRequest("a field name is not a string", path="$") from None
        except msgspec.DecodeError as error:
            raise UndecodableRecord(f"malformed msgpack: {_parser_text(error)}") from None
        except RecursionError:
            raise TooDeep("the record nests too deeply", limit=limits.max_depth) from None
        self.names: Iterable[str] = self._fields
        self.repeated = len(self._fields) != _length(body)

    def value(self, name: str) -> Any:
        raw = self._fields[name]
        read = _MSGPACK_FIELDS.get(name, _scalar)
        return read(raw, f"$.{name}", self._limits)

    def metadata(self) -> Any:
        raw = bytes(self._fields["metadata"])
        _check_metadata_bytes(len(raw), self._limits)
        return _free_form(raw, self._limits)


def _parser_text(error: Exception) -> str:
    """msgspec's own words: an offset or an opcode, never content."""
    return str(error).removeprefix("MessagePack data is malformed: ").lower()


def _scalar(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    try:
        return _SCALAR.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)
    except msgspec.DecodeError:
        return _utf8(_str_payload(bytes(raw)), path)


def _outputs(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    data = bytes(raw)
    if _kind(data[0]) == "list" and _length(data) > _MAX_OUTPUTS:
        raise InvalidRequest("too many outputs", path=path, limit=_MAX_OUTPUTS)
    try:
        return _TEXTS.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)
    except msgspec.DecodeError:
        raise InvalidRequest("the string is not UTF-8", path=path) from None


def _items(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    """`input` or `documents`: a scalar, a list of texts, a list of ids, or a list of entries."""
    data = memoryview(raw)
    kind = _kind(data[0])
    if kind != "list":
        if kind == "map":
            raise InvalidRequest("one item still needs a list around it", path=path)
        return _scalar(raw, path, limits)
    head = bytes(data[:5])
    n = _length(head)
    if n == 0:
        return []
    first = _kind(data[_first_entry(head)])
    if first == "int":
        return _ids(raw, n, path, limits)
    if n > limits.max_items:
        raise_too_many(n, path, limits)
    if first == "str":
        try:
            return _TEXTS.decode(raw)
        except msgspec.DecodeError:  # mixed kinds or surrogates: entry by entry below
            pass
    return [_entry(entry, f"{path}[{i}]", limits) for i, entry in enumerate(_RAWS.decode(raw))]


def raise_too_many(n: int, path: str, limits: Limits) -> NoReturn:
    raise TooManyItems(
        f"the request has {n} items, more than the {limits.max_items} that one request may hold",
        path=path,
        limit=limits.max_items,
        given=n,
    )


def raise_too_large(n_bytes: int, path: str, limits: Limits, items: Iterable[int] = ()) -> NoReturn:
    raise ItemTooLarge(
        f"an item exceeds {limits.max_item_bytes} bytes (a token id counts "
        f"{BYTES_PER_TOKEN_ID}); split it before sending",
        path=path,
        items=tuple(items),
        limit=limits.max_item_bytes,
        given=n_bytes,
    )


def _ids(raw: msgspec.Raw, n: int, path: str, limits: Limits) -> list[int]:
    # Each id is a Python object: a list that is too long must be refused before it is built.
    if n * BYTES_PER_TOKEN_ID > limits.max_item_bytes:
        raise_too_large(n * BYTES_PER_TOKEN_ID, path, limits)
    try:
        return _IDS.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)


def _entry(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    """One entry of a list of items: text, ids, or a map of texts and bytes."""
    data = memoryview(raw)
    kind = _kind(data[0])
    if kind == "list":
        n = _length(bytes(data[:5]))
        return _ids(raw, n, path, limits)
    if kind != "map":
        return _scalar(raw, path, limits)
    try:
        fields = _MAP.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest("a field name is not a string", path=path) from None
    except msgspec.DecodeError:
        raise InvalidRequest("a field name is not UTF-8", path=path) from None
    if len(fields) != _length(bytes(data[:5])):
        raise InvalidRequest("a field name is repeated", path=path)
    return {
        name: _BYTES.decode(value)
        if _kind(memoryview(value)[0]) == "bin"
        else _scalar(value, f"{path}.{safe_name(name)}", limits)
        for name, value in fields.items()
    }


def _free_form(raw: bytes, limits: Limits) -> Any:
    """Decode metadata. The structure was checked before, so declared lengths are real."""
    try:
        return msgpack.unpackb(
            raw,
            max_ext_len=0,
            object_pairs_hook=unique_pairs,
            unicode_errors="surrogatepass",
            strict_map_key=True,
        )
    except InvalidRequest as error:
        error.path = "$.metadata"
        raise
    except msgpack.StackError:
        raise TooDeep(
            "metadata nests too deeply", path="$.metadata", limit=limits.max_depth
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequest("a string is not UTF-8", path="$.metadata") from None
    except (ValueError, TypeError):
        raise InvalidRequest(
            "metadata may hold maps with string keys, lists, strings, numbers, booleans, null "
            "and bytes; nothing else",
            path="$.metadata",
        ) from None


def _check_metadata_bytes(n_bytes: int, limits: Limits) -> None:
    if n_bytes > limits.max_metadata_bytes:
        raise InvalidRequest(
            f"metadata exceeds {limits.max_metadata_bytes} bytes",
            path="$.metadata",
            limit=limits.max_metadata_bytes,
            given=n_bytes,
        )


_Reader = Callable[[msgspec.Raw, str, Limits], Any]
_MSGPACK_FIELDS: Final[dict[str, _Reader]] = {
    "input": _items,
    "documents": _items,
    "outputs": _outputs,
}


# ------------------------------------------------------------------------------------------- JSON

_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_MAYBE_LONE: Final = re.compile(f"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}")
_ESCAPES: Final = re.compile(rf"{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.", re.DOTALL)


class _RepeatedName(Exception):
    """Raised inside the JSON parser, which cannot say where it stands."""


def _refuse_repeated(pairs: Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedName
    return found


def _refuse_constant(literal: str) -> NoReturn:
    raise UndecodableRecord("malformed JSON: NaN and Infinity are not JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=_refuse_repeated, parse_constant=_refuse_constant)
_JSON_TOLERANT: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_text(body: bytes) -> str:
    """The source text, with everything that is no valid text replaced by U+FFFD."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        try:
            text = repair(body.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise UndecodableRecord(f"malformed JSON: byte {error.start} is not UTF-8") from None
    if ("\\ud" in text or "\\uD" in text) and _MAYBE_LONE.search(text):
        # Taken whole, from the left: a backslash that is itself escaped begins no escape.
        text = _ESCAPES.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    return text


class JsonRecord:
    """A JSON object, parsed whole."""

    content_type: ContentType = JSON

    def __init__(self, body: bytes, limits: Limits) -> None:
        self.n_bytes = len(body)
        self.repeated = False
        self._limits = limits
        text = _json_text(body)
        try:
            try:
                self._fields: dict[str, Any] = _JSON.decode(text)
            except _RepeatedName:
                self.repeated = True
                self._fields = _JSON_TOLERANT.decode(text)
        except json.JSONDecodeError as error:
            raise UndecodableRecord(
                f"malformed JSON: {error.msg.lower()} (character {error.pos})"
            ) from None
        except ValueError:
            raise UndecodableRecord("malformed JSON: a number has too many digits") from None
        except RecursionError:
            raise TooDeep("the record nests too deeply", limit=limits.max_depth) from None
        self.names: Iterable[str] = self._fields

    def value(self, name: str) -> Any:
        return self._fields[name]

    def metadata(self) -> Any:
        value = self._fields["metadata"]
        try:
            n_bytes = len(msgspec.json.encode(value))
        except RecursionError:
            raise TooDeep(
                "metadata nests too deeply", path="$.metadata", limit=self._limits.max_depth
            ) from None
        _check_metadata_bytes(n_bytes, self._limits)
        return value

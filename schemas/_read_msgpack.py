"""msgpack bytes -> named fields.

Who calls it: `schemas.codec.decode_request`.
What must stay true: memory stays within a small multiple of the record whatever its bytes claim,
and no nesting overruns the stack. Hence two steps. The first walks the structure of the whole
record and hands out its fields as slices, building nothing; after it every declared length is known
to be backed by real bytes. The second decodes a field when it is asked for, with a decoder that
takes only what that field may hold, after its declared length was compared with the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, NoReturn, TypeAlias

import msgpack
import msgspec

from ._record import (
    BYTES_PER_TOKEN_ID,
    MAX_FIELDS,
    check_metadata_bytes,
    raise_too_deep,
    raise_too_large,
    raise_too_many,
    raise_too_many_fields,
    repair,
    safe_name,
    unique_pairs,
)
from .errors import ContentType, InvalidRequest, UndecodableRecord
from .headers import MSGPACK
from .requests import MAX_SPANS, Limits

_SCALAR: Final = msgspec.msgpack.Decoder(str | int | float | bool | None)
_BYTES: Final = msgspec.msgpack.Decoder(bytes)
_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_TEXTS: Final = msgspec.msgpack.Decoder(list[str])
_IDS: Final = msgspec.msgpack.Decoder(list[int])
_SPANS: Final = msgspec.msgpack.Decoder(list[Annotated[list[int], msgspec.Meta(max_length=2)]])
_RAWS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MAX_OUTPUTS: Final = 64
_Field: TypeAlias = Callable[[str, msgspec.Raw, str, Limits], Any]
_ENTRY_FIELDS: Final = ("text", "image", "id")
_NOT_METADATA: Final = (
    "metadata may hold maps with string keys, lists, strings, numbers, booleans, null and bytes"
)


class MsgpackRecord:
    """A msgpack map whose fields are decoded when they are asked for."""

    content_type: ContentType = MSGPACK
    newer = False

    def __init__(self, body: bytes, limits: Limits) -> None:
        self.n_bytes = len(body)
        self._limits = limits
        n_fields = _length(body)
        if n_fields > MAX_FIELDS:
            raise_too_many_fields(n_fields)
        try:
            self._fields = _MAP.decode(body)
        except msgspec.ValidationError:
            raise InvalidRequest("a field name is not a string", path="$") from None
        except msgspec.DecodeError as error:
            raise UndecodableRecord(f"malformed msgpack: {_parser_text(error)}") from None
        except RecursionError:
            raise_too_deep(limits)
        self.names: Iterable[str] = self._fields
        self.repeated = len(self._fields) != n_fields

    def value(self, name: str) -> Any:
        """See `schemas._record.Record`."""
        return _READERS.get(name, _scalar)(self._fields[name], f"$.{name}", self._limits)

    def metadata(self) -> Any:
        """See `schemas._record.Record`."""
        return read_metadata(bytes(self._fields["metadata"]), self._limits)


def read_metadata(raw: bytes, limits: Limits) -> Any:
    """The free-form field. Raises a typed error at its path."""
    check_metadata_bytes(len(raw), limits)
    try:
        return msgpack.unpackb(
            raw,
            max_ext_len=0,
            object_pairs_hook=unique_pairs,
            unicode_errors="surrogatepass",
            strict_map_key=True,
        )
    except InvalidRequest:
        raise
    except msgpack.StackError:
        raise_too_deep(limits, "$.metadata")
    except UnicodeDecodeError:
        raise InvalidRequest("a string is not UTF-8", path="$.metadata") from None
    except (ValueError, TypeError):
        raise InvalidRequest(_NOT_METADATA, path="$.metadata") from None


def _parser_text(error: Exception) -> str:
    """msgspec's own words: an offset or an opcode, never content."""
    return str(error).removeprefix("MessagePack data is malformed: ").lower()


def _length(raw: bytes) -> int:
    """Entries (or pairs) that a msgpack array or map header declares."""
    first = raw[0]
    if first & 0xF0 in (0x80, 0x90):
        return first & 0x0F
    return int.from_bytes(raw[1:3] if first in (0xDC, 0xDE) else raw[1:5], "big")


def _kind(first: int) -> str:
    """What a msgpack value is, by its first byte: int, str, list, map, bin or other."""
    if first <= 0x7F or first >= 0xE0 or 0xCC <= first <= 0xD3:
        return "int"
    if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB:
        return "str"
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return "list"
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "map"
    return "bin" if 0xC4 <= first <= 0xC6 else "other"


def _text(raw: msgspec.Raw, path: str) -> str:
    """A string that is not plain UTF-8: repaired, or refused."""
    data = bytes(raw)
    payload = data[{0xD9: 2, 0xDA: 3, 0xDB: 5}.get(data[0], 1) :]
    try:
        return repair(payload.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        raise InvalidRequest("the string is not UTF-8", path=path) from None


def _refuse_type(error: msgspec.ValidationError, path: str) -> NoReturn:
    """Turn msgspec's message (type names and a path, never a value) into ours."""
    message, _, where = str(error).partition(" - at `$")
    got = message.rpartition("got ")[2].strip("`").lower()
    _refuse_kind(got, path + where.rstrip("`"))


def _refuse_kind(got: str, path: str) -> NoReturn:
    raise InvalidRequest(f"a value of type {got} does not belong here", path=path) from None


def _scalar(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    try:
        return _SCALAR.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)
    except msgspec.DecodeError:
        return _text(raw, path)


def _outputs(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    head = bytes(memoryview(raw)[:5])
    if _kind(head[0]) != "list":
        return _scalar(raw, path, limits)
    if _length(head) > _MAX_OUTPUTS:
        raise InvalidRequest("too many outputs", path=path, limit=_MAX_OUTPUTS)
    try:
        return _TEXTS.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)
    except msgspec.DecodeError:
        raise InvalidRequest("the string is not UTF-8", path=path) from None


def _labels(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    if _kind(memoryview(raw)[0]) != "list":
        return _scalar(raw, path, limits)
    return _items(raw, path, limits)


def _documents(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    return _items(raw, path, limits, flat=False)


def _query(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    head = bytes(memoryview(raw)[:5])
    if _kind(head[0]) != "list":
        return _scalar(raw, path, limits)
    if _length(head) * BYTES_PER_TOKEN_ID > limits.max_item_bytes:
        raise_too_large(_length(head) * BYTES_PER_TOKEN_ID, path, limits)
    return _ids(raw, path)


def _items(raw: msgspec.Raw, path: str, limits: Limits, *, flat: bool = True) -> Any:
    """`input` or `documents`: a scalar, a list of texts, a list of ids (where `flat`), or a list of
    entries."""
    data = memoryview(raw)
    kind = _kind(data[0])
    if kind == "map":
        raise InvalidRequest("one item still needs a list around it", path=path)
    if kind != "list":
        return _scalar(raw, path, limits)
    n = _length(bytes(data[:5]))
    if n == 0:
        return []
    first = _kind(data[{0xDC: 3, 0xDD: 5}.get(data[0], 1)])
    if first == "int" and flat:
        # Each id becomes a Python object: a list that is too long is refused before it is built.
        if n * BYTES_PER_TOKEN_ID > limits.max_item_bytes:
            raise_too_large(n * BYTES_PER_TOKEN_ID, path, limits, (0,))
        return _ids(raw, path)
    if n > limits.max_items:
        raise_too_many(n, path, limits)
    if first == "str":
        try:
            return _TEXTS.decode(raw)
        except msgspec.DecodeError:  # mixed kinds, or surrogates
            return _entries(raw, path, limits)
    return _entries(raw, path, limits)


def _entries(raw: msgspec.Raw, path: str, limits: Limits) -> list[Any]:
    raws = _RAWS.decode(raw)
    sizes = [_declared_id_bytes(memoryview(entry)) for entry in raws]
    over = [i for i, n_bytes in enumerate(sizes) if n_bytes > limits.max_item_bytes]
    if over:
        raise_too_large(sizes[over[0]], f"{path}[{over[0]}]", limits, over)
    return [_entry(entry, f"{path}[{i}]", limits) for i, entry in enumerate(raws)]


def _declared_id_bytes(data: memoryview) -> int:
    return _length(bytes(data[:5])) * BYTES_PER_TOKEN_ID if _kind(data[0]) == "list" else 0


def _ids(raw: msgspec.Raw, path: str) -> list[int]:
    try:
        return _IDS.decode(raw)
    except msgspec.ValidationError as error:
        _refuse_type(error, path)


def _entry(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    """One entry of a list of items: text, ids, or a map whose known fields are decoded."""
    data = memoryview(raw)
    kind = _kind(data[0])
    if kind == "list":
        return _ids(raw, path)
    if kind != "map":
        return _scalar(raw, path, limits)
    return _map(raw, path, limits, _entry_field)


def _map(raw: msgspec.Raw, path: str, limits: Limits, field: _Field) -> dict[str, Any]:
    """A map, each of its fields read by `field`."""
    n_fields = _length(bytes(memoryview(raw)[:5]))
    if n_fields > MAX_FIELDS:
        raise_too_many_fields(n_fields, path)
    try:
        fields = _MAP.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest("a field name is not a string", path=path) from None
    except msgspec.DecodeError:
        raise InvalidRequest("a field name is not UTF-8", path=path) from None
    if len(fields) != n_fields:
        raise InvalidRequest("a field name is repeated", path=path)
    return {name: field(name, value, path, limits) for name, value in fields.items()}


def _entry_field(name: str, raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    if name == "messages":
        return _messages(raw, f"{path}.messages", limits)
    if name == "spans":
        return _spans(raw, f"{path}.spans", limits)
    if name not in _ENTRY_FIELDS:
        return None
    if _kind(memoryview(raw)[0]) == "bin":
        return _BYTES.decode(raw)
    return _scalar(raw, f"{path}.{safe_name(name)}", limits)


def _spans(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    """Lists of whole numbers, no deeper."""
    head = bytes(memoryview(raw)[:5])
    if _kind(head[0]) != "list":
        return _scalar(raw, path, limits)
    if _length(head) > MAX_SPANS:
        raise InvalidRequest(
            f"a text may have {MAX_SPANS} spans", path=path, limit=MAX_SPANS, given=_length(head)
        )
    try:
        return _SPANS.decode(raw)
    except msgspec.ValidationError as error:
        at = str(error).partition(" - at `$")[2].partition("]")[0]
        raise InvalidRequest(
            "expected [from, to), two whole numbers", path=f"{path}{at}]"
        ) from None


def _messages(raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    """The maps of a conversation, no deeper."""
    head = bytes(memoryview(raw)[:5])
    if _kind(head[0]) != "list":
        return _scalar(raw, path, limits)
    if _length(head) > limits.max_items:
        raise_too_many(_length(head), path, limits)
    return [
        _map(one, f"{path}[{i}]", limits, _message_field)
        if _kind(memoryview(one)[0]) == "map"
        else _scalar(one, f"{path}[{i}]", limits)
        for i, one in enumerate(_RAWS.decode(raw))
    ]


def _message_field(name: str, raw: msgspec.Raw, path: str, limits: Limits) -> Any:
    known = name in ("role", "content")
    return _scalar(raw, f"{path}.{name}", limits) if known else None


_READERS: Final[dict[str, Callable[[msgspec.Raw, str, Limits], Any]]] = {
    "input": _items,
    "documents": _documents,
    "query": _query,
    "labels": _labels,
    "outputs": _outputs,
}

"""What the two readers share: the shape of an opened record, and rules that hold in both encodings.

Who calls it: `schemas._read_msgpack` and `schemas._read_json` implement `Record`;
`schemas.validation` and `schemas._items` read fields through it.
What must stay true: both encodings yield the same plain values by the same rules:

- a lone surrogate becomes U+FFFD, a surrogate pair is joined; other invalid UTF-8 is refused;
- a repeated field name, trailing bytes, NaN and infinity literals, ext types are refused;
- only `metadata` is free-form; every other field is read no deeper than the contract nests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn, Protocol

from .errors import ContentType, InvalidRequest, ItemTooLarge, TooDeep, TooManyItems
from .headers import JSON, MSGPACK
from .requests import Limits

MAX_FIELDS: Final = 256  # of one record; the contract knows ~25
BYTES_PER_TOKEN_ID: Final = 8  # what a token id counts against `max_item_bytes`
_MAX_SHOWN_NAME_CHARS: Final = 64


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some editors put it before UTF-8 text; it is skipped before a JSON record."""


class Record(Protocol):
    """One opened record."""

    names: Iterable[str]
    content_type: ContentType
    n_bytes: int
    repeated: bool  # a field name occurs twice somewhere
    newer: bool  # its sender speaks a newer version; validation sets this

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
    if body.startswith(BYTE_ORDER_MARK):
        return JSON if body[len(BYTE_ORDER_MARK) :].lstrip(b" \t\r\n")[:1] == b"{" else None
    if b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf"):
        return MSGPACK
    if first in (b" ", b"\t", b"\r", b"\n") and body.lstrip(b" \t\r\n")[:1] == b"{":
        return JSON
    return None


def why_undecodable(body: bytes) -> str:
    """The best guess at what the bytes are instead, for the producer's author."""
    if not body:
        return "the record is empty"
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


def utf8_bytes(text: str) -> int:
    """Length of the UTF-8 form, without building it for plain ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def safe_name(name: str) -> str:
    """A sender's field name, fit to be shown: printable and short."""
    shown = "".join(c if c.isprintable() else "?" for c in name[:_MAX_SHOWN_NAME_CHARS])
    return shown + "..." if len(name) > _MAX_SHOWN_NAME_CHARS else shown


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A map of metadata from its pairs. Raises `InvalidRequest` for a repeated name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("a name is repeated inside one map", path="$.metadata")
    return found


def check_metadata_bytes(n_bytes: int, limits: Limits) -> None:
    """Raises `InvalidRequest` when the encoded metadata exceeds its limit."""
    if n_bytes > limits.max_metadata_bytes:
        raise InvalidRequest(
            f"metadata exceeds {limits.max_metadata_bytes} bytes",
            path="$.metadata",
            limit=limits.max_metadata_bytes,
            given=n_bytes,
        )


def raise_too_deep(limits: Limits, path: str | None = None) -> NoReturn:
    """The record nests further than allowed, or than any parser should follow."""
    raise TooDeep(
        f"the record nests deeper than {limits.max_depth} levels", path=path, limit=limits.max_depth
    )


def raise_too_many_fields(n: int, path: str = "$") -> NoReturn:
    """A map declares more fields than any version of the contract has."""
    raise InvalidRequest(
        f"a map has more than {MAX_FIELDS} fields", path=path, limit=MAX_FIELDS, given=n
    )


def raise_too_many(n: int, path: str, limits: Limits) -> NoReturn:
    """The request has more items than one request may hold."""
    raise TooManyItems(
        f"the request has {n} items; at most {limits.max_items} fit one request, split it",
        path=path,
        limit=limits.max_items,
        given=n,
    )


def raise_too_large(n_bytes: int, path: str, limits: Limits, items: Iterable[int] = ()) -> NoReturn:
    """An item (or all of `items`) exceeds the byte limit; `n_bytes` is the first one's size."""
    raise ItemTooLarge(
        f"an item exceeds {limits.max_item_bytes} bytes (a token id counts "
        f"{BYTES_PER_TOKEN_ID}); cut it before sending",
        path=path,
        items=tuple(items),
        limit=limits.max_item_bytes,
        given=n_bytes,
    )

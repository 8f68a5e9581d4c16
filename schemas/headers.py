"""Record headers: names, values, and what the service reads from them.

Who calls it: `schemas.codec` reads request headers and writes reply headers; transports and egress
use the names (dead letters included) instead of spelling them again.
What must stay true: names are lower case; an unreadable header is a typed error, never a crash; a
header beats the body for `reply-to` and `deadline-ms`, the body beats the header for the id; an
empty value counts as absent; a bad `traceparent` is dropped, because tracing must not fail work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from .errors import ContentType, InvalidRequest, UndecodableRecord

CONTENT_TYPE: Final = "content-type"
REPLY_TO: Final = "reply-to"
REQUEST_ID: Final = "request-id"
DEADLINE_MS: Final = "deadline-ms"
TRACEPARENT: Final = "traceparent"
REQUEST_HEADERS: Final = (CONTENT_TYPE, REPLY_TO, REQUEST_ID, DEADLINE_MS, TRACEPARENT)

DEAD_LETTER_CODE: Final = "embedstream-error-code"
DEAD_LETTER_MESSAGE: Final = "embedstream-error-message"
DEAD_LETTER_ORIGIN: Final = "embedstream-origin"
DEAD_LETTER_ATTEMPTS: Final = "embedstream-attempts"
DEAD_LETTER_KIND: Final = "embedstream-kind"
DEAD_LETTER_HEADERS: Final = (
    DEAD_LETTER_CODE,
    DEAD_LETTER_MESSAGE,
    DEAD_LETTER_ORIGIN,
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_KIND,
)
DeadLetterKind: TypeAlias = Literal["failed", "unprocessable"]
KIND_FAILED: Final = "failed"  # tried, gave up
KIND_UNPROCESSABLE: Final = "unprocessable"  # never could be answered

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"

MAX_REPLY_TO_BYTES: Final = 1024
MAX_DEADLINE_MS: Final = 2**63 - 1
_MAX_TRACEPARENT_CHARS = 256

_CONTENT_TYPES: dict[str, ContentType] = {
    MSGPACK: MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    JSON: JSON,
}


_NAMES: Final[dict[ContentType, bytes]] = {kind: kind.encode() for kind in (MSGPACK, JSON)}


class RecordHeaders(msgspec.Struct, frozen=True):
    """What the headers of one request say; None where they say nothing."""

    content_type: ContentType | None = None
    reply_to: str | None = None
    request_id: str | None = None
    deadline_ms: int | None = None
    traceparent: str | None = None


NO_HEADERS: Final = RecordHeaders()


def collect(headers: Mapping[str, bytes | str]) -> dict[str, bytes | str]:
    """The known, non-empty headers by lower-case name; of two spellings the last one counts."""
    found: dict[str, bytes | str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in REQUEST_HEADERS and value:
            found[lower] = value
    return found


def parse_headers(headers: Mapping[str, bytes | str]) -> RecordHeaders:
    """Read the headers of a request record.

    Names are matched without regard to case; values may be bytes (UTF-8) or str.

    Raises:
        UndecodableRecord: `content-type` names an encoding that is neither msgpack nor JSON.
        InvalidRequest: another header cannot be read; `path` is ``headers.<name>``.
    """
    found = collect(headers) if headers else None
    if not found:
        return NO_HEADERS
    return RecordHeaders(
        content_type=_content_type(found.get(CONTENT_TYPE)),
        reply_to=_text(found, REPLY_TO, MAX_REPLY_TO_BYTES),
        request_id=_text(found, REQUEST_ID, None),
        deadline_ms=_deadline_ms(found),
        traceparent=_traceparent(found.get(TRACEPARENT)),
    )


def salvage_headers(headers: Mapping[str, bytes | str]) -> RecordHeaders:
    """As `parse_headers`, but whatever cannot be read is left out: used to answer a bad record."""
    readable: dict[str, str | int | None] = {}
    for name, field in _FIELD_OF.items():
        value = next((v for n, v in headers.items() if n.lower() == name and v), None)
        if value is None:
            continue
        try:
            readable[field] = getattr(parse_headers({name: value}), field)
        except InvalidRequest:
            continue
    return msgspec.structs.replace(NO_HEADERS, **readable)


_FIELD_OF = {name: name.replace("-", "_") for name in REQUEST_HEADERS}


def _content_type(value: bytes | str | None) -> ContentType | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else value.decode("latin-1")
    known = _CONTENT_TYPES.get(text)
    if known is not None:
        return known
    kind, _, parameters = text.partition(";")
    known = _CONTENT_TYPES.get(kind.strip().lower())
    if known is None:
        raise UndecodableRecord(
            f"the content-type header names an unknown encoding; use {MSGPACK} or {JSON}",
            path=f"headers.{CONTENT_TYPE}",
        )
    charset = parameters.lower().replace(" ", "").replace('"', "")
    if "charset=" in charset and "charset=utf-8" not in charset:
        raise UndecodableRecord(
            "the content-type header names a charset other than utf-8",
            path=f"headers.{CONTENT_TYPE}",
        )
    return known


def _text(found: Mapping[str, bytes | str], name: str, max_bytes: int | None) -> str | None:
    value = found.get(name)
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else value.decode("utf-8")
        n_bytes = len(text.encode("utf-8"))
    except UnicodeError:
        raise InvalidRequest(f"the header {name} is not UTF-8", path=f"headers.{name}") from None
    if max_bytes is not None and n_bytes > max_bytes:
        raise InvalidRequest(
            f"the header {name} is longer than {max_bytes} bytes",
            path=f"headers.{name}",
            limit=max_bytes,
            given=n_bytes,
        )
    return text


def _deadline_ms(found: Mapping[str, bytes | str]) -> int | None:
    text = _text(found, DEADLINE_MS, None)
    if text is None:
        return None
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 19:
        deadline_ms = int(digits)
        if deadline_ms <= MAX_DEADLINE_MS:
            return deadline_ms
    raise InvalidRequest(
        f"the header {DEADLINE_MS} must be whole milliseconds since 1970, as decimal digits",
        path=f"headers.{DEADLINE_MS}",
    )


def _traceparent(value: bytes | str | None) -> str | None:
    if value is None or len(value) > _MAX_TRACEPARENT_CHARS:
        return None
    text = value if isinstance(value, str) else value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None


def reply_headers(
    request_id: str, content_type: ContentType, *, traceparent: str | None = None
) -> dict[str, bytes]:
    """Headers of a reply record: content type, request id, and the request's own trace context."""
    headers = {
        CONTENT_TYPE: _NAMES[content_type],
        REQUEST_ID: request_id.encode("utf-8", "replace"),
    }
    if traceparent is not None:
        headers[TRACEPARENT] = traceparent.encode("ascii", "replace")
    return headers

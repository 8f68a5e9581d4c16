"""Building raw records for schema tests, independent of the encoder under test."""

from __future__ import annotations

import json
from typing import Any

import msgpack

from schemas.codec import decode_request
from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest, CancelRequest, ContentType, Limits

BOTH: tuple[ContentType, ...] = ("application/msgpack", "application/json")


def raw(fields: Any, content_type: ContentType = "application/msgpack") -> bytes:
    """The record as an ordinary client would write it."""
    if content_type == "application/json":
        return json.dumps(fields).encode()
    return msgpack.packb(fields, unicode_errors="surrogatepass")


def decode(
    fields: Any,
    content_type: ContentType = "application/msgpack",
    *,
    headers: dict[str, Any] | None = None,
    limits: Limits | None = None,
    default_id: str = "default-id",
) -> AnyRequest | CancelRequest:
    """Decode a record given as plain fields (or as bytes)."""
    body = fields if isinstance(fields, bytes | None) else raw(fields, content_type)
    return decode_request(body, headers or {}, default_id=default_id, limits=limits or Limits())


def refusal(
    fields: Any, content_type: ContentType = "application/msgpack", **kwargs: Any
) -> EmbedstreamError:
    """The typed error that a record is refused with."""
    try:
        accepted = decode(fields, content_type, **kwargs)
    except EmbedstreamError as error:
        return error
    raise AssertionError(f"the record was accepted: {accepted!r}")

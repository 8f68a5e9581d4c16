"""The codec: record bytes <-> requests and replies. The door to the wire contract.

Who calls it: ingress decodes requests and egress encodes replies; clients and the CLI do the
reverse; all of them through these functions and nothing deeper.
What must stay true: any bytes either decode or raise an `EmbedstreamError`, in bounded time and
memory; decode(encode(x)) == x; the same reply always gives the same bytes, timings apart; bytes of
one released version decode in every later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ._encode import dump, encode_reply, metadata_to_wire, request_to_wire
from ._encode_rows import encode_rows
from ._parts import join_parts, split_reply
from ._read_json import JsonRecord
from ._read_msgpack import MsgpackRecord
from ._read_ordinary import ordinary_request
from ._record import BYTE_ORDER_MARK, Record, sniff, utf8_bytes, why_undecodable
from ._reply import read_reply
from .errors import (
    ContentType,
    EmbedstreamError,
    InvalidRequest,
    RecordTooLarge,
    UndecodableRecord,
)
from .headers import (
    CONTENT_TYPE,
    DEADLINE_MS,
    JSON,
    MAX_REPLY_TO_BYTES,
    MSGPACK,
    REPLY_TO,
    REQUEST_ID,
    TRACEPARENT,
    parse_headers,
    reply_headers,
    salvage_headers,
)
from .requests import AnyRequest, CancelRequest, Limits, ScoreRequest
from .results import FailureReply, Reply
from .validation import (
    CANCEL,
    build_request,
    default_encoding,
    request_id,
    request_metadata,
)

__all__ = [
    "decode_reply",
    "decode_request",
    "default_encoding",
    "encode_reply",
    "encode_request",
    "encode_rows",
    "join_parts",
    "reply_headers",
    "split_reply",
]

_DEFAULT_LIMITS = Limits()


def decode_request(
    body: bytes | None,
    headers: Mapping[str, bytes] | None,
    *,
    default_id: str,
    limits: Limits = _DEFAULT_LIMITS,
) -> AnyRequest | CancelRequest:
    """Decode and validate one request record (or a cancel record).

    Args:
        body: the record. None (a Kafka tombstone) and b"" are two different errors.
        headers: record headers; any case, bytes or str. None is no headers.
        default_id: the request id when neither body nor header names one.
        limits: what a record may hold.

    Raises:
        EmbedstreamError: a typed error that also carries what could still be read of the request
            (`request_id`, `reply_to`, `content_type`, `metadata`). `UndecodableRecord` when the
            bytes are no record at all.
    """
    headers = headers or {}
    record: Record | None = None
    try:
        if body is None:
            raise UndecodableRecord("the record has no value (a tombstone)")
        if len(body) > limits.max_record_bytes:
            raise RecordTooLarge(
                f"the record exceeds {limits.max_record_bytes} bytes; split the request",
                limit=limits.max_record_bytes,
                given=len(body),
            )
        found = parse_headers(headers)
        ordinary = ordinary_request(body, found, default_id, limits)
        if ordinary is not None:
            return ordinary
        record = _open(bytes(body), found.content_type, limits)
        return build_request(record, found, default_id=default_id, limits=limits)
    except EmbedstreamError as error:
        _attach(error, record, body, headers, default_id, limits)
        raise


def _open(body: bytes, declared: ContentType | None, limits: Limits) -> Record:
    actual = sniff(body)
    if actual is None:
        raise UndecodableRecord(why_undecodable(body))
    if declared is not None and declared != actual:
        raise UndecodableRecord(
            f"the content-type header says {declared}, but the record begins like {actual}"
        )
    if actual == JSON:
        return JsonRecord(body.removeprefix(BYTE_ORDER_MARK), limits)
    return MsgpackRecord(body, limits)


def _attach(
    error: EmbedstreamError,
    record: Record | None,
    body: bytes | None,
    headers: Mapping[str, bytes],
    default_id: str,
    limits: Limits,
) -> None:
    """Put on the error whatever a reply to this request needs and can still be read."""
    found = salvage_headers(headers)
    if record is None and body is not None and len(body) <= limits.max_record_bytes:
        with suppress(EmbedstreamError):  # a header failed, the record itself may be fine
            record = _open(bytes(body), found.content_type, limits)
    error.content_type = record.content_type if record else found.content_type
    if error.content_type is None and body:
        error.content_type = sniff(bytes(body[:64]))
    error.reply_to = found.reply_to
    fallback_id = (found.request_id or default_id).encode("utf-8", "replace")
    error.request_id = fallback_id[: limits.max_id_bytes].decode("utf-8", "ignore")
    if record is None:
        return
    with suppress(EmbedstreamError):
        error.request_id = request_id(record, found, default_id, limits)
    with suppress(EmbedstreamError):
        error.metadata = request_metadata(record, limits)
    if error.reply_to is None and "reply_to" in record.names:
        with suppress(EmbedstreamError):
            value = record.value("reply_to")
            if isinstance(value, str) and 0 < utf8_bytes(value) <= MAX_REPLY_TO_BYTES:
                error.reply_to = value


def encode_request(request: AnyRequest | CancelRequest) -> tuple[bytes, dict[str, bytes]]:
    """The record of a request, in `request.content_type`, and its headers.

    The body says everything; the headers repeat what lets a service answer a record that it cannot
    read. Fields at their default are left out.

    A cancel record is always msgpack. Whether the values obey the contract is for the service to
    say; here only what cannot be written is refused.

    Raises:
        InvalidRequest, TooDeep: metadata that no record can carry, bytes in JSON, a score request
            that asks for an order.
    """
    if isinstance(request, CancelRequest):
        return dump({"id": request.id, "task": CANCEL}, MSGPACK), {
            CONTENT_TYPE: MSGPACK.encode("ascii"),
            REQUEST_ID: request.id.encode("utf-8", "replace"),
        }
    if isinstance(request, ScoreRequest) and (request.sort or request.top_n is not None):
        raise InvalidRequest("score gives every score in input order: no sort, no top_n")
    if request.content_type == JSON and request.encoding == "bytes":
        raise InvalidRequest(
            "JSON cannot carry bytes: ask for base64 or float, or send msgpack", path="$.encoding"
        )
    wire = request_to_wire(request)
    if request.metadata is not None:
        wire["metadata"] = metadata_to_wire(request.metadata, request.content_type)
    body = dump(wire, request.content_type)
    headers = {
        CONTENT_TYPE: request.content_type.encode("ascii"),
        REQUEST_ID: request.id.encode("utf-8", "replace"),
    }
    if request.reply_to is not None:
        headers[REPLY_TO] = request.reply_to.encode("utf-8", "replace")
    if request.deadline_ms is not None:
        headers[DEADLINE_MS] = b"%d" % request.deadline_ms
    if request.traceparent is not None:
        headers[TRACEPARENT] = request.traceparent.encode("ascii", "replace")
    return body, headers


def decode_reply(body: bytes, headers: Mapping[str, bytes] | None = None) -> Reply | FailureReply:
    """Decode one reply record. Fields that a newer service added are skipped.

    Vectors come back as little-endian bytes of the reply's `dtype`, however they were written.

    Raises:
        UndecodableRecord: the bytes are no reply.
        InvalidRequest: a field of the reply is missing or has the wrong type.
    """
    found = parse_headers({} if headers is None else headers)
    return read_reply(bytes(body), found.content_type)

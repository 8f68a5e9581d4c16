"""Replies as record bodies. Pure.

Who calls it: `actors.publish`.
What must stay true: what cannot be written becomes a failure that says why; a body leaves room for headers
under the destination's limit.
"""

from __future__ import annotations

from actors.replies import build_rows, model_ref, size_and_norm, timings_of
from actors.route import Finished
from gpu.batch import ModelInfo
from schemas.codec import encode_reply, encode_rows, reply_headers, split_reply
from schemas.errors import ContentType, EmbedstreamError
from schemas.headers import MSGPACK
from schemas.requests import AnyRequest, Encoding
from schemas.results import FailureReply, Reply

HEADER_ROOM_BYTES = 1024
"""Kept free under the broker's record limit for headers and framing."""
OFF_LOOP_NUMBERS = 20_000
"""Numbers in a reply above which encoding leaves the event loop (JSON writes about 5 M floats/s)."""
MAX_ROWS_NUMBERS = 200_000
"""Numbers that are copied as they lie: a quarter of a millisecond, and 800 kB."""


def encode(
    reply: Reply | FailureReply,
    limit_bytes: int | None,
    content_type: ContentType,
    encoding: Encoding,
) -> list[bytes]:
    try:
        if isinstance(reply, FailureReply) or limit_bytes is None:
            return [encode_reply(reply, content_type=content_type, encoding=encoding)]
        room = _room(limit_bytes)
        return split_reply(reply, room, content_type=content_type, encoding=encoding)
    except EmbedstreamError as error:
        # It would fail the same way for ever (metadata above the room, say): tell why.
        bare = FailureReply(id=reply.id, error=error)
        return [encode_reply(bare, content_type=content_type, encoding=encoding)]


def rows_record(
    finished: Finished, info: ModelInfo, now: float, received_at: float, limit_bytes: int | None
) -> bytes | None:
    """What `build_reply` and `encode` come to where each item is one vector in one small record; else None."""
    request = finished.request
    if request.content_type != MSGPACK:
        return None
    rows = build_rows(finished)
    if rows is None or rows.size > MAX_ROWS_NUMBERS:
        return None
    dimensions, normalized = size_and_norm(request, info)
    return encode_rows(
        request.id,
        model_ref(info),
        rows.data.cast("B"),
        tokens=finished.tokens,
        truncated=finished.truncated,
        dimensions=dimensions,
        normalized=normalized,
        prompt=finished.prompt,
        timings=timings_of(finished, now, received_at),
        metadata=request.metadata,
        max_body_bytes=None if limit_bytes is None else _room(limit_bytes),
    )


def _room(limit_bytes: int) -> int:
    return max(256, limit_bytes - HEADER_ROOM_BYTES)


def headers_for(request: AnyRequest) -> dict[str, bytes]:
    return reply_headers(request.id, request.content_type, traceparent=request.traceparent)


def numbers_in(reply: Reply | FailureReply) -> int:
    if isinstance(reply, FailureReply):
        return 0
    per_vector, n_vectors, n_sparse = reply.dimensions or 1, len(reply.items), 0
    for item in reply.items:
        n_vectors += len(item.multivector or ())
        n_sparse += 0 if item.sparse is None else 2 * len(item.sparse.indices)
    return per_vector * n_vectors + n_sparse

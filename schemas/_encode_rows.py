"""A reply that is one float32 vector for each item, to msgpack: what nearly every reply is.

Who calls it: `schemas.codec`.
What must stay true: the bytes are those that `encode_reply` writes of the same reply, in a tenth of the time;
what it cannot write it leaves to that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from ._encode import finite, metadata_to_wire
from ._parts import WIDENING_BYTES
from .errors import EmbedstreamError
from .headers import MSGPACK
from .requests import DType, Task
from .results import ModelRef, Reply, Timings, Usage

_MSGPACK: Final = msgspec.msgpack.Encoder()


class _Row(msgspec.Struct, frozen=True, gc=False):
    """One entry of `data`."""

    index: int
    embedding: memoryview
    tokens: int
    truncated: bool


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`_encode.envelope_to_wire`, its fields in the same order."""

    id: str
    task: Task
    model: ModelRef
    object: Literal["list"]
    data: list[_Row]
    n: int
    dimensions: int | None = None
    dtype: DType | None = None
    normalized: bool | None = None
    prompt: str | None = None
    usage: Usage
    timings: Timings | None = None
    metadata: dict[str, Any] | None = None


def encode_rows(
    reply: Reply,
    rows: memoryview,
    *,
    tokens: Sequence[int],
    truncated: Sequence[bool],
    max_body_bytes: int | None,
) -> bytes | None:
    """The record of a whole reply, vectors written as bytes; None: let `split_reply` write it.

    Args:
        reply: of the task embed and without items, which are the rows.
        rows: the vectors' bytes one after the other, little-endian float32, finite.
        tokens, truncated: one for each row.
    """
    size = len(rows) // len(tokens)
    ends = range(size, len(rows) + 1, size)
    try:
        envelope = _Envelope(
            id=reply.id,
            task=reply.task,
            model=reply.model,
            object="list",
            data=[
                _Row(index, rows[end - size : end], n_tokens, cut)
                for index, (end, n_tokens, cut) in enumerate(
                    zip(ends, tokens, truncated, strict=True)
                )
            ],
            n=reply.n,
            dimensions=reply.dimensions,
            dtype=reply.dtype,
            normalized=reply.normalized,
            prompt=reply.prompt,
            usage=reply.usage,
            timings=None if reply.timings is None else _finite(reply.timings),
            metadata=None if reply.metadata is None else metadata_to_wire(reply.metadata, MSGPACK),
        )
        body = _MSGPACK.encode(envelope)
    except (EmbedstreamError, UnicodeEncodeError, OverflowError, TypeError):
        return None
    if max_body_bytes is not None and len(body) + WIDENING_BYTES > max_body_bytes:
        return None
    return body


def _finite(timings: Timings) -> Timings:
    """With floats only, as they are written. Raises `NonFinite`."""
    return Timings(finite(timings.queue_ms), finite(timings.forward_ms), finite(timings.total_ms))

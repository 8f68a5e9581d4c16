"""A reply that is one float32 vector for each item, to msgpack: what nearly every reply is.

Who calls it: `schemas.codec`.
What must stay true: the bytes are those that `encode_reply` writes of the same reply, in a tenth of the time;
what it cannot write it leaves to that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from ._encode import metadata_to_wire
from ._parts import WIDENING_BYTES
from .errors import EmbedstreamError
from .headers import MSGPACK
from .requests import DType, Task
from .results import ModelRef, Timings, Usage

_MSGPACK: Final = msgspec.msgpack.Encoder()


class _Row(msgspec.Struct, frozen=True, gc=False):
    """One entry of `data`."""

    index: int
    embedding: memoryview
    tokens: int
    truncated: bool


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
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
    request_id: str,
    model: ModelRef,
    rows: memoryview,
    *,
    tokens: Sequence[int],
    truncated: Sequence[bool],
    dimensions: int | None,
    normalized: bool | None,
    prompt: str | None,
    timings: Timings,
    metadata: dict[str, Any] | None,
    max_body_bytes: int | None,
) -> bytes | None:
    """The record of a whole reply to an embed request; None: let `split_reply` write it.

    Args:
        rows: the vectors' bytes one after the other, little-endian float32, finite.
        tokens, truncated: one for each row.
        timings: finite floats.
        The rest: as in `Reply`.
    """
    n, size = len(tokens), len(rows) // len(tokens)
    total = sum(tokens)
    try:
        envelope = _Envelope(
            id=request_id,
            task="embed",
            model=model,
            object="list",
            data=[_Row(0, rows, total, truncated[0])]
            if n == 1
            else [
                _Row(index, rows[index * size : (index + 1) * size], n_tokens, cut)
                for index, (n_tokens, cut) in enumerate(zip(tokens, truncated, strict=True))
            ],
            n=n,
            dimensions=dimensions,
            dtype=None if dimensions is None else "float32",
            normalized=normalized,
            prompt=prompt,
            usage=Usage(total, total),
            timings=timings,
            metadata=None if metadata is None else metadata_to_wire(metadata, MSGPACK),
        )
        body = _MSGPACK.encode(envelope)
    except (EmbedstreamError, UnicodeEncodeError, OverflowError, TypeError):
        return None
    if max_body_bytes is not None and len(body) + WIDENING_BYTES > max_body_bytes:
        return None
    return body

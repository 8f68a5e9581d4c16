"""Replies: one record per request, results or a typed failure.

Who calls it: egress builds them from the pooler's outcomes; `schemas.codec.encode_reply` writes them;
the CLI and clients read them back with `schemas.codec.decode_reply`.
What must stay true: plain values; a reply is a pure function of the request and its outcomes except
for `timings`; every result carries its `index`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import EmbedstreamError
from .requests import DType, Task


class ModelRef(msgspec.Struct, frozen=True):
    """Which model answered."""

    name: str
    fingerprint: str
    dtype: str


class Usage(msgspec.Struct, frozen=True):
    """Tokens really used: after truncation, special tokens included."""

    prompt_tokens: int
    total_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Milliseconds. `forward_ms` is the longest forward that one of the items took part in."""

    queue_ms: float
    forward_ms: float
    total_ms: float


class Sparse(msgspec.Struct, frozen=True):
    """Weights by vocabulary id, ascending."""

    indices: list[int]
    values: list[float]


class ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `data` (embed, classify) or `results` (rerank, score).

    Vectors are little-endian bytes of the reply's `dtype` in memory; the codec writes them as the
    request's `encoding` asks. `multivector` holds one such value per vector.
    `scale` is given with int8: component = integer * scale; `scales` holds the same for each vector
    of `multivector`. `spans` holds the tokens [from, to) that each of them was pooled from, when the
    request asked for `chunk_tokens`.
    `scores` maps label names to scores (classify, and score with labels); `relevance_score` is a float
    (rerank, score).
    """

    index: int
    embedding: bytes | None = None
    scale: float | None = None
    sparse: Sparse | None = None
    multivector: list[bytes] | None = None
    scales: list[float] | None = None
    spans: list[tuple[int, int]] | None = None
    scores: dict[str, float] | None = None
    relevance_score: float | None = None
    id: str | None = None
    document: str | None = None
    tokens: int | None = None
    truncated: bool | None = None
    error: EmbedstreamError | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply, or one part of it."""

    id: str
    task: Task
    model: ModelRef
    items: list[ItemReply]
    n: int  # results over all parts
    usage: Usage
    dimensions: int | None = None
    dtype: DType | None = None
    normalized: bool | None = None
    prompt: str | None = None
    part: int | None = None  # 0-based, only when split
    parts: int | None = None
    timings: Timings | None = None
    metadata: dict[str, Any] | None = None


class FailureReply(msgspec.Struct, frozen=True, kw_only=True):
    """The request failed as a whole."""

    id: str
    error: EmbedstreamError
    metadata: dict[str, Any] | None = None

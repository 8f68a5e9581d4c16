"""Bytes -> replies, for clients.

Who calls it: `schemas.codec.decode_reply`.
What must stay true: unknown fields are skipped (the service may be newer than the reader); a wrong
type raises a typed error with its path; vectors end as little-endian bytes in the reply's dtype.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from ._record import sniff
from .errors import (
    ContentType,
    EmbedstreamError,
    InvalidRequest,
    NonFinite,
    TooDeep,
    UndecodableRecord,
)
from .headers import JSON
from .requests import DType, Task
from .results import FailureReply, ItemReply, ModelRef, Reply, Sparse, Timings, Usage
from .vectors import from_wire


class _Item(msgspec.Struct):
    index: int
    embedding: Any = None
    scale: float | None = None
    sparse: Sparse | None = None
    multivector: list[Any] | None = None
    scales: list[float] | None = None
    spans: list[tuple[int, int]] | None = None
    scores: dict[str, float] | None = None
    relevance_score: float | None = None
    id: str | None = None
    document: str | None = None
    tokens: int | None = None
    truncated: bool | None = None
    error: dict[str, Any] | None = None


class _Reply(msgspec.Struct):
    id: str
    error: dict[str, Any] | None = None
    task: Task | None = None
    model: ModelRef | None = None
    data: list[_Item] | None = None
    results: list[_Item] | None = None
    n: int | None = None
    dimensions: int | None = None
    dtype: DType | None = None
    normalized: bool | None = None
    prompt: str | None = None
    usage: Usage | None = None
    part: int | None = None
    parts: int | None = None
    timings: Timings | None = None
    metadata: dict[str, Any] | None = None


_MSGPACK: Final = msgspec.msgpack.Decoder(_Reply)
_JSON: Final = msgspec.json.Decoder(_Reply)


def read_reply(body: bytes, declared: ContentType | None) -> Reply | FailureReply:
    """Decode one reply; see `schemas.codec.decode_reply`."""
    actual = sniff(body)
    if actual is None:
        raise UndecodableRecord("the reply is neither a msgpack map nor a JSON object")
    if declared is not None and declared != actual:
        raise UndecodableRecord(f"the content-type header says {declared}, the reply is {actual}")
    try:
        wire = (_JSON if actual == JSON else _MSGPACK).decode(body)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        if message.startswith("Invalid enum value"):
            message = "not a value of this version"
        raise InvalidRequest(message.replace("`", ""), path=where.rstrip("`") or "$") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UndecodableRecord("the reply is malformed") from None
    except RecursionError:
        raise TooDeep("the reply nests too deeply") from None
    if wire.error is not None:
        return FailureReply(
            id=wire.id, error=EmbedstreamError.from_wire(wire.error), metadata=wire.metadata
        )
    return _results(wire)


def _results(wire: _Reply) -> Reply:
    if wire.task is None:
        raise InvalidRequest("the reply has neither task nor error", path="$.task")
    name = "data" if wire.task in ("embed", "classify") else "results"
    items = wire.data if name == "data" else wire.results
    if items is None:
        raise InvalidRequest("the reply has no results", path=f"$.{name}")
    for field in ("model", "n", "usage"):
        if getattr(wire, field) is None:
            raise InvalidRequest("the reply lacks a field", path=f"$.{field}")
    assert wire.model is not None and wire.n is not None and wire.usage is not None
    dtype = wire.dtype or "float32"
    return Reply(
        id=wire.id,
        task=wire.task,
        model=wire.model,
        items=[_item(item, dtype, f"$.{name}[{i}]") for i, item in enumerate(items)],
        n=wire.n,
        usage=wire.usage,
        dimensions=wire.dimensions,
        dtype=wire.dtype,
        normalized=wire.normalized,
        prompt=wire.prompt,
        part=wire.part,
        parts=wire.parts,
        timings=wire.timings,
        metadata=wire.metadata,
    )


def _check_finite(item: _Item) -> None:
    numbers = [*(item.scores or {}).values(), *(item.sparse.values if item.sparse else ())]
    numbers += [
        x for x in (item.relevance_score, item.scale, *(item.scales or ())) if x is not None
    ]
    if not all(map(math.isfinite, numbers)):
        raise NonFinite("a result is not finite", items=[item.index])


def _item(item: _Item, dtype: DType, path: str) -> ItemReply:
    try:
        _check_finite(item)
        return ItemReply(
            index=item.index,
            embedding=None if item.embedding is None else from_wire(item.embedding, dtype),
            scale=item.scale,
            sparse=item.sparse,
            multivector=None
            if item.multivector is None
            else [from_wire(vector, dtype) for vector in item.multivector],
            scales=item.scales,
            spans=item.spans,
            scores=item.scores,
            relevance_score=item.relevance_score,
            id=item.id,
            document=item.document,
            tokens=item.tokens,
            truncated=item.truncated,
            error=None if item.error is None else EmbedstreamError.from_wire(item.error),
        )
    except EmbedstreamError as error:
        error.path = path
        raise

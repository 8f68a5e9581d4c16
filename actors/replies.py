"""Building a reply from a request and its outcomes. Pure.

Who calls it: the reply destination, once per request.
What must stay true: result i belongs to item i of the request; errors sit at their index; the
reply is a function of request, outcomes and model alone except for `timings`; arrays arrive as
finite float32 and leave as little-endian bytes of the asked dtype.
"""

from __future__ import annotations

import numpy as np

from actors.route import Finished
from gpu.batch import Float32, ItemOutcome, ItemResult, ModelInfo
from schemas.errors import EmbedstreamError, Internal, NonFinite
from schemas.requests import (
    AnyRequest,
    ClassifyRequest,
    DType,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from schemas.results import (
    FailureReply,
    ItemReply,
    ModelRef,
    Reply,
    Sparse,
    Timings,
    Usage,
)

_LITTLE = np.dtype("<f4")


def quantize(vector: Float32, dtype: DType) -> tuple[bytes, float | None]:
    """float32 [d] -> little-endian bytes of `dtype`, and the scale for int8.

    float16: IEEE half, round to nearest. int8: symmetric per vector, scale = max|x| / 127 and
    x ~ q * scale, so that no calibration set is needed. binary: sign bits, most significant bit
    first, 1 where x > 0 (numpy.packbits; as sentence-transformers' ubinary).
    Raises `NonFinite` when float16 overflows.
    """
    if dtype == "float32":
        return vector.astype("<f4", copy=False).tobytes(), None
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = vector.astype("<f2")
        if not np.isfinite(half).all():
            raise NonFinite("a component exceeds the range of float16; ask for float32")
        return half.tobytes(), None
    if dtype == "int8":
        peak = float(np.abs(vector).max(initial=0.0))
        scale = peak / 127.0 if peak > 0 else 1.0
        return np.clip(np.rint(vector / scale), -127, 127).astype(np.int8).tobytes(), scale
    return np.packbits(vector > 0).tobytes(), None


def build_reply(
    finished: Finished, info: ModelInfo, *, now: float, received_at: float
) -> Reply | FailureReply:
    """The whole reply. `now` and `received_at` are monotonic seconds, for `timings` only."""
    request = finished.request
    if finished.failure is not None:
        return FailureReply(id=request.id, error=finished.failure, metadata=request.metadata)
    plain = isinstance(request, EmbedRequest) and _is_plain(request)
    items = [
        _plain_item(finished, index, outcome)
        if plain and type(outcome) is ItemResult and outcome.is_dense_only
        else _item_reply(finished, index, outcome)
        for index, outcome in enumerate(finished.outcomes)
    ]
    if isinstance(request, RerankRequest):
        items = _ranked(items, request)
    return _reply_of(finished, info, items, len(items), now, received_at)


def build_rows(finished: Finished) -> Float32 | None:
    """What nearly every reply is made of: a finite float32 vector of each item, one after the other [n x d];
    None: `build_reply` has to build it."""
    request, outcomes = finished.request, finished.outcomes
    if (
        type(request) is not EmbedRequest
        or finished.failure is not None
        or request.encoding != "bytes"
        or not _is_plain(request)
    ):
        return None
    rows = [
        row
        for outcome in outcomes
        if type(outcome) is ItemResult
        and (row := outcome.dense) is not None
        and outcome.scores is None
        and outcome.sparse is None
        and outcome.multivector is None
        and outcome.spans is None
    ]
    if not rows or len(rows) != len(outcomes):
        return None
    together = rows[0]
    if len(rows) > 1:
        if len(set(map(len, rows))) != 1:
            return None
        together = np.concatenate(rows)
    if together.dtype != _LITTLE or not together.size or not together.flags.c_contiguous:
        return None
    return together if 0 not in np.isfinite(together).tobytes() else None


def _is_plain(request: EmbedRequest) -> bool:
    return request.dtype == "float32" and request.outputs in ((), ("dense",))


def _reply_of(
    finished: Finished,
    info: ModelInfo,
    items: list[ItemReply],
    n: int,
    now: float,
    received_at: float,
) -> Reply:
    request = finished.request
    prompt_tokens = sum(finished.tokens)
    dimensions, normalized = size_and_norm(request, info)
    return Reply(
        id=request.id,
        task=request.task,
        model=model_ref(info),
        items=items,
        n=n,
        usage=Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens),
        dimensions=dimensions,
        dtype=request.dtype
        if dimensions is not None and isinstance(request, EmbedRequest)
        else None,
        normalized=normalized,
        prompt=finished.prompt,
        timings=timings_of(finished, now, received_at),
        metadata=request.metadata,
    )


def model_ref(info: ModelInfo) -> ModelRef:
    """Which model answered."""
    return ModelRef(info.name, info.fingerprint, info.dtype)


def size_and_norm(request: AnyRequest, info: ModelInfo) -> tuple[int | None, bool | None]:
    """Of the vectors in the reply; None, None: it holds none."""
    if not isinstance(request, EmbedRequest) or (size := _vector_size(request, info)) is None:
        return None, None
    return size, info.normalized if request.normalize is None else request.normalize


def timings_of(finished: Finished, now: float, received_at: float) -> Timings:
    """`now` and `received_at`: monotonic seconds."""
    first = finished.first_forward_at
    return Timings(
        _ms((now if first is None else first) - received_at),
        _ms(finished.forward_s),
        _ms(now - received_at),
    )


def _ms(seconds: float) -> float:
    return (
        round(seconds * 1e6) / 1000
    )  # with `round(x, 3)` three of them cost as much as the encoding


def _vector_size(request: EmbedRequest, info: ModelInfo) -> int | None:
    """Size of the vectors in the reply, the dense one's when there are both; None: no vectors.

    A size that was asked for is the dense vector's, where the model has one.
    """
    outputs = request.outputs or info.default_outputs
    if "dense" in outputs:
        return request.dimensions or info.dimensions
    if "multivector" not in outputs:
        return None
    asked = request.dimensions if info.dimensions is None else None
    return asked or info.multivector_dimensions


def _ranked(items: list[ItemReply], request: RerankRequest) -> list[ItemReply]:
    """Best first, ties by index, errors last; cut to `top_n` (errors are not counted as hits)."""
    if not request.sort:
        return items
    hits = [item for item in items if item.relevance_score is not None]
    errors = [item for item in items if item.relevance_score is None]
    hits.sort(key=lambda item: (-(item.relevance_score or 0.0), item.index))
    if request.top_n is not None:
        hits = hits[: request.top_n]
    return hits + errors


def _plain_item(finished: Finished, index: int, outcome: ItemResult) -> ItemReply:
    """What nearly every item of a reply is: one float32 vector."""
    assert outcome.dense is not None
    return ItemReply(
        index=index,
        embedding=outcome.dense.astype("<f4", copy=False).tobytes(),
        tokens=finished.tokens[index],
        truncated=finished.truncated[index],
    )


def _item_reply(finished: Finished, index: int, outcome: ItemOutcome | None) -> ItemReply:
    request = finished.request
    if outcome is None:
        outcome = Internal("an item was never answered; this is a bug", items=(index,))
    if isinstance(outcome, EmbedstreamError):
        return ItemReply(index=index, error=outcome)
    try:
        if isinstance(request, EmbedRequest):
            return _embed_item(finished, request, index, outcome)
        if isinstance(request, ClassifyRequest):
            return _classify_item(finished, index, outcome)
        return _score_item(finished, request, index, outcome)
    except EmbedstreamError as error:
        error.items = (index,)
        return ItemReply(index=index, error=error)


def _embed_item(
    finished: Finished, request: EmbedRequest, index: int, outcome: ItemResult
) -> ItemReply:
    # The runner gives what was asked for, or the model's own outputs when nothing was named.
    assert outcome.spans is not None or all(
        getattr(outcome, name) is not None for name in request.outputs
    )
    embedding = scale = None
    if outcome.dense is not None:
        embedding, scale = quantize(outcome.dense, request.dtype)
    sparse = None
    if outcome.sparse is not None:
        ids, weights = outcome.sparse
        sparse = Sparse(indices=ids.tolist(), values=weights.tolist())
    multivector = scales = None
    if outcome.multivector is not None:
        rows = [quantize(row, request.dtype) for row in outcome.multivector]
        multivector = [data for data, _ in rows]
        if request.dtype == "int8":
            scales = [one for _, one in rows if one is not None]
    return ItemReply(
        index=index,
        embedding=embedding,
        scale=scale,
        sparse=sparse,
        multivector=multivector,
        scales=scales,
        spans=None if outcome.spans is None else list(outcome.spans),
        tokens=finished.tokens[index],
        truncated=finished.truncated[index],
    )


def _classify_item(finished: Finished, index: int, outcome: ItemResult) -> ItemReply:
    assert outcome.scores is not None
    labels = finished.labels or tuple(f"LABEL_{i}" for i in range(len(outcome.scores)))
    return ItemReply(
        index=index,
        scores={label: float(s) for label, s in zip(labels, outcome.scores, strict=True)},
        tokens=finished.tokens[index],
        truncated=finished.truncated[index],
    )


def _score_item(
    finished: Finished, request: RerankRequest, index: int, outcome: ItemResult
) -> ItemReply:
    assert outcome.scores is not None
    document = request.documents[index]
    named = request.labels if isinstance(request, ScoreRequest) else ()
    by_label: dict[str, float] | None = None
    if named or len(outcome.scores) != 1:
        labels = map(str, named or finished.labels)
        by_label = dict(zip(labels, map(float, outcome.scores), strict=True))
    return ItemReply(
        index=index,
        scores=by_label,
        relevance_score=float(outcome.scores[0]) if by_label is None else None,
        id=document.id,
        document=document.text if request.return_documents else None,
        tokens=finished.tokens[index],
        truncated=finished.truncated[index],
    )

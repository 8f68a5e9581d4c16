"""Texts beyond the model's limit: cut into chunks whose vectors are averaged; spans of one long forward.

Who calls it: `gpu.encode.request_check` and `gpu.encode.text` (what is possible, how a text is cut), `gpu.model_runner`
(`in_chunks`) and `gpu.answer.outputs` (`spans_of`).
What must stay true: one item stays one item with its whole cost in tokens, so budgets hold; no chunk is
longer than the model's limit and no pass over the device holds more tokens than the batch budget; each
chunk keeps the special tokens and the prompt; an average is taken in fp32 over vectors that are what
each chunk would get on its own. numpy only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpu.batch import (
    EncodedItem,
    Float32,
    Int32,
    ItemOptions,
    ItemOutcome,
    ItemResult,
    PackedBatch,
    pack,
)
from gpu.folder.static import STATIC_TYPES
from schemas.errors import EmbedstreamError, NonFinite, TooLong, Unsupported
from schemas.requests import EmbedRequest, Output

if TYPE_CHECKING:
    from gpu.folder.spec import ModelSpec

CHUNKS = "chunks"
"""Key in `EncodedItem.extras`: tokens of each chunk, in order; their sum is the item's."""
MAX_CHUNKS, MAX_CHUNK_TOKENS = 64, 65536
"""Chunks of one text, and tokens of all of them: an executor thread works on them before it takes the
next batch, and a lease has to outlast that."""
NORM_EPS = 1e-12  # as gpu.pooler


def check_long(request: EmbedRequest, outputs: Sequence[Output], spec: ModelSpec) -> None:
    """Raises `Unsupported` when the model cannot do what `aggregate` or `chunk_tokens` asks."""
    if spec.model_type in STATIC_TYPES:
        for name in ("aggregate", "chunk_tokens"):
            if getattr(request, name) is not None:
                raise Unsupported(
                    f"{name} is for models that read a text in context, this one does not",
                    path=f"$.{name}",
                )
    if request.aggregate is not None and (tuple(outputs) != ("dense",) or spec.pooling is None):
        raise Unsupported(
            f"aggregate averages dense vectors, and {', '.join(outputs)} was asked for",
            path="$.aggregate",
        )
    if request.chunk_tokens is not None and spec.pooling != "mean":
        raise Unsupported(
            "chunk_tokens pools spans of one forward, which only a model with mean pooling allows; "
            f"this one has {spec.pooling or 'no'} pooling",
            path="$.chunk_tokens",
        )


def max_chunks(limit: int) -> int:
    """Chunks that one text may have in a model of that limit; at least 2."""
    return max(2, min(MAX_CHUNKS, MAX_CHUNK_TOKENS // limit))


def chunked(
    head: Int32,
    body: Int32,
    repeated: Int32,
    tail: Int32,
    *,
    limit: int,
    options: ItemOptions,
    index: int,
    pooled_from: int = 0,
) -> EncodedItem | EmbedstreamError:
    """One item of several chunks: each is head, repeated (from the second on), a piece of body, tail.

    head, tail: special tokens. body: the text's own tokens, a prompt before it included; repeated: the
    prompt's tokens, which the first chunk has in its body. pooled_from: see `EncodedItem`, per chunk.
    Returns `TooLong` when more than `max_chunks` would be needed, or a prompt fills a chunk.
    """
    room = limit - len(head) - len(tail)
    later = room - len(repeated)
    n_chunks = max_chunks(limit)
    most = room + (n_chunks - 1) * later
    if later < 1 or len(body) > most:
        return TooLong(
            f"item {index} has {len(body)} tokens; aggregate takes up to {max(most, 0)} "
            f"({n_chunks} chunks); split it",
            items=(index,),
            given=len(body),
            limit=max(most, 0),
        )
    pieces = [np.concatenate((head, body[:room], tail))]
    pieces += [
        np.concatenate((head, repeated, body[start : start + later], tail))
        for start in range(room, len(body), later)
    ]
    return EncodedItem(
        np.concatenate(pieces).astype(np.int32, copy=False),
        options,
        pooled_from=pooled_from,
        extras={CHUNKS: tuple(len(piece) for piece in pieces)},
    )


def in_chunks(
    batch: PackedBatch,
    forward: Callable[[PackedBatch], list[ItemOutcome]],
    *,
    budget: int,
    normalize: bool,
) -> list[ItemOutcome] | None:
    """One outcome per row, chunked items averaged; None when no item is chunked.

    forward: an ordinary batch in, outcomes out, called with packs of at most `budget` tokens (one
    longer item alone). normalize: the model's own default.
    """
    if not any(CHUNKS in item.extras for item in batch.items):
        return None
    parts: list[EncodedItem] = []
    owners: list[list[int]] = []
    for item in batch.items:
        pieces = _pieces(item)
        owners.append(list(range(len(parts), len(parts) + len(pieces))))
        parts.extend(pieces)
    found: list[ItemOutcome | None] = [None] * len(parts)
    for group in _groups(parts, budget):
        packed = pack([parts[i] for i in group])
        for row, outcome in enumerate(forward(packed)):
            found[group[int(packed.item_index[row])]] = outcome
    done: list[ItemOutcome] = []
    for item, places in zip(batch.items, owners, strict=True):
        outcomes = [found[place] for place in places]
        assert all(outcome is not None for outcome in outcomes)
        if CHUNKS in item.extras:
            done.append(_average(item, outcomes, normalize))  # type: ignore[arg-type]
        else:
            done.append(outcomes[0])  # type: ignore[arg-type]
    return done


def _pieces(item: EncodedItem) -> list[EncodedItem]:
    lengths = item.extras.get(CHUNKS)
    if lengths is None:
        return [item]
    # Native size: the cut comes after the average.
    options = dataclasses.replace(item.options, dimensions=None)
    extras = {name: value for name, value in item.extras.items() if name != CHUNKS}
    ends = np.cumsum(lengths)
    return [
        EncodedItem(
            item.input_ids[end - length : end],
            options,
            pooled_from=item.pooled_from,
            extras=extras,
        )
        for end, length in zip(ends, lengths, strict=True)
    ]


def _groups(parts: Sequence[EncodedItem], budget: int) -> list[list[int]]:
    """Longest first, so that equal lengths share attention calls; greedy up to the budget."""
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(parts)), key=lambda i: -parts[i].n_tokens):
        if not groups or parts[i].n_tokens > room:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= parts[i].n_tokens
    return groups


def _average(item: EncodedItem, outcomes: Sequence[ItemOutcome], normalize: bool) -> ItemOutcome:
    """Mean of the chunks' vectors weighted by their tokens, cut, then normalised as was asked."""
    vectors: list[Float32] = []
    for outcome in outcomes:
        if isinstance(outcome, EmbedstreamError):
            return outcome
        assert outcome.dense is not None, (
            "gpu.encode.request_check lets only dense vectors be averaged"
        )
        vectors.append(outcome.dense)
    weights = np.asarray(item.extras[CHUNKS], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = (np.stack(vectors) * weights[:, None]).sum(axis=0) / weights.sum()
    mean = mean[: item.options.dimensions].astype(np.float32)
    if normalize if item.options.normalize is None else item.options.normalize:
        mean = mean / np.maximum(np.linalg.norm(mean), np.float32(NORM_EPS))
    if not np.isfinite(mean).all():
        return NonFinite("the average of the chunks is not finite")
    return ItemResult(dense=mean)


def spans_of(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """[start, end) cut into the fewest spans of at most `chunk_tokens`, as equal as possible."""
    n = -(-(end - start) // chunk_tokens)
    bounds = [start + (end - start) * i // n for i in range(n + 1)]
    return list(pairwise(bounds))

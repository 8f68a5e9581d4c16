"""Long texts after the forward: chunks averaged into one vector, spans of one forward.

Who calls it: `gpu.model_runner` (`in_chunks`) and `gpu.answer.outputs` (`spans_of`).
What must stay true: no pass over the device holds more tokens than the batch budget; an average is taken
in fp32 over vectors that are what each chunk would get on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gpu.batch import (
    EncodedItem,
    Float32,
    ItemOutcome,
    ItemResult,
    PackedBatch,
    pack,
)
from gpu.encode.long_texts import CHUNKS
from gpu.encode.spans import SPANS
from gpu.pooler import NORM_EPS, flaw
from schemas.errors import EmbedstreamError


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
    found = in_groups(parts, forward, budget)
    done: list[ItemOutcome] = []
    for item, places in zip(batch.items, owners, strict=True):
        outcomes = [found[place] for place in places]
        if CHUNKS in item.extras:
            done.append(_average(item, outcomes, normalize))
        else:
            done.append(outcomes[0])
    return done


def in_groups(
    parts: Sequence[EncodedItem],
    forward: Callable[[PackedBatch], list[ItemOutcome]],
    budget: int,
) -> list[ItemOutcome]:
    """One outcome per part, in order, computed in packs of at most `budget` tokens."""
    found: dict[int, ItemOutcome] = {}
    for group in _groups(parts, budget):
        packed = pack([parts[i] for i in group])
        for row, outcome in enumerate(forward(packed)):
            found[group[int(packed.item_index[row])]] = outcome
    return [found[i] for i in range(len(parts))]


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
        assert outcome.dense is not None, "gpu.encode.supported lets only dense vectors be averaged"
        vectors.append(outcome.dense)
    weights = np.asarray(item.extras[CHUNKS], dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = (np.stack(vectors) * weights[:, None]).sum(axis=0) / weights.sum()
    mean = mean[: item.options.dimensions].astype(np.float32)
    unit = normalize if item.options.normalize is None else item.options.normalize
    if unit:
        mean = mean / np.maximum(np.linalg.norm(mean), np.float32(NORM_EPS))
    return flaw(mean, unit) or ItemResult(dense=mean)


def spans_of(item: EncodedItem) -> list[tuple[int, int]]:
    """The item's own tokens [from, to) of each vector that late chunking asks for; none: it does not."""
    if SPANS in item.extras:
        return [(int(start), int(end)) for start, end in item.extras[SPANS]]
    if item.options.chunk_tokens is None:
        return []
    skipped = item.pooled_from if item.pooled_from < item.n_tokens else 0
    return equal_spans(skipped, item.n_tokens, item.options.chunk_tokens)


def equal_spans(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """[start, end) cut into the fewest spans of at most `chunk_tokens`, as equal as possible."""
    n = -(-(end - start) // chunk_tokens)
    bounds = [start + (end - start) * i // n for i in range(n + 1)]
    return list(pairwise(bounds))

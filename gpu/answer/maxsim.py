"""Scores of a model with one vector per token: for each token of the query its nearest one of the document.

Who calls it: `gpu.model_runner`.
What must stay true: a query that several documents of a pack are scored against is computed once; a score
follows from the two texts alone, and is what MaxSim of the same model's vectors gives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu.answer.chunks import in_groups
from gpu.batch import EncodedItem, Float32, ItemOptions, ItemOutcome, ItemResult, PackedBatch
from gpu.encode.late import QUERY
from schemas.errors import EmbedstreamError, EmptyInput

_VECTORS = ItemOptions(outputs=("multivector",))


def against_queries(
    batch: PackedBatch, forward: Callable[[PackedBatch], list[ItemOutcome]], *, budget: int
) -> list[ItemOutcome] | None:
    """One outcome per row; None when no item has a query beside it.

    forward: an ordinary batch in, outcomes out, called with packs of at most `budget` tokens.
    """
    queries = {id(q): q for item in batch.items if (q := item.extras.get(QUERY)) is not None}
    if not queries:
        return None
    parts = [_alone(query) for query in queries.values()]
    parts += [_alone(item) if QUERY in item.extras else item for item in batch.items]
    found = in_groups(parts, forward, budget)
    asked = dict(zip(queries, found, strict=False))
    rows = found[len(queries) :]
    return [
        _score(asked[id(item.extras[QUERY])], row) if QUERY in item.extras else row
        for item, row in zip(batch.items, rows, strict=True)
    ]


def _alone(item: EncodedItem) -> EncodedItem:
    extras = {name: value for name, value in item.extras.items() if name != QUERY}
    return EncodedItem(item.input_ids, _VECTORS, attended=item.attended, extras=extras)


def _score(query: ItemOutcome, document: ItemOutcome) -> ItemOutcome:
    for side in (query, document):
        if isinstance(side, EmbedstreamError):
            return side
    assert isinstance(query, ItemResult) and isinstance(document, ItemResult)
    assert query.multivector is not None and document.multivector is not None
    if not len(document.multivector):
        return EmptyInput("every token of the document is on the model's skip list")
    return ItemResult(scores=maxsim(query.multivector, document.multivector))


def maxsim(query: Float32, document: Float32) -> Float32:
    """[1] float32: ``sum_i max_j (q_i . d_j)`` (ColBERT), in float64, whose rounding no kernel shows through.

    query: [n, size]; document: [m, size], m > 0.
    """
    products = query.astype(np.float64) @ document.astype(np.float64).T
    return np.array([products.max(axis=1).sum()], dtype=np.float32)

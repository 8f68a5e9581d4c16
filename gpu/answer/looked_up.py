"""Queries of inference-free SPLADE: a weight for each token that occurs, and no forward.

Who calls it: `gpu.model_runner`.
What must stay true: a query's weights follow from its tokens alone; documents of the same pack are computed as
ever. Formula: Sentence-Transformers' `SparseStaticEmbedding`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpu.batch import EncodedItem, ItemOutcome, ItemResult, PackedBatch, pack
from gpu.faults import ModelLoadError
from gpu.folder.outputs import QUERY_PROMPT
from gpu.pooler import read_weights


class QueryTable:
    """The weights of one model. Raises `ModelLoadError` for a table that does not fit.

    folder: holds ``weight`` [vocab_size] in safetensors.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        state = read_weights(folder, allow_pickle=False)
        weight = state.get("weight")
        if set(state) != {"weight"} or weight is None or weight.ndim != 1:
            raise ModelLoadError(
                f"{folder}: holds {sorted(state)}, wanted one weight for each token"
            )
        self._weight = weight.float().numpy()
        if len(self._weight) > vocab_size or not np.isfinite(self._weight).all():
            raise ModelLoadError(f"{folder}: {len(self._weight)} weights for {vocab_size} tokens")
        if (self._weight < 0).any():
            raise ModelLoadError(
                f"{folder}: a weight is below zero, which no sparse answer can hold"
            )

    def __call__(
        self, batch: PackedBatch, forward: Callable[[PackedBatch], list[ItemOutcome]]
    ) -> list[ItemOutcome] | None:
        """One outcome per row; None when no row is a query. forward: an ordinary batch in, outcomes out."""
        queries = [row for row, item in enumerate(batch.items) if _is_query(item)]
        if not queries:
            return None
        found: dict[int, ItemOutcome] = {row: self._one(batch.items[row]) for row in queries}
        others = [row for row in range(batch.n_items) if row not in found]
        if others:  # `pack` is a stable sort, so rows keep their order
            outcomes = forward(pack([batch.items[row] for row in others]))
            found |= dict(zip(others, outcomes, strict=True))
        return [found[row] for row in range(batch.n_items)]

    def _one(self, item: EncodedItem) -> ItemOutcome:
        ids = np.unique(item.input_ids[item.input_ids < len(self._weight)])
        ids = ids[self._weight[ids] > 0].astype(np.int32)
        return ItemResult(sparse=(ids, self._weight[ids]))


def _is_query(item: EncodedItem) -> bool:
    return item.extras.get("prompt_name") == QUERY_PROMPT

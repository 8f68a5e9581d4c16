"""Kinds of vectors that a collection holds: dense, sparse, one per token. Pure.

Who calls it: the destination makes them of results; `Collection`s check and store them; `search` asks
with them.
What must stay true: a collection holds vectors of one kind; a vector that nothing can be compared with
(not finite, all zero, empty) never reaches a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gpu.batch import Float32, Int32, ItemResult
from schemas.requests import Output

METRICS: Mapping[Output, str] = {"dense": "cosine", "sparse": "dot", "multivector": "maxsim"}
"""How vectors of a kind are compared: cosine similarity; the sum of products of weights; the sum, over
the vectors of the question, of the largest cosine similarity with one of the chunk (ColBERT's)."""
TAKEN_BY: Mapping[Output, tuple[str, ...]] = {
    "sparse": ("Qdrant", "PostgreSQL", "Milvus"),
    "multivector": ("Qdrant", "LanceDB"),
}
"""The stores that have vectors of a kind; every store has dense ones."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """indices: [n] int32, ascending, of a vocabulary. values: [n] float32, their weights."""

    indices: Int32
    values: Float32

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes

    @property
    def size(self) -> int:
        """Numbers in it."""
        return 2 * len(self.indices)

    def tobytes(self) -> bytes:
        """To compare two of them."""
        return self.indices.tobytes() + self.values.tobytes()

    def as_dict(self) -> dict[int, float]:
        """Index -> weight."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))

    @staticmethod
    def of(indices: object, values: object) -> SparseVector:
        """As a store gives it back: in any order."""
        ids, weights = np.asarray(indices, np.int32), np.asarray(values, np.float32)
        order = np.argsort(ids, kind="stable")
        return SparseVector(ids[order], weights[order])


Vector: TypeAlias = Float32 | SparseVector
"""Dense: [dimensions] float32. One per token: [n_vectors, dimensions] float32."""


def dense(vector: Vector) -> Float32:
    """Of a collection that holds arrays."""
    assert isinstance(vector, np.ndarray), "the kind of the collection says so"
    return vector


def sparse(vector: Vector) -> SparseVector:
    """Of a collection that holds sparse ones."""
    assert isinstance(vector, SparseVector), "the kind of the collection says so"
    return vector


def vectors_of(result: ItemResult, *, late: bool) -> list[Vector]:
    """One vector for each chunk of an item: of its spans with late chunking, else its own."""
    if result.sparse is not None:
        return [SparseVector(*result.sparse)]
    if result.multivector is not None:
        return list(result.multivector) if late else [result.multivector]
    assert result.dense is not None, "an indexing route asks for one kind of vectors"
    return [result.dense]


def flaw_of(vector: Vector, kind: Output, dimensions: int) -> str | None:
    """Why no store shall see this vector, to be read behind "the vector of chunk n"; None: it may."""
    if kind == "sparse":
        if not isinstance(vector, SparseVector):
            return "is not sparse"
        if not len(vector.indices):
            return "is empty: no word of the vocabulary has a weight, and nothing would find it"
        if not np.isfinite(vector.values).all() or not vector.values.all():
            return "has a weight that is zero or not finite"
        if (np.diff(vector.indices) <= 0).any() or not (
            vector.indices[0] >= 0 and vector.indices[-1] < dimensions
        ):
            return f"has indices out of order, or beyond the {dimensions} of the collection"
        return None
    rows = vector[None] if isinstance(vector, np.ndarray) and kind == "dense" else vector
    if not isinstance(rows, np.ndarray) or rows.ndim != 2:
        return "is of another kind than the collection's"
    if not len(rows):
        return "is empty: no token of it has one, and nothing would find it"
    if rows.shape[1] != dimensions:
        return f"has {rows.shape[1]} dimensions, the collection {dimensions}"
    if not np.isfinite(rows).all():
        return "is not finite"
    if not rows.any(axis=1).all():
        return "is zero: cosine is not defined"
    return None

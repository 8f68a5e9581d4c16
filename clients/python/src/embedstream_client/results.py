"""What calls return. All results are sequences of their items and carry `model`, `usage` and `id`.

Vectors are numpy arrays when numpy is installed: read-only views of the reply's bytes, not copies.
Otherwise they are lists of numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ._wire.errors import EmbedstreamError
from ._wire.requests import DType
from ._wire.results import ItemReply, ModelRef, Reply, Sparse, Timings, Usage
from ._wire.vectors import to_numbers

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Classification",
    "Classifications",
    "Embedding",
    "Embeddings",
    "ModelRef",
    "Ranked",
    "Ranking",
    "Score",
    "Scores",
    "Sparse",
    "Timings",
    "Usage",
]

ItemT = TypeVar("ItemT", bound="_Item")
_NUMPY_DTYPE = {"float32": "<f4", "float16": "<f2", "int8": "i1", "binary": "u1"}


@functools.lru_cache(maxsize=1)
def _from_buffer() -> Callable[[bytes, DType], Any]:
    try:
        import numpy as np
    except ImportError:
        return to_numbers
    return lambda data, dtype: np.frombuffer(data, _NUMPY_DTYPE[dtype])


class _Item:
    """One item's outcome. `error` is None unless the item failed (only with `partial=True`)."""

    __slots__ = ("item",)

    def __init__(self, item: ItemReply) -> None:
        self.item = item
        """The entry of the reply as the wire contract has it."""

    @property
    def index(self) -> int:
        """Position of the item in the request."""
        return self.item.index

    @property
    def error(self) -> EmbedstreamError | None:
        return self.item.error

    @property
    def tokens(self) -> int | None:
        """Tokens really used."""
        return self.item.tokens

    @property
    def truncated(self) -> bool:
        return bool(self.item.truncated)

    def _checked(self) -> ItemReply:
        if self.item.error is not None:
            raise self.item.error
        return self.item

    def __repr__(self) -> str:
        state = f"error={self.error.code!r}" if self.error is not None else f"tokens={self.tokens}"
        return f"{type(self).__name__}(index={self.index}, {state})"


class Embedding(_Item):
    """One text's vectors. Every attribute raises the item's error when it failed."""

    __slots__ = ("dtype",)

    def __init__(self, item: ItemReply, dtype: DType) -> None:
        super().__init__(item)
        self.dtype: DType = dtype

    @classmethod
    def failed(cls, index: int, error: EmbedstreamError) -> Embedding:
        """The outcome of an item that was refused."""
        return cls(ItemReply(index=index, error=error), "float32")

    @property
    def vector(self) -> Any:
        """The dense vector: [d] of the asked dtype (`binary`: [d/8] uint8, sign bits, first bit
        highest). With int8 a component is `vector[i] * scale`."""
        data = self._checked().embedding
        if data is None:
            raise ValueError("the model gave no dense vector; see sparse and multivector")
        return _from_buffer()(data, self.dtype)

    @property
    def scale(self) -> float | None:
        return self._checked().scale

    @property
    def sparse(self) -> Sparse | None:
        """Vocabulary ids, ascending, and their weights."""
        return self._checked().sparse

    @property
    def multivector(self) -> list[Any] | None:
        """One vector per token, or per span with `chunk_tokens`."""
        found = self._checked().multivector
        return None if found is None else [_from_buffer()(data, self.dtype) for data in found]

    @property
    def scales(self) -> list[float] | None:
        """With int8: the scale of each vector of `multivector`."""
        return self._checked().scales

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """With `chunk_tokens`: [from, to) of each vector, in the item's own tokens."""
        return self._checked().spans


class Score(_Item):
    """How well one document answers the query."""

    __slots__ = ("document",)

    def __init__(self, item: ItemReply, document: str) -> None:
        super().__init__(item)
        self.document = document
        """The document's text, as it was asked about; empty where token ids were sent."""

    @property
    def score(self) -> float:
        """The one score. Raises `ValueError` where there is one per label."""
        found = self._checked().relevance_score
        if found is None:
            raise ValueError("the model gave a score per label; see scores")
        return found

    @property
    def scores(self) -> dict[str, float]:
        """By label, where the request named labels or the model has several; ids as decimal digits."""
        found = self._checked().scores
        if found is None:
            raise ValueError("the model gave one score; see score")
        return found

    @property
    def id(self) -> str | None:
        """The document's id, where the request gave one."""
        return self.item.id


class Ranked(Score):
    """One document of a ranking."""

    __slots__ = ()


class Classification(_Item):
    """One text's scores by label."""

    __slots__ = ()

    @property
    def scores(self) -> dict[str, float]:
        found = self._checked().scores
        assert found is not None
        return found

    @property
    def label(self) -> str:
        """The label with the highest score."""
        return max(self.scores, key=self.scores.__getitem__)

    @property
    def score(self) -> float:
        """The highest score."""
        return max(self.scores.values())


class _Items(Sequence[ItemT], Generic[ItemT]):
    """Common to all results."""

    def __init__(self, reply: Reply, items: list[ItemT]) -> None:
        self._reply = reply
        self._items = items

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | Sequence[ItemT]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    @property
    def id(self) -> str:
        """Request id, as it stands in the service's log."""
        return self._reply.id

    @property
    def model(self) -> ModelRef:
        return self._reply.model

    @property
    def usage(self) -> Usage:
        return self._reply.usage

    @property
    def timings(self) -> Timings | None:
        return self._reply.timings

    @property
    def metadata(self) -> dict[str, Any] | None:
        return self._reply.metadata

    @property
    def errors(self) -> dict[int, EmbedstreamError]:
        """Failed items by index; empty unless `partial=True`."""
        return {item.index: item.error for item in self._items if item.error is not None}

    def __repr__(self) -> str:
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"{type(self).__name__}({len(self)} items{failed}, model={self.model.name!r})"


class Embeddings(_Items[Embedding]):
    """Embeddings in the order of the input. `numpy.asarray(result)` is one [n, d] array."""

    @property
    def vector(self) -> Any:
        """The vector of the only item."""
        if len(self) != 1:
            raise ValueError(f"there are {len(self)} vectors: see `vectors`")
        return self[0].vector

    @property
    def vectors(self) -> list[Any]:
        """One vector per item. Raises the error of an item that failed."""
        return [item.vector for item in self]

    @property
    def dimensions(self) -> int | None:
        return self._reply.dimensions

    @property
    def dtype(self) -> DType:
        return self._reply.dtype or "float32"

    @property
    def normalized(self) -> bool | None:
        return self._reply.normalized

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """[n, d], the vectors one after the other: one copy."""
        import numpy as np

        if copy is False:
            raise ValueError("the vectors lie apart: one array of them is a copy")
        stacked = np.stack(self.vectors)
        return stacked if dtype is None else stacked.astype(dtype)


class Ranking(_Items[Ranked]):
    """Documents, best first (in input order with `sort=False`); failed ones come last."""

    @property
    def best(self) -> Ranked:
        return self[0]


class Scores(_Items[Score]):
    """Every document's score, in the order of the documents."""

    @property
    def scores(self) -> list[float]:
        return [item.score for item in self]


class Classifications(_Items[Classification]):
    """Classifications in the order of the input."""

    @property
    def labels(self) -> list[str]:
        return [item.label for item in self]

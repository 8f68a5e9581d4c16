"""Results of items that were computed lately, for whoever sends the same item again.

Who calls it: the tokenizer asks before an item is queued, the dispatcher before one is packed, and fills it.
Behind the memory there may be results that several processes share (`SharedResults`).
What must stay true: a key holds all that a vector depends on beside the model's files (token ids and what
the pooler is told), so that a hit has the bytes that a forward would have made; errors are never
held; memory is bounded. A key begins with who computes: in one process the model's name would do, but
what is shared has to know its files and how it is computed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gpu.batch import EncodedItem, ItemOptions, ItemOutcome, ItemResult

T = TypeVar("T", bound=np.generic)

_ENTRY_BYTES = 400
"""What a held result takes beside its numbers: key, objects, array headers (measured with tracemalloc)."""


class SharedResults(Protocol):
    """Results beyond this process. Nothing here raises, or waits for longer than it is worth."""

    async def get_many(self, keys: Sequence[bytes]) -> Mapping[bytes, ItemResult]:
        """Those that are there; arrays cannot be written to."""
        ...

    def put(self, key: bytes, result: ItemResult) -> None:
        """Keep it, some time soon, or not."""
        ...


def key_of(maker: str, item: EncodedItem) -> bytes | None:
    """What two items share when a forward makes the same of them; None: never share this one."""
    digest = hashlib.blake2b(
        _told(maker, item.options, item.pooled_from, item.attended), digest_size=20
    )
    digest.update(item.input_ids.tobytes())
    if item.token_type_ids is not None:
        digest.update(b"types")
        digest.update(item.token_type_ids.tobytes())
    for name in sorted(item.extras) if item.extras else ():
        array = item.extras[name]
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            return None
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


@lru_cache(maxsize=1024)
def _told(maker: str, options: ItemOptions, pooled_from: int, attended: int | None) -> bytes:
    """Most items share it, and writing it takes longer than all the rest of a key."""
    return repr((maker, options, pooled_from, attended)).encode()


class ResultCache:
    """Key -> result, least lately used first out. `max_bytes` 0 holds nothing.

    shared: gets all that is computed here; whoever asks it holds here what it gave.
    """

    def __init__(self, max_bytes: int, shared: SharedResults | None = None) -> None:
        self._max_bytes = max_bytes
        self.shared = shared
        self._held: OrderedDict[bytes, tuple[ItemResult, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def enabled(self) -> bool:
        """Does it hold anything, ever?"""
        return self._max_bytes > 0 or self.shared is not None

    def get(self, key: bytes | None) -> ItemResult | None:
        """The result for a key, if it is held."""
        if key is None or key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: bytes | None, outcome: ItemOutcome) -> None:
        """Hold a result that was computed, unless it is an error."""
        if key is None or key in self._held or not isinstance(outcome, ItemResult):
            return
        if self.shared is not None:
            self.shared.put(key, outcome)
        self.hold(key, outcome)

    def hold(self, key: bytes, outcome: ItemResult) -> None:
        """Hold a result, unless it is larger than all that may be held."""
        if key in self._held:
            return
        size = _ENTRY_BYTES + _n_bytes(outcome)
        if size > self._max_bytes:
            return
        self._held[key] = (_own(outcome), size)
        self.size_bytes += size
        while self.size_bytes > self._max_bytes:
            _, (_, dropped) = self._held.popitem(last=False)
            self.size_bytes -= dropped


def _n_bytes(result: ItemResult) -> int:
    if result.is_dense_only:
        assert result.dense is not None
        return result.dense.nbytes
    arrays = (result.dense, result.scores, result.multivector, *(result.sparse or ()))
    n_bytes: int = sum(array.nbytes for array in arrays if array is not None)
    return n_bytes + 120 * len(result.spans or ())


def _own(result: ItemResult) -> ItemResult:
    """A copy: a row of a batch's array would keep the whole batch, and its maker may write there."""
    if result.is_dense_only:
        assert result.dense is not None
        return ItemResult(dense=_frozen(result.dense))
    return replace(
        result,
        dense=None if result.dense is None else _frozen(result.dense),
        scores=None if result.scores is None else _frozen(result.scores),
        multivector=None if result.multivector is None else _frozen(result.multivector),
        sparse=result.sparse and (_frozen(result.sparse[0]), _frozen(result.sparse[1])),
    )


def _frozen(array: npt.NDArray[T]) -> npt.NDArray[T]:
    array = array.copy()
    array.flags.writeable = False
    return array

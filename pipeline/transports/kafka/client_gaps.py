"""Reading fetched batches whose header names are not UTF-8, which aiokafka alone refuses to do.

Who calls it: `kafka_consumer`, once, before the first consumer is made.
What must stay true: brokers check no header name, so any producer can write such a record; it must
cost neither the service nor its neighbours in the batch. Every other batch is read by aiokafka's own
reader; only when that one fails is the batch read again, with what is no UTF-8 replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex

import aiokafka.consumer.fetcher as fetcher
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy


class _Replacing(bytearray):
    """Bytes whose slices decode whatever they hold."""

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        return _Replacing(found) if isinstance(key, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return super().decode(encoding, "replace")


class _Batch:
    """A batch of format 2: aiokafka's own, with a second reader."""

    def __init__(self, batch: Any, raw: memoryview) -> None:
        self._batch = batch
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        n_read = 0
        try:
            for record in self._batch:
                n_read += 1
                yield record
        except UnicodeDecodeError:
            slow = _DefaultRecordBatchPy(self._raw)
            slow._maybe_uncompress()
            slow._buffer = _Replacing(slow._buffer)
            for number, record in enumerate(slow):
                if number >= n_read:
                    yield record


class _Records(_MemoryRecordsPy):  # type: ignore[misc]
    """The batches of one fetched partition."""

    def next_batch(self) -> Any:
        raw = self._next_slice
        batch = super().next_batch()
        return _Batch(batch, raw) if raw is not None and raw[self.MAGIC_OFFSET] >= 2 else batch


def install() -> None:
    """Make consumers of this process read such batches. Idempotent."""
    fetcher.MemoryRecords = _Records

"""A collection in memory, for tests of what stands before the stores. It passes their suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gpu.batch import Float32
from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.records import Entry, Write, chunk_id
from pipeline.indexing.sinks.base import Collection, Hit, Row, StoreRefused, StoreUnavailable


class _Stored:
    def __init__(self, identity: CollectionIdentity) -> None:
        self.identity = identity
        self.rows: dict[str, Row] = {}
        self.entries: dict[str, Entry] = {}


class MemoryCollection(Collection):
    """refused: document ids that the store refuses. down: errors to raise, one per call to write."""

    stores: ClassVar[dict[str, _Stored]] = {}

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = self.where = name
        self.refused: set[str] = set()
        self.down: list[Exception] = []
        self.batches: list[list[str]] = []

    async def connect(self) -> None:
        pass

    async def read_identity(self) -> CollectionIdentity | None:
        stored = self.stores.get(self.name)
        return stored.identity if stored else None

    async def create(self, identity: CollectionIdentity) -> None:
        self.stores[self.name] = _Stored(identity)

    @property
    def _stored(self) -> _Stored:
        try:
            return self.stores[self.name]
        except KeyError:
            raise StoreUnavailable("the collection is gone") from None

    async def transact(self, writes: Sequence[Write], now_ms: int):  # type: ignore[no-untyped-def]
        self.batches.append([write.document_id for write in writes])
        if self.down:
            raise self.down.pop(0)
        return await super().transact(writes, now_ms)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        entries = self._stored.entries
        return {name: entries[name] for name in document_ids if name in entries}

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        if any(write.document_id in self.refused for write in writes):
            raise StoreRefused("one of them")
        for write in writes:
            for chunk in write.chunks or ():
                key = chunk_id(write.document_id, chunk.ordinal)
                self._stored.rows[key] = Row(
                    key, write.document_id, chunk.ordinal, chunk.text, write.metadata, chunk.vector
                )

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        for key, row in list(self._stored.rows.items()):
            if row.ordinal >= keep.get(row.document_id, row.ordinal + 1):
                del self._stored.rows[key]

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        self._stored.entries.update({entry.document_id: entry for entry in entries})

    async def search(self, vector: Float32, k: int) -> list[Hit]:
        def score(row: Row) -> float:
            return float(
                row.vector @ vector / (np.linalg.norm(row.vector) * np.linalg.norm(vector))
            )

        best = sorted(self._stored.rows.values(), key=score, reverse=True)[:k]
        return [Hit(r.document_id, r.ordinal, r.text, r.metadata, score(r)) for r in best]

    async def count(self) -> tuple[int, int, int | None]:
        entries = self._stored.entries.values()
        there = sum(entry.content_hash != "" for entry in entries)
        changed = max((entry.changed_at_ms for entry in entries), default=None)
        return there, len(self._stored.rows), changed

    async def rows(self) -> AsyncIterator[Row]:
        for row in list(self._stored.rows.values()):
            yield row

    async def entries(self) -> AsyncIterator[Entry]:
        for entry in list(self._stored.entries.values()):
            yield entry

    async def drop(self) -> None:
        self.stores.pop(self.name, None)

    async def aclose(self) -> None:
        pass

"""Parquet files: a folder that any reader of Parquet takes, and no engine. Search is exact.

``parquet:///folder#docs``, ``parquet://relative/folder#docs``: files in `folder/docs`, as
`pipeline.indexing.parquet_log` describes them. Each batch is one new file (temporary name, fsync,
rename), so a batch is there whole or not at all; many small files are merged.
What must stay true: a write whose caller gave up goes on in its thread, and the next call waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import structlog

from gpu.batch import Float32
from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.parquet_log import FolderTaken, NotStorable, ParquetLog
from pipeline.indexing.records import DELETED, Entry, Outcome, Write
from pipeline.indexing.sinks.base import Collection, Hit, Row, StoreRefused, StoreUnavailable
from pipeline.indexing.urls import CollectionUrl, refuse_unknown
from pipeline.indexing.vectors import Vector, dense

log = structlog.get_logger(__name__)
T = TypeVar("T")


class ParquetCollection(Collection):
    """See the module."""

    transactional = True

    def __init__(self, folder: Path, where: str) -> None:
        super().__init__()
        self.where = where
        self.log = ParquetLog(folder)
        self._pending: list[Write] = []
        self._busy = threading.Lock()

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        def alone() -> T:
            with self._busy, told():
                return call(*args)

        return await asyncio.to_thread(alone)

    async def connect(self) -> None:
        """Nothing is asked: a folder that is not there yet is made by `create`."""

    async def read_identity(self) -> CollectionIdentity | None:
        """From a file beside the others."""
        text = await self._in_thread(self.log.read_identity)
        return None if text is None else CollectionIdentity.from_json(text, self.where)

    async def create(self, identity: CollectionIdentity) -> None:
        """The folder with the identity."""
        await self._in_thread(self.log.create, identity.to_json())

    async def transact(self, writes: Sequence[Write], now_ms: int) -> dict[str, Outcome]:
        """Judge, and write one file."""
        self._pending = []
        await self._in_thread(self.log.be_the_writer)
        return await super().transact(writes, now_ms)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        await self._in_thread(self.log.refresh)
        return {name: self.log.entries[name] for name in document_ids if name in self.log.entries}

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """Kept until the entries come, for one file."""
        self._pending = list(writes)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """Nothing: chunks that the newest entry does not name are history."""

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`."""
        assert self.identity is not None
        await self._in_thread(
            self.log.commit, list(entries), self._pending, self.identity.dimensions
        )
        try:
            await self._in_thread(self.log.merge, self.identity.dimensions)
        except StoreUnavailable as error:  # the batch is stored; the next one tries again
            log.warning("index_merge_failed", reason=f"{self.where}: {error}")

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`. Every vector is compared."""
        return await self._in_thread(self.log.again, lambda: self._search(dense(vector), k))

    def _search(self, vector: Float32, k: int) -> list[Hit]:
        unit = vector / np.linalg.norm(vector)
        best: list[tuple[float, int, Hit]] = []
        tie = itertools.count()
        for rows in self.log.live(self.log.names, entries=False):
            vectors = _vectors(rows)
            scores = vectors @ unit / np.linalg.norm(vectors, axis=1)
            top = np.argsort(-scores, kind="stable")[:k]
            for at, row in zip(top, rows.take(pa.array(top)).to_pylist(), strict=True):
                told_of = (row["document_id"], row["ordinal"], row["text"])
                score = float(scores[at])
                hit = Hit(*told_of, json.loads(row["metadata"]), score)
                heapq.heappush(best, (score, -next(tie), hit))
            best = heapq.nlargest(k, best)
            heapq.heapify(best)
        return [hit for *_, hit in sorted(best, reverse=True)]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`. From the ledger in memory."""
        await self._in_thread(self.log.refresh)
        entries = self.log.entries.values()
        n_documents = sum(entry.content_hash != DELETED for entry in entries)
        changed = max((entry.changed_at_ms for entry in entries), default=None)
        return n_documents, sum(entry.n_chunks for entry in entries), changed

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`. Those of the moment when it begins."""

        def begin() -> tuple[Iterator[pa.RecordBatch], pa.RecordBatch | None]:
            live = self.log.live(self.log.names, entries=False)
            return live, next(live, None)

        live, rows = await self._in_thread(self.log.again, begin)
        while rows is not None:
            for row, vector in zip(rows.to_pylist(), _vectors(rows), strict=True):
                told_of = (row["id"], row["document_id"], row["ordinal"], row["text"])
                yield Row(*told_of, json.loads(row["metadata"]), vector)
            rows = await self._in_thread(next, live, None)

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        await self._in_thread(self.log.refresh)
        for entry in list(self.log.entries.values()):
            yield entry

    async def drop(self) -> None:
        """See `Collection`."""
        await self._in_thread(self.log.drop)

    async def aclose(self) -> None:
        """See `Collection`."""
        await self._in_thread(self.log.release)


def _vectors(rows: pa.RecordBatch) -> Float32:
    column = rows.column("vector")
    vectors: Float32 = column.flatten().to_numpy().reshape(len(rows), column.type.list_size)
    return vectors


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the file system and of the format as ours; a full disk may have room again."""
    try:
        yield
    except NotStorable as error:
        raise StoreRefused(str(error)) from error
    except FolderTaken as error:
        raise StoreUnavailable(str(error)) from error
    except FileNotFoundError as error:
        raise StoreUnavailable("the collection is gone, or a file of it") from error
    except OSError as error:
        raise StoreUnavailable(
            f"{type(error).__name__}: {error.strerror or 'unreadable'}"
        ) from error
    except pa.ArrowException as error:
        raise StoreUnavailable(f"a file cannot be read ({type(error).__name__})") from error


def collection(url: CollectionUrl) -> ParquetCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url)
    if url.host is None and not url.path.strip("/"):
        raise ValueError("parquet: no folder is named: parquet:///folder#docs")
    return ParquetCollection(Path((url.host or "") + url.path) / url.collection, url.shown)

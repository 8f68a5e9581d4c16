"""LanceDB: a folder (or object store) that is the collection; no server. The embedded default.

``lance:///folder#docs``, ``lance://relative/folder#docs``, ``lance+s3://bucket/prefix#docs``.
Two tables: ``docs`` holds the chunks, ``docs__documents`` the ledger. Each write of a batch is one
merge-insert, which is one atomic commit; indexes on the ids keep its cost independent of the size.
What must stay true: a batch holds an id once, because LanceDB inserts two new rows of one id without
a word; both ids are declared as primary keys, which makes two concurrent writers conflict instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import BTree

from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.records import Entry, Version, Write, chunk_id
from pipeline.indexing.sinks.base import (
    Collection,
    Hit,
    Row,
    SinkLimits,
    StoreRefused,
    StoreUnavailable,
    batched,
)
from pipeline.indexing.urls import CollectionUrl, refuse_unknown
from pipeline.indexing.vectors import Vector, dense

IDENTITY_KEY = b"embedstream"
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}
OPTIMIZE_EVERY = 128
"""Commits between two compactions: each commit adds a version and a fragment."""
KEEP_VERSIONS = timedelta(hours=1)
"""A reader that opened a version longer ago than this must open it anew."""


class LanceCollection(Collection):
    """See the module."""

    kinds = frozenset({"dense", "multivector"})
    limits = SinkLimits(max_points=5000, max_bytes=32 * 1024 * 1024)
    reads_beside_writes = True

    def __init__(self, uri: str, name: str, where: str) -> None:
        super().__init__()
        self.uri, self.name, self.where = uri, name, where
        self._db: Any = None
        self._chunks: Any = None
        self._documents: Any = None
        self._n_commits = 0

    async def connect(self) -> None:
        """Open the folder; it is made when it is not there."""
        try:
            if "://" not in self.uri:
                await asyncio.to_thread(Path(self.uri).mkdir, parents=True, exist_ok=True)
            self._db = await lancedb.connect_async(self.uri, read_consistency_interval=timedelta(0))
        except (OSError, RuntimeError, ValueError) as error:
            raise StoreUnavailable(
                f"{self.where} cannot be opened: {_first_line(error)}"
            ) from error

    async def read_identity(self) -> CollectionIdentity | None:
        """From the metadata of the table's schema."""
        names = await self._table_names()
        if self.name not in names:
            return None
        self._chunks = await self._db.open_table(self.name)
        metadata = (await self._chunks.schema()).metadata or {}
        identity = CollectionIdentity.from_json(metadata.get(IDENTITY_KEY), self.where)
        if f"{self.name}__documents" not in names:
            await self._create_ledger()
        else:
            self._documents = await self._db.open_table(f"{self.name}__documents")
        return identity

    async def _table_names(self) -> list[str]:
        found: list[str] = []
        token = None
        while True:
            page = await self._db.list_tables(page_token=token)
            found.extend(page.tables)
            token = page.page_token
            if not token:
                return found

    async def create(self, identity: CollectionIdentity) -> None:
        """The ledger first: a table of chunks without one would be unfinished."""
        await self._create_ledger()
        schema = _chunk_schema(identity.dimensions, several=identity.kind == "multivector")
        schema = schema.with_metadata({IDENTITY_KEY: identity.to_json().encode()})
        table = await self._db.create_table(self.name, schema=schema, exist_ok=True)
        for column in ("id", "document_id"):
            await table.create_index(column, config=BTree())

    async def _create_ledger(self) -> None:
        self._documents = await self._db.create_table(
            f"{self.name}__documents", schema=LEDGER, exist_ok=True
        )
        await self._documents.create_index("document_id", config=BTree())

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        if not document_ids:
            return {}
        query = self._documents.query().where(f"document_id IN ({_quoted(document_ids)})")
        table = await _told(query.to_arrow())
        return {row["document_id"]: _entry(row) for row in table.to_pylist()}

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        sized = ((write, write.n_bytes) for write in writes)
        for batch in batched(sized, self.limits):
            await self._merge(self._chunks, "id", _chunk_rows(batch), None)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """One deletion for all; none when there is nothing, because each is a commit."""
        by_count: dict[int, list[str]] = {}
        for document_id, n in keep.items():
            by_count.setdefault(n, []).append(document_id)
        surplus = [
            f"(document_id IN ({_quoted(ids)}) AND ordinal >= {n})" for n, ids in by_count.items()
        ]
        for start in range(0, len(surplus), 64):  # a parser's recursion has a depth
            condition = " OR ".join(surplus[start : start + 64])
            if await _told(self._chunks.count_rows(condition)):
                await _told(self._chunks.delete(condition))
                await self._committed(self._chunks)

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`. A newer entry that another process wrote meanwhile stays."""
        rows = pa.table(
            {
                "document_id": [e.document_id for e in entries],
                "source": [e.version.source for e in entries],
                "number": [e.version.number for e in entries],
                "content_hash": [e.content_hash for e in entries],
                "n_chunks": [e.n_chunks for e in entries],
                "changed_at_ms": [e.changed_at_ms for e in entries],
            },
            schema=LEDGER,
        )
        guard = "target.source != source.source OR target.number <= source.number"
        await self._merge(self._documents, "document_id", rows, guard)

    async def _merge(self, table: Any, key: str, rows: pa.Table, guard: str | None) -> None:
        merge = table.merge_insert(key).when_matched_update_all(where=guard)
        await _told(merge.when_not_matched_insert_all().execute(rows))
        await self._committed(table)

    async def _committed(self, table: Any) -> None:
        self._n_commits += 1
        # One at a time: whoever waits for the next write waits for half of it.
        turn = self._n_commits % OPTIMIZE_EVERY
        if turn == 0:
            await _told(self._chunks.optimize(cleanup_older_than=KEEP_VERSIONS))
        elif turn == OPTIMIZE_EVERY // 2:
            await _told(self._documents.optimize(cleanup_older_than=KEEP_VERSIONS))

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        asked = dense(vector)
        # Of several vectors the distance is the sum of theirs to the nearest one of the chunk.
        most = float(len(asked)) if asked.ndim == 2 else 1.0
        query = self._chunks.query().nearest_to(asked).distance_type("cosine").limit(k)
        query = query.select(["document_id", "ordinal", "text", "metadata", "_distance"])
        table = await _told(query.to_arrow())
        return [
            Hit(
                row["document_id"],
                row["ordinal"],
                row["text"],
                json.loads(row["metadata"]),
                most - row["_distance"],
            )
            for row in table.to_pylist()
        ]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        n_documents = await _told(self._documents.count_rows("content_hash != ''"))
        n_chunks = await _told(self._chunks.count_rows())
        batches = await _told(self._documents.query().select(["changed_at_ms"]).to_batches())
        changed = None
        async for batch in batches:
            for value in batch.column("changed_at_ms").to_pylist():
                changed = value if changed is None else max(changed, value)
        return n_documents, n_chunks, changed

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        async for batch in await _told(self._chunks.query().to_batches()):
            for row in batch.to_pylist():
                yield Row(
                    row["id"],
                    row["document_id"],
                    row["ordinal"],
                    row["text"],
                    json.loads(row["metadata"]),
                    np.asarray(row["vector"], dtype=np.float32),
                )

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        async for batch in await _told(self._documents.query().to_batches()):
            for row in batch.to_pylist():
                yield _entry(row)

    async def drop(self) -> None:
        """See `Collection`."""
        names = await self._table_names()
        for name in (self.name, f"{self.name}__documents"):
            if name in names:
                await self._db.drop_table(name)

    async def aclose(self) -> None:
        """See `Collection`."""
        self._chunks = self._documents = None
        if self._db is not None:
            self._db.close()
            self._db = None


def _chunk_schema(dimensions: int, *, several: bool) -> pa.Schema:
    """several: a chunk has one vector per token."""
    vector = pa.list_(pa.float32(), dimensions)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False, metadata=_PRIMARY_KEY),
            pa.field("document_id", pa.string(), nullable=False),
            pa.field("ordinal", pa.int32(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("metadata", pa.string(), nullable=False),  # JSON
            pa.field("vector", pa.list_(vector) if several else vector, nullable=False),
        ]
    )


LEDGER = pa.schema(
    [
        pa.field("document_id", pa.string(), nullable=False, metadata=_PRIMARY_KEY),
        pa.field("source", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("n_chunks", pa.int32(), nullable=False),
        pa.field("changed_at_ms", pa.int64(), nullable=False),
    ]
)


def _chunk_rows(writes: Sequence[Write]) -> pa.Table:
    chunks = [(write, chunk) for write in writes for chunk in write.chunks or ()]
    arrays = [dense(chunk.vector) for _, chunk in chunks]
    dimensions, several = arrays[0].shape[-1], arrays[0].ndim == 2
    numbers = np.concatenate([array.reshape(-1) for array in arrays])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(numbers, pa.float32()), dimensions)
    if several:
        ends = np.cumsum([0, *(len(array) for array in arrays)])
        vectors = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), vectors)
    return pa.table(
        {
            "id": [chunk_id(write.document_id, chunk.ordinal) for write, chunk in chunks],
            "document_id": [write.document_id for write, _ in chunks],
            "ordinal": [chunk.ordinal for _, chunk in chunks],
            "text": [chunk.text for _, chunk in chunks],
            "metadata": [json.dumps(write.metadata, ensure_ascii=False) for write, _ in chunks],
            "vector": vectors,
        },
        schema=_chunk_schema(dimensions, several=several),
    )


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(
        row["document_id"],
        Version(row["source"], row["number"]),
        row["content_hash"],
        row["n_chunks"],
        row["changed_at_ms"],
    )


def _quoted(values: Sequence[str]) -> str:
    return ", ".join("'" + value.replace("'", "''") + "'" for value in values)


async def _told(call: Any) -> Any:
    """The result of a call to LanceDB, its errors as ours."""
    try:
        return await call
    except (TypeError, pa.ArrowInvalid) as error:
        raise StoreRefused(_first_line(error)) from error
    except (OSError, RuntimeError, ValueError) as error:
        # A full disk, a lost folder and a lost race come alike; all of them may pass.
        raise StoreUnavailable(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def collection(url: CollectionUrl) -> LanceCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url)
    if url.host is None and not url.path.strip("/"):
        raise ValueError("lance: no folder is named: lance:///folder#docs")
    uri = (url.host or "") + url.path
    return LanceCollection(uri, url.collection, url.shown)

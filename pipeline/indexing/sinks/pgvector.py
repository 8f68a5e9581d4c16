"""PostgreSQL with pgvector: two tables, and a batch is one transaction.

``postgresql://user@host/db#docs``; ``?type=halfvec`` halves the size (up to 4,000 dimensions with an
index, ``vector`` up to 2,000); sparse vectors are ``sparsevec``; ``?index=none`` leaves the HNSW index out. `docs` holds the chunks,
`docs__documents` the ledger, and the identity is the comment of `docs`.
What must stay true: chunks and the versions (offsets) of their documents commit together, so the
effect of a record is exactly once; a lock for the length of the transaction puts the writers of one
collection in line, in all processes, so a newer version is never overwritten by an older one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pgvector
import psycopg
from pgvector.psycopg import register_vector_async
from psycopg import errors, sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
from pipeline.indexing.records import Entry, Outcome, Version, Write, chunk_id
from pipeline.indexing.sinks.base import (
    Collection,
    Hit,
    Row,
    SinkLimits,
    StoreRefused,
    StoreUnavailable,
)
from pipeline.indexing.urls import CollectionUrl, refuse_unknown
from pipeline.indexing.vectors import SparseVector, Vector

CONNECT_TIMEOUT_S = 10
INDEX_LIMITS = {"vector": 2000, "halfvec": 4000}
"""Dimensions that an HNSW index of pgvector takes. Of a `sparsevec` it takes 1,000 weights, and a table
16,000: one with more is refused by the server, with its document alone."""


NEAREST = (
    "SELECT document_id, ordinal, text, metadata, 1 - (embedding <=> %s) AS score"
    " FROM {chunks} ORDER BY embedding <=> %s LIMIT %s"
)
NEAREST_SPARSE = (
    "SELECT document_id, ordinal, text, metadata, -(embedding <#> %s) AS score"
    " FROM {chunks} ORDER BY embedding <#> %s LIMIT %s"
)


class PgvectorCollection(Collection):
    """See the module."""

    limits = SinkLimits(max_points=5000, max_bytes=32 * 1024 * 1024)
    transactional = True
    kinds = frozenset({"dense", "sparse"})

    def __init__(
        self, conninfo: str, name: str, where: str, *, vector_type: str, index: bool
    ) -> None:
        super().__init__()
        self.conninfo, self.name, self.where = conninfo, name, where
        self.vector_type, self.index = vector_type, index
        self._connection: psycopg.AsyncConnection[dict[str, Any]] | None = None

    # --- connection -----------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect once, and anew after the connection was lost."""
        if self._connection is not None and not self._connection.closed:
            return
        with told():
            connection = await psycopg.AsyncConnection.connect(
                self.conninfo,
                autocommit=True,
                row_factory=dict_row,
                connect_timeout=CONNECT_TIMEOUT_S,
                application_name="embedstream",
            )
            try:
                # Made before its type can be registered; needs the right only where it is absent.
                found = await connection.execute(
                    "SELECT 1 FROM pg_extension WHERE extname = 'vector'"
                )
                if await found.fetchone() is None:
                    await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                await register_vector_async(connection)
            except BaseException:
                await connection.close()
                raise
            self._connection = connection

    async def _run(self, statement: str, *args: Any, **names: str) -> Any:
        """Execute with {chunks} and {documents} in place of the tables' names."""
        await self.connect()
        assert self._connection is not None
        with told():
            return await self._connection.execute(self._sql(statement, **names), args or None)

    def _sql(self, statement: str, **names: str) -> sql.Composed:
        return sql.SQL(statement).format(
            chunks=sql.Identifier(self.name),
            documents=sql.Identifier(f"{self.name}__documents"),
            **{name: sql.Identifier(value) for name, value in names.items()},
        )

    # --- the collection -------------------------------------------------------------------------

    async def read_identity(self) -> CollectionIdentity | None:
        """From the comment of the table."""
        cursor = await self._run(
            "SELECT to_regclass(%s) IS NOT NULL AS there, obj_description(to_regclass(%s)) AS told",
            f'"{self.name}"',
            f'"{self.name}"',
        )
        row = await cursor.fetchone()
        return CollectionIdentity.from_json(row["told"], self.where) if row["there"] else None

    async def create(self, identity: CollectionIdentity) -> None:
        """Tables, comment and index, in one transaction."""
        sparse, limit = identity.kind == "sparse", INDEX_LIMITS[self.vector_type]
        if sparse and self.vector_type == "halfvec":
            raise WrongCollection("halfvec is for dense vectors: leave ?type=halfvec out")
        if self.index and not sparse and identity.dimensions > limit:
            raise WrongCollection(
                f"an HNSW index takes {limit} dimensions of {self.vector_type} at most and the "
                f"model gives {identity.dimensions}: add ?type=halfvec, or ?index=none"
            )
        vector_type = "sparsevec" if sparse else self.vector_type
        ops = f"{vector_type}_{'ip' if sparse else 'cosine'}_ops"
        column = f"{vector_type}({identity.dimensions:d})"
        async with self._transaction():
            await self._run(
                "CREATE TABLE IF NOT EXISTS {chunks} (id uuid PRIMARY KEY, document_id text NOT NULL,"
                " ordinal integer NOT NULL, text text NOT NULL, metadata jsonb NOT NULL,"
                f" embedding {column} NOT NULL, UNIQUE (document_id, ordinal))"
            )
            await self._run(
                "CREATE TABLE IF NOT EXISTS {documents} (document_id text PRIMARY KEY,"
                " source text NOT NULL, number bigint NOT NULL, content_hash text NOT NULL,"
                " n_chunks integer NOT NULL, changed_at_ms bigint NOT NULL)"
            )
            if self.index:
                await self._run(
                    f"CREATE INDEX IF NOT EXISTS {{index}} ON {{chunks}} USING hnsw (embedding {ops})",
                    index=f"{self.name}__hnsw",
                )
            assert self._connection is not None
            comment = sql.Literal(identity.to_json())
            with told():
                await self._connection.execute(
                    sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(self.name), comment)
                )

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        await self.connect()
        assert self._connection is not None
        with told():
            async with self._connection.transaction():
                # Freed at the end of the transaction, also when this process dies.
                await self._connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))",
                    (f"embedstream:{self.name}",),
                )
                yield

    async def transact(self, writes: Sequence[Write], now_ms: int) -> dict[str, Outcome]:
        """Judge and apply in one transaction."""
        async with self._transaction():
            return await super().transact(writes, now_ms)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        cursor = await self._run(
            "SELECT * FROM {documents} WHERE document_id = ANY(%s)", list(document_ids)
        )
        return {row["document_id"]: _entry(row) for row in await cursor.fetchall()}

    async def _run_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        await self.connect()
        assert self._connection is not None
        with told():
            async with self._connection.cursor() as cursor:
                await cursor.executemany(self._sql(statement), rows)

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        await self._run_many(
            "INSERT INTO {chunks} (id, document_id, ordinal, text, metadata, embedding)"
            " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET"
            " text = excluded.text, metadata = excluded.metadata, embedding = excluded.embedding",
            [
                (
                    chunk_id(write.document_id, chunk.ordinal),
                    write.document_id,
                    chunk.ordinal,
                    chunk.text,
                    Jsonb(dict(write.metadata)),
                    self._vector(chunk.vector),
                )
                for write in writes
                for chunk in write.chunks or ()
            ],
        )

    def _vector(self, vector: Vector) -> Any:
        assert self.identity is not None
        if isinstance(vector, SparseVector):
            return pgvector.SparseVector(vector.as_dict(), self.identity.dimensions)
        if self.vector_type == "halfvec":
            return pgvector.HalfVector(vector)
        return pgvector.Vector(vector)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`."""
        await self._run(
            "DELETE FROM {chunks} c USING unnest(%s::text[], %s::int[]) AS k(document_id, n)"
            " WHERE c.document_id = k.document_id AND c.ordinal >= k.n",
            list(keep),
            list(keep.values()),
        )

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`."""
        await self._run_many(
            "INSERT INTO {documents} VALUES (%s, %s, %s, %s, %s, %s)"
            " ON CONFLICT (document_id) DO UPDATE SET source = excluded.source,"
            " number = excluded.number, content_hash = excluded.content_hash,"
            " n_chunks = excluded.n_chunks, changed_at_ms = excluded.changed_at_ms",
            [
                (
                    e.document_id,
                    e.version.source,
                    e.version.number,
                    e.content_hash,
                    e.n_chunks,
                    e.changed_at_ms,
                )
                for e in entries
            ],
        )

    # --- reading --------------------------------------------------------------------------------

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        # <#> is the negative product: of two sparse vectors without a common word it is 0.
        sparse = isinstance(vector, SparseVector)
        cursor = await self._run(
            NEAREST_SPARSE if sparse else NEAREST,
            self._vector(vector),
            self._vector(vector),
            k,
        )
        hits = [Hit(**row) for row in await cursor.fetchall()]
        return [hit for hit in hits if hit.score > 0] if sparse else hits

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        cursor = await self._run(
            "SELECT count(*) FILTER (WHERE content_hash <> '') AS n_documents,"
            " max(changed_at_ms) AS changed, (SELECT count(*) FROM {chunks}) AS n_chunks"
            " FROM {documents}"
        )
        row = await cursor.fetchone()
        return row["n_documents"], row["n_chunks"], row["changed"]

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        last = "00000000-0000-0000-0000-000000000000"
        while True:
            cursor = await self._run(
                "SELECT * FROM {chunks} WHERE id > %s ORDER BY id LIMIT 1000", last
            )
            found = await cursor.fetchall()
            if not found:
                return
            for row in found:
                yield Row(
                    str(row["id"]),
                    row["document_id"],
                    row["ordinal"],
                    row["text"],
                    row["metadata"],
                    _read(row["embedding"]),
                )
            last = str(found[-1]["id"])

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        last = ""
        while True:
            cursor = await self._run(
                "SELECT * FROM {documents} WHERE document_id > %s ORDER BY document_id LIMIT 1000",
                last,
            )
            found = await cursor.fetchall()
            if not found:
                return
            for row in found:
                yield _entry(row)
            last = found[-1]["document_id"]

    async def drop(self) -> None:
        """See `Collection`."""
        await self._run("DROP TABLE IF EXISTS {chunks}, {documents}")

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


def _read(embedding: Any) -> Vector:
    if isinstance(embedding, pgvector.SparseVector):
        return SparseVector.of(embedding.indices(), embedding.values())
    return np.asarray(embedding.to_list(), dtype=np.float32)


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(
        row["document_id"],
        Version(row["source"], row["number"]),
        row["content_hash"],
        row["n_chunks"],
        row["changed_at_ms"],
    )


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the driver as ours."""
    try:
        yield
    except (errors.DataError, errors.IntegrityError, errors.ProgramLimitExceeded) as error:
        raise StoreRefused(_safe(error)) from error
    except (psycopg.Error, OSError) as error:
        raise StoreUnavailable(_safe(error)) from error


def _safe(error: BaseException) -> str:
    """The message without what a row held: its detail quotes values, its first line does not."""
    diagnosis = getattr(error, "diag", None)
    message = (diagnosis.message_primary if diagnosis else None) or str(error).split("\n")[0]
    return f"{type(error).__name__}: {message[:200]}"


def collection(url: CollectionUrl) -> PgvectorCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("type", "index", "sslmode"))
    vector_type = url.query.get("type", "vector")
    if vector_type not in INDEX_LIMITS:
        raise ValueError(f"postgresql: type is {vector_type!r}: vector or halfvec")
    index = url.query.get("index", "hnsw")
    if index not in ("hnsw", "none"):
        raise ValueError(f"postgresql: index is {index!r}: hnsw or none")
    suffix = f"?sslmode={url.query['sslmode']}" if "sslmode" in url.query else ""
    return PgvectorCollection(
        url.base + suffix,
        url.collection,
        url.shown,
        vector_type=vector_type,
        index=index == "hnsw",
    )

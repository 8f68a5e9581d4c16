"""Chroma: two collections, `docs` with the chunks and `docs__documents` with the ledger.

``chroma://host:8000#docs``, ``chroma://:TOKEN@host?tls=true&tenant=acme&database=main#docs``. The
identity is the metadata of `docs`. Metadata of a document is one field of JSON: Chroma refuses what is
nested or empty, and an upsert keeps the fields it does not name, so every write names the same ones.
What must stay true: a collection is addressed by the id it had when it was opened, so a write into one
that was dropped fails; the client sets no time-out, so each call has one here. There are no
transactions and no versions: see `base`. Chroma normalizes, which moves the last bits of a vector.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from chromadb import errors
from chromadb.api import AsyncServerAPI
from chromadb.api.async_client import AsyncClient
from chromadb.config import Settings

from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.records import DELETED, Entry, Write, chunk_id
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
from pipeline.indexing.vectors import Vector

TIMEOUT_S = 30.0
MAX_POINT_BYTES = 32 * 1024 * 1024
"""The server takes about 40 MB and closes the connection above, which looks like an outage."""
_PAGE = 1000


class ChromaCollection(Collection):
    """See the module."""

    # The server takes 5,461 points a call, and is five times faster with 100 than with 500.
    limits = SinkLimits(max_points=100, max_bytes=4 * 1024 * 1024)

    def __init__(self, name: str, where: str, *, tenant: str, database: str, **client: Any) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.ledger = f"{name}__documents"
        self._tenant, self._database = tenant, database
        self._options = client
        self._client: Any = None
        self._chunks: Any = None
        self._documents: Any = None

    async def connect(self) -> None:
        """Make the client, and ask once."""
        if self._client is None:
            settings = Settings(
                chroma_api_impl="chromadb.api.async_fastapi.AsyncFastAPI",
                anonymized_telemetry=False,
                **self._options,
            )
            client = AsyncClient(settings=settings)
            # The documented way to make one asks the server at once, through connections that all
            # clients of the process share with the headers, the token among them, of the first.
            client._server = client._system.instance(AsyncServerAPI)
            client._server._clients = {}
            client.tenant, client.database = self._tenant, self._database
            self._client = client
        await told(self._client._server.get_tenant(self._tenant))

    async def read_identity(self) -> CollectionIdentity | None:
        """From the metadata of the collection."""
        self._chunks = await self._existing(self.name)
        if self._chunks is None:
            return None
        metadata = self._chunks.metadata or {}
        identity = CollectionIdentity.from_json(metadata.get("embedstream"), self.where)
        self._documents = await self._existing(self.ledger) or await self._make(self.ledger, {})
        return identity

    async def _existing(self, name: str) -> Any:
        try:
            return await told(self._client.get_collection(name, embedding_function=None))
        except StoreUnavailable as error:
            if isinstance(error.__cause__, errors.NotFoundError):
                return None
            raise

    async def create(self, identity: CollectionIdentity) -> None:
        """The ledger first: chunks without one would be unfinished."""
        await self._make(self.ledger, {})
        await self._make(self.name, {"embedstream": identity.to_json()})

    async def _make(self, name: str, metadata: Mapping[str, str]) -> Any:
        making = self._client.create_collection(
            name,
            metadata=dict(metadata) or None,
            configuration={"hnsw": {"space": "cosine"}},
            embedding_function=None,
        )
        try:
            return await told(making)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, errors.UniqueConstraintError):
                return await self._existing(name)
            raise

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        entries: dict[str, Entry] = {}
        for batch in batched(((_entry_id(one), 0) for one in document_ids), _BY_PAGE):
            found = await told(self._documents.get(ids=batch, include=["metadatas"]))
            entries |= {e.document_id: e for e in map(Entry.from_fields, found["metadatas"])}
        return entries

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        points = [
            (
                (write, chunk),
                # As JSON a number takes about twelve characters.
                12 * chunk.vector.size + 4 * len(chunk.text) + 4 * len(str(write.metadata)) + 800,
            )
            for write in writes
            for chunk in write.chunks or ()
        ]
        if any(size > MAX_POINT_BYTES for _, size in points):
            raise StoreRefused(f"a chunk takes over {MAX_POINT_BYTES} bytes")
        for batch in batched(points, self.limits):
            upsert = self._chunks.upsert(
                ids=[chunk_id(write.document_id, chunk.ordinal) for write, chunk in batch],
                embeddings=[chunk.vector for _, chunk in batch],
                documents=[chunk.text for _, chunk in batch],
                metadatas=[
                    {
                        "document_id": write.document_id,
                        "ordinal": chunk.ordinal,
                        "metadata": json.dumps(write.metadata, ensure_ascii=False),
                    }
                    for write, chunk in batch
                ],
            )
            await told(upsert)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`. Asked first: a deletion of nothing costs as much as one of all."""
        by_count: dict[int, list[str]] = {}
        for document_id, n in keep.items():
            by_count.setdefault(n, []).append(document_id)
        groups = [
            {"$and": [{"document_id": {"$in": ids}}, {"ordinal": {"$gte": n}}]}
            for n, ids in by_count.items()
        ]
        for start in range(0, len(groups), 64):
            some = groups[start : start + 64]
            where = some[0] if len(some) == 1 else {"$or": some}
            surplus = (await told(self._chunks.get(where=where, include=[])))["ids"]
            for batch in batched(((one, 0) for one in surplus), _BY_PAGE):
                await told(self._chunks.delete(ids=batch))

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`. Chroma wants a vector of each: two numbers, made of the id."""
        for batch in batched(((entry, 0) for entry in entries), self.limits):
            ids = [_entry_id(entry.document_id) for entry in batch]
            upsert = self._documents.upsert(
                ids=ids,
                embeddings=[_any_vector(one) for one in ids],
                metadatas=[entry.to_fields() for entry in batch],
            )
            await told(upsert)

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        found = await told(
            self._chunks.query(
                query_embeddings=[vector],
                n_results=k,
                include=["documents", "metadatas", "distances"],
            )
        )
        return [
            Hit(kept["document_id"], kept["ordinal"], text, json.loads(kept["metadata"]), 1.0 - far)
            for kept, text, far in zip(
                found["metadatas"][0], found["documents"][0], found["distances"][0], strict=True
            )
        ]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        n_documents, changed = 0, None
        async for entry in self.entries():
            n_documents += entry.content_hash != DELETED
            changed = max(changed or 0, entry.changed_at_ms)
        return n_documents, await told(self._chunks.count()), changed

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        async for page in _pages(self._chunks, ["metadatas", "documents", "embeddings"]):
            columns = (page[name] for name in ("ids", "metadatas", "documents", "embeddings"))
            for one, kept, text, vector in zip(*columns, strict=True):
                metadata = json.loads(kept["metadata"])
                numbers = np.asarray(vector, np.float32)
                yield Row(one, kept["document_id"], kept["ordinal"], text, metadata, numbers)

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        async for page in _pages(self._documents, ["metadatas"]):
            for fields in page["metadatas"]:
                yield Entry.from_fields(fields)

    async def drop(self) -> None:
        """See `Collection`."""
        for name in (self.name, self.ledger):
            if await self._existing(name) is not None:
                await told(self._client.delete_collection(name))

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._client is not None:
            await self._client._server._cleanup()
            self._client = None


_BY_PAGE = SinkLimits(max_points=_PAGE)


async def _pages(collection: Any, include: list[str]) -> AsyncIterator[dict[str, Any]]:
    """Everything, in the order of insertion."""
    offset = 0
    while True:
        page = await told(collection.get(limit=_PAGE, offset=offset, include=include))
        if not page["ids"]:
            return
        yield page
        offset += len(page["ids"])


def _entry_id(document_id: str) -> str:
    """Beside the chunks' ordinals, which begin at 0."""
    return chunk_id(document_id, -1)


def _any_vector(one: str) -> list[float]:
    """Never zero, and seldom the same: an index of equal points is slow."""
    number = int(one[:8], 16)
    return [1.0 + number % 65_536, 1.0 + number // 65_536]


async def told(call: Awaitable[Any]) -> Any:
    """The result of a call, within a time; errors of the client as ours, without its words."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer within {TIMEOUT_S:g} s") from error
    except httpx.HTTPError as error:
        raise StoreUnavailable(f"no answer ({type(error).__name__})") from error
    except (errors.ChromaAuthError, errors.AuthorizationError) as error:
        raise StoreUnavailable("the token, user or password is wrong") from error
    except errors.NotFoundError as error:
        raise StoreUnavailable("the collection, tenant or database is gone") from error
    except (errors.InvalidArgumentError, errors.InvalidDimensionException, ValueError) as error:
        # Its message may quote metadata; that of a dimension is the one that people need.
        message = str(error).split("\n")[0]
        about = message[:120] if "dimension of" in message else "the server refused a value"
        raise StoreRefused(about) from error
    except errors.ChromaError as error:  # full, busy, over a quota
        raise StoreUnavailable(type(error).__name__) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The client raises a plain one with the body of any answer that it does not know.
        raise _of_status(error) from error


def _of_status(error: Exception) -> Exception:
    cause = error.__context__
    status = cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None
    if status == 413:
        return StoreRefused("HTTP 413: larger than the server takes")
    wait = None
    if isinstance(cause, httpx.HTTPStatusError):
        with contextlib.suppress(ValueError):
            wait = float(cause.response.headers.get("retry-after", ""))
    return StoreUnavailable(f"HTTP {status or 'error'}", retry_after_s=wait)


def collection(url: CollectionUrl) -> ChromaCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("tls", "tenant", "database"))
    if url.host is None:
        raise ValueError("chroma: no host is named: chroma://localhost:8000#docs")
    if len(url.collection) < 3 or not url.collection[-1].isalnum():
        raise ValueError(
            "chroma: a collection's name has 3 characters at least and ends with a letter or number"
        )
    tls = url.query.get("tls", "false")
    if tls not in ("true", "false"):
        raise ValueError(f"chroma: tls is {tls!r}: true or false")
    headers = {}
    if url.user:
        login = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    elif url.password:
        headers["X-Chroma-Token"] = url.password
    return ChromaCollection(
        url.collection,
        url.shown,
        tenant=url.query.get("tenant", "default_tenant"),
        database=url.query.get("database", "default_database"),
        chroma_server_host=url.host,
        chroma_server_http_port=url.port or 8000,
        chroma_server_ssl_enabled=tls == "true",
        chroma_server_ssl_verify=True,
        chroma_server_headers=headers,
    )

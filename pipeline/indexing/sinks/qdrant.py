"""Qdrant: two collections, `docs` with the chunks and `docs__documents` with the ledger.

``qdrant://host:6333#docs``, ``qdrant://:API_KEY@host:6333?tls=true#docs``; ``qdrant:///folder#docs`` is
the client's local mode, an imitation in Python for trying out. The identity is a point of the ledger.
Sparse vectors are named `embedding`; vectors per token are one multivector, compared by MaxSim.
What must stay true: ids are UUIDs; every write waits for the server; Qdrant keeps vectors of a cosine
collection normalized, so what is read back has length one. There are no transactions: see `base`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
from qdrant_client import AsyncQdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
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
from pipeline.indexing.vectors import SparseVector, Vector

TIMEOUT_S = 30
SPARSE = "embedding"
"""Qdrant has sparse vectors under names only."""
IDENTITY_ID = chunk_id("embedstream:identity", -1)
_PAGE = 256


class QdrantCollection(Collection):
    """See the module."""

    limits = SinkLimits(max_points=1000, max_bytes=4 * 1024 * 1024)
    has_aliases = True
    kinds = frozenset({"dense", "sparse", "multivector"})

    def __init__(self, name: str, where: str, *, local: bool, **client: Any) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.ledger = f"{name}__documents"
        self._local = local
        self._options = client
        self._client: Any = None

    async def connect(self) -> None:
        """Make the client, and ask once."""
        if self._client is None:
            with told():
                self._client = AsyncQdrantClient(**self._options)
        with told():
            await self._client.get_collections()

    async def open(self, identity: CollectionIdentity, *, create: bool = True) -> None:
        """See `Collection`. An alias is for readers: what it names may change under a writer."""
        await self.connect()
        with told():
            aliases = (await self._client.get_aliases()).aliases
        for alias in aliases:
            if alias.alias_name == self.name:
                raise WrongCollection(
                    f"{self.where} is an alias of {alias.collection_name}, and aliases are for "
                    f"readers: write into #{alias.collection_name}"
                )
        await super().open(identity, create=create)

    async def lead_alias(self, alias: str) -> None:
        """See `Collection`. Chunks and ledger change their names in one step."""
        moves: list[Any] = []
        for name, target in ((alias, self.name), (f"{alias}__documents", self.ledger)):
            with told():
                if await self._client.collection_exists(name) and not await self._is_alias(name):
                    raise StoreRefused(f"{name} is a collection, not an alias: choose another name")
            if await self._is_alias(name):
                moves.append(
                    models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=name))
                )
            made = models.CreateAlias(collection_name=target, alias_name=name)
            moves.append(models.CreateAliasOperation(create_alias=made))
        with told():
            await self._client.update_collection_aliases(moves)

    async def _is_alias(self, name: str) -> bool:
        with told():
            aliases = (await self._client.get_aliases()).aliases
        return any(alias.alias_name == name for alias in aliases)

    async def read_identity(self) -> CollectionIdentity | None:
        """From a point of the ledger."""
        with told():
            if not await self._client.collection_exists(self.name):
                return None
            found = []
            if await self._client.collection_exists(self.ledger):
                found = await self._client.retrieve(self.ledger, [IDENTITY_ID], with_payload=True)
        told_there = found[0].payload["identity"] if found else None
        return CollectionIdentity.from_json(told_there, self.where)

    async def create(self, identity: CollectionIdentity) -> None:
        """The ledger with the identity first: chunks without one would be somebody else's."""
        with told():
            if not await self._client.collection_exists(self.ledger):
                await self._client.create_collection(self.ledger, vectors_config={})
            point = models.PointStruct(
                id=IDENTITY_ID, vector={}, payload={"identity": identity.to_json()}
            )
            await self._client.upsert(self.ledger, [point], wait=True)
            await self._client.create_collection(
                self.name,
                **_configuration(identity),
            )
            if not self._local:  # the imitation has none, and warns
                for field, kind in (("document_id", "keyword"), ("ordinal", "integer")):
                    await self._client.create_payload_index(self.name, field, kind, wait=True)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        with told():
            points = await self._client.retrieve(
                self.ledger, [_entry_id(one) for one in document_ids], with_payload=True
            )
        entries = [_entry(point.payload) for point in points]
        return {entry.document_id: entry for entry in entries}

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        points = (
            (
                models.PointStruct(
                    id=chunk_id(write.document_id, chunk.ordinal),
                    vector=_written(chunk.vector),
                    payload={
                        "document_id": write.document_id,
                        "ordinal": chunk.ordinal,
                        "text": chunk.text,
                        "metadata": dict(write.metadata),
                    },
                ),
                # As JSON a number takes about twelve characters.
                12 * chunk.vector.size + 4 * len(chunk.text) + len(str(write.metadata)) + 200,
            )
            for write in writes
            for chunk in write.chunks or ()
        )
        for batch in batched(points, self.limits):
            with told():
                await self._client.upsert(self.name, batch, wait=True)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`."""
        by_count: dict[int, list[str]] = {}
        for document_id, n in keep.items():
            by_count.setdefault(n, []).append(document_id)
        for n, ids in by_count.items():
            surplus = models.Filter(
                must=[
                    models.FieldCondition(key="document_id", match=models.MatchAny(any=ids)),
                    models.FieldCondition(key="ordinal", range=models.Range(gte=n)),
                ]
            )
            with told():
                await self._client.delete(
                    self.name, models.FilterSelector(filter=surplus), wait=True
                )

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`."""
        points = [
            models.PointStruct(
                id=_entry_id(entry.document_id),
                vector={},
                payload={
                    "document_id": entry.document_id,
                    "source": entry.version.source,
                    "number": entry.version.number,
                    "content_hash": entry.content_hash,
                    "n_chunks": entry.n_chunks,
                    "changed_at_ms": entry.changed_at_ms,
                },
            )
            for entry in entries
        ]
        with told():
            await self._client.upsert(self.ledger, points, wait=True)

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        with told():
            found = await self._client.query_points(
                self.name,
                query=_numbers(vector),
                using=SPARSE if isinstance(vector, SparseVector) else None,
                limit=k,
                with_payload=True,
            )
        return [
            Hit(
                point.payload["document_id"],
                point.payload["ordinal"],
                point.payload["text"],
                point.payload["metadata"],
                point.score,
            )
            for point in found.points
        ]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        n_documents, changed = 0, None
        async for entry in self.entries():
            n_documents += entry.content_hash != ""
            changed = max(changed or 0, entry.changed_at_ms)
        with told():
            n_chunks = (await self._client.count(self.name, exact=True)).count
        return n_documents, n_chunks, changed

    async def _points(self, name: str, *, with_vectors: bool) -> AsyncIterator[Any]:
        offset = None
        while True:
            with told():
                points, offset = await self._client.scroll(
                    name, limit=_PAGE, offset=offset, with_payload=True, with_vectors=with_vectors
                )
            for point in points:
                yield point
            if offset is None:
                return

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        async for point in self._points(self.name, with_vectors=True):
            yield Row(
                str(point.id),
                point.payload["document_id"],
                point.payload["ordinal"],
                point.payload["text"],
                point.payload["metadata"],
                _read(point.vector),
            )

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        async for point in self._points(self.ledger, with_vectors=False):
            if "document_id" in point.payload:  # the identity has none
                yield _entry(point.payload)

    async def drop(self) -> None:
        """See `Collection`."""
        with told():
            for name in (self.name, self.ledger):
                if await self._client.collection_exists(name):
                    await self._client.delete_collection(name)

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _configuration(identity: CollectionIdentity) -> dict[str, Any]:
    if identity.kind == "sparse":
        sparse = {SPARSE: models.SparseVectorParams()}
        return {"vectors_config": {}, "sparse_vectors_config": sparse}
    several = None
    if identity.kind == "multivector":
        several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    size, distance = identity.dimensions, models.Distance.COSINE
    params = models.VectorParams(size=size, distance=distance, multivector_config=several)
    return {"vectors_config": params}


def _numbers(vector: Vector) -> Any:
    if isinstance(vector, SparseVector):
        indices, values = vector.indices.tolist(), vector.values.tolist()
        return models.SparseVector(indices=indices, values=values)
    return vector.tolist()


def _written(vector: Vector) -> Any:
    return {SPARSE: _numbers(vector)} if isinstance(vector, SparseVector) else _numbers(vector)


def _read(vector: Any) -> Vector:
    if isinstance(vector, dict):
        return SparseVector.of(vector[SPARSE].indices, vector[SPARSE].values)
    return np.asarray(vector, dtype=np.float32)


def _entry_id(document_id: str) -> str:
    """Beside the chunks' ordinals, which begin at 0."""
    return chunk_id(document_id, -1)


def _entry(payload: Mapping[str, Any]) -> Entry:
    return Entry(
        payload["document_id"],
        Version(payload["source"], payload["number"]),
        payload["content_hash"],
        payload["n_chunks"],
        payload["changed_at_ms"],
    )


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the client as ours. A refusal names the field, never what stood in it."""
    try:
        yield
    except ResourceExhaustedResponse as error:
        raise StoreUnavailable(
            "too many requests", retry_after_s=float(error.retry_after_s)
        ) from error
    except UnexpectedResponse as error:
        message = f"HTTP {error.status_code}: {error.reason_phrase}"
        if error.status_code in (400, 413, 422):
            raise StoreRefused(message) from error
        raise StoreUnavailable(message) from error
    except (ResponseHandlingException, httpx.HTTPError, OSError) as error:
        raise StoreUnavailable(f"{type(error).__name__}: {str(error)[:200]}") from error
    except ValueError as error:  # local mode
        message = str(error).split("\n")[0][:200]
        if "not found" in message:
            raise StoreUnavailable(message) from error
        raise StoreRefused("the local mode refused it") from error
    except RuntimeError as error:  # local mode: another process has the folder
        raise StoreUnavailable(str(error).split("\n")[0][:200]) from error


def collection(url: CollectionUrl) -> QdrantCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("tls",))
    if url.host is None:
        if not url.path.strip("/"):
            raise ValueError("qdrant: no host and no folder: qdrant://localhost:6333#docs")
        return QdrantCollection(url.collection, url.shown, local=True, path=url.path)
    tls = url.query.get("tls", "false")
    if tls not in ("true", "false"):
        raise ValueError(f"qdrant: tls is {tls!r}: true or false")
    scheme = "https" if tls == "true" else "http"
    return QdrantCollection(
        url.collection,
        url.shown,
        local=False,
        url=f"{scheme}://{url.host}:{url.port or 6333}{url.path.rstrip('/')}",
        api_key=url.password or None,
        timeout=TIMEOUT_S,
        check_compatibility=False,
    )

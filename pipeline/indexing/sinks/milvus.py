"""Milvus: two collections, `docs` with the chunks and `docs__documents` with the ledger.

``milvus://host:19530#docs``, ``milvus://user:password@host?tls=true&database=main#docs``,
``milvus://:TOKEN@host?tls=true#docs``. The identity is an entity of the ledger.
What must stay true: every read is strongly consistent; a filter holds UUIDs and numbers only, never an
id that a sender wrote; a bad row fails its batch and is not named, so `base` halves it. The blocking
client runs in threads, because the asynchronous one waits for indexes with a call that not every server
has; a call whose caller gave up ends within its time-out, and the next one waits for it. There are no
transactions and no versions: see `base`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.exceptions import DataNotMatchException, ParamError

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
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
from pipeline.indexing.vectors import SparseVector, Vector

T = TypeVar("T")

TIMEOUT_S = 20.0
IDENTITY_ID = chunk_id("embedstream:identity", -1)
MAX_TEXT_BYTES = 65_535
"""Of a VARCHAR and of a JSON value."""
NOT_FOUND = 100
_REFUSED = (
    5,
    6,
    1100,
    1101,
    1804,
)  # of a value: illegal argument, parameter, missing field, import
_PAGE = 1000
_STRONG = "Strong"

# The client logs each error with a traceback, and with what the server says of a value.
for _name in ("decorators", "client.grpc_handler", "client.iterator.query_iterator"):
    logging.getLogger(f"pymilvus.{_name}").setLevel(logging.CRITICAL + 1)


class MilvusCollection(Collection):
    """See the module."""

    limits = SinkLimits(max_points=1000, max_bytes=4 * 1024 * 1024)
    has_aliases = True
    kinds = frozenset({"dense", "sparse"})

    def __init__(self, name: str, where: str, **client: Any) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.ledger = f"{name}__documents"
        self._options = client
        self._client: Any = None
        self._busy = threading.Lock()

    async def _in_thread(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        def alone() -> T:
            with self._busy, told():
                return call(*args, **named)

        return await asyncio.to_thread(alone)

    async def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the client."""
        return await self._in_thread(
            getattr(self._client, method), *args, timeout=TIMEOUT_S, **named
        )

    async def connect(self) -> None:
        """Make the client, and ask once."""
        if self._client is None:
            self._client = await self._in_thread(
                MilvusClient, **self._options, timeout=TIMEOUT_S, dedicated=True
            )
        await self._ask("list_collections")

    async def open(self, identity: CollectionIdentity, *, create: bool = True) -> None:
        """See `Collection`. An alias is for readers: what it names may change under a writer."""
        await self.connect()
        if (target := await self._behind(self.name)) is not None:
            raise WrongCollection(
                f"{self.where} is an alias of {target}, and aliases are for readers: "
                f"write into #{target}"
            )
        await super().open(identity, create=create)

    async def _behind(self, alias: str) -> str | None:
        """The collection that an alias names; None when it is no alias."""
        try:
            found = await self._ask("describe_alias", alias)
        except StoreUnavailable as error:
            if _code(error) in (NOT_FOUND, 1600):
                return None
            raise
        target: str | None = found.get("collection_name")
        return target

    async def lead_alias(self, alias: str) -> None:
        """See `Collection`. Readers find the ledger beside the collection that the alias names."""
        old = await self._behind(alias)
        if old is None and await self._ask("has_collection", alias):
            raise StoreRefused(f"{alias} is a collection, not an alias: choose another name")
        await self._ask("create_alias" if old is None else "alter_alias", self.name, alias)

    async def read_identity(self) -> CollectionIdentity | None:
        """From an entity of the ledger."""
        if not await self._ask("has_collection", self.name):
            return None
        self.ledger = f"{await self._behind(self.name) or self.name}__documents"
        told_there = None
        if await self._ask("has_collection", self.ledger):
            for name in (self.name, self.ledger):
                await self._ask("load_collection", name)
            found = await self._get(self.ledger, [IDENTITY_ID], ["kept"])
            told_there = found[0]["kept"]["identity"] if found else None
        return CollectionIdentity.from_json(told_there, self.where)

    async def create(self, identity: CollectionIdentity) -> None:
        """The ledger with the identity first: chunks without one would be somebody else's."""
        await self._make(self.ledger, 2, {"kept": {"datatype": DataType.JSON}})
        kept = {"id": IDENTITY_ID, "kept": {"identity": identity.to_json()}}
        await self._ask("upsert", self.ledger, [{**kept, "embedding": _any_vector(IDENTITY_ID)}])
        fields = {
            "document_key": {"datatype": DataType.VARCHAR, "max_length": 36},
            "document_id": {"datatype": DataType.VARCHAR, "max_length": 4096},
            "ordinal": {"datatype": DataType.INT64},
            "text": {"datatype": DataType.VARCHAR, "max_length": MAX_TEXT_BYTES},
            "metadata": {"datatype": DataType.JSON},
        }
        sparse = identity.kind == "sparse"
        await self._make(self.name, None if sparse else identity.dimensions, fields)

    async def _make(self, name: str, dimensions: int | None, fields: Mapping[str, Any]) -> None:
        if await self._ask("has_collection", name):
            return
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, max_length=36, is_primary=True)
        for field, options in fields.items():
            schema.add_field(field, **options)
        index = MilvusClient.prepare_index_params()
        if dimensions is None:
            schema.add_field("embedding", DataType.SPARSE_FLOAT_VECTOR)
            index.add_index("embedding", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
        else:
            schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=dimensions)
            index.add_index("embedding", index_type="AUTOINDEX", metric_type="COSINE")
        await self._ask(
            "create_collection", name, schema=schema, index_params=index, consistency_level=_STRONG
        )

    async def _get(self, name: str, ids: list[str], fields: list[str]) -> list[Any]:
        found = await self._ask(
            "query", name, ids=ids, output_fields=fields, consistency_level=_STRONG
        )
        return list(found)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        found: list[Any] = []
        for batch in batched(((_key(one), 0) for one in document_ids), self.limits):
            found += await self._get(self.ledger, batch, ["kept"])
        entries = (Entry.from_fields(entity["kept"]) for entity in found)
        return {entry.document_id: entry for entry in entries}

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        points = (
            (
                {
                    "id": chunk_id(write.document_id, chunk.ordinal),
                    "document_key": _key(write.document_id),
                    "document_id": write.document_id,
                    "ordinal": chunk.ordinal,
                    "text": chunk.text,
                    "metadata": dict(write.metadata),
                    "embedding": _numbers(chunk.vector),
                },
                chunk.vector.nbytes + 4 * len(chunk.text) + 4 * len(str(write.metadata)) + 800,
            )
            for write in writes
            for chunk in write.chunks or ()
        )
        for batch in batched(points, self.limits):
            for point in batch:
                # Not every server looks, and none names the row.
                if len(point["text"].encode()) > MAX_TEXT_BYTES:
                    raise StoreRefused(f"a chunk's text is over {MAX_TEXT_BYTES} bytes")
            await self._ask("upsert", self.name, batch)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`."""
        by_count: dict[int, list[str]] = {}
        for document_id, n in keep.items():
            by_count.setdefault(n, []).append(f'"{_key(document_id)}"')
        for n, keys in by_count.items():
            condition = f"document_key in [{', '.join(keys)}] and ordinal >= {n:d}"
            await self._ask("delete", self.name, filter=condition)

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`. Milvus wants a vector of each: two numbers, made of the id."""
        keys = [_key(entry.document_id) for entry in entries]
        points = [
            {"id": key, "kept": entry.to_fields(), "embedding": _any_vector(key)}
            for key, entry in zip(keys, entries, strict=True)
        ]
        for batch in batched(((point, 0) for point in points), self.limits):
            await self._ask("upsert", self.ledger, batch)

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        fields = ["document_id", "ordinal", "text", "metadata"]
        found = await self._ask(
            "search",
            self.name,
            data=[_numbers(vector)],
            anns_field="embedding",
            limit=k,
            output_fields=fields,
            consistency_level=_STRONG,
        )
        return [
            Hit(**{f: hit["entity"][f] for f in fields}, score=hit["distance"]) for hit in found[0]
        ]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        n_documents, changed = 0, None
        async for entry in self.entries():
            n_documents += entry.content_hash != DELETED
            changed = max(changed or 0, entry.changed_at_ms)
        found = await self._ask(
            "query", self.name, filter="", output_fields=["count(*)"], consistency_level=_STRONG
        )
        return n_documents, found[0]["count(*)"], changed

    async def _entities(self, name: str, fields: list[str]) -> AsyncIterator[Any]:
        pages = await self._ask(
            "query_iterator",
            name,
            batch_size=_PAGE,
            output_fields=fields,
            consistency_level=_STRONG,
        )
        try:
            while page := await self._in_thread(pages.next):
                for entity in page:
                    yield entity
        finally:
            pages.close()

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        fields = ["document_id", "ordinal", "text", "metadata"]
        async for entity in self._entities(self.name, ["id", *fields, "embedding"]):
            vector = _read(entity["embedding"])
            yield Row(entity["id"], **{field: entity[field] for field in fields}, vector=vector)

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        async for entity in self._entities(self.ledger, ["id", "kept"]):
            if entity["id"] != IDENTITY_ID:
                yield Entry.from_fields(entity["kept"])

    async def drop(self) -> None:
        """See `Collection`. Milvus drops nothing that an alias names."""
        if await self._ask("has_collection", self.name):
            for alias in (await self._ask("list_aliases", self.name))["aliases"]:
                await self._ask("drop_alias", alias)
        for name in (self.name, self.ledger):
            await self._ask("drop_collection", name)  # no error when it is not there

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._client is not None:
            client, self._client = self._client, None
            await self._in_thread(client.close)


def _numbers(vector: Vector) -> Any:
    return vector.as_dict() if isinstance(vector, SparseVector) else vector.tolist()


def _read(embedding: Any) -> Vector:
    if isinstance(embedding, dict):
        return SparseVector.of(list(embedding), list(embedding.values()))
    return np.asarray(embedding, dtype=np.float32)


def _key(document_id: str) -> str:
    """Beside the chunks' ordinals, which begin at 0."""
    return chunk_id(document_id, -1)


def _any_vector(key: str) -> list[float]:
    """Never zero, and seldom the same: an index of equal points is slow."""
    number = int(key[:8], 16)
    return [1.0 + number % 65_536, 1.0 + number // 65_536]


def _code(error: StoreUnavailable) -> int | None:
    return error.__cause__.code if isinstance(error.__cause__, MilvusException) else None


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the client as ours, without its words: they quote values."""
    try:
        yield
    except (DataNotMatchException, ParamError) as error:
        raise StoreRefused(f"the client refused a value ({type(error).__name__})") from error
    except MilvusException as error:
        if error.code == NOT_FOUND:
            raise StoreUnavailable("the collection is gone") from error
        if error.code in _REFUSED or error.is_input_error:
            raise StoreRefused(f"the server refused a value (code {error.code})") from error
        if "auth" in error.message.lower():
            raise StoreUnavailable("the token, user or password is wrong") from error
        hint = {2: "no answer", 8: "too many requests", 9: "no writes are allowed now"}
        told_of = hint.get(error.code, "the server failed")
        raise StoreUnavailable(f"{told_of} (code {error.code})") from error
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.Call) else "unknown"
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            raise StoreUnavailable("the token, user or password is wrong") from error
        raise StoreUnavailable(f"no answer ({code})") from error


def collection(url: CollectionUrl) -> MilvusCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("tls", "database"))
    if url.host is None:
        raise ValueError("milvus: no host is named: milvus://localhost:19530#docs")
    if "-" in url.collection:
        raise ValueError("milvus: a collection's name takes no '-': use '_'")
    tls = url.query.get("tls", "false")
    if tls not in ("true", "false"):
        raise ValueError(f"milvus: tls is {tls!r}: true or false")
    token = f"{url.user}:{url.password or ''}" if url.user else url.password or ""
    scheme = "https" if tls == "true" else "http"
    return MilvusCollection(
        url.collection,
        url.shown,
        uri=f"{scheme}://{url.host}:{url.port or 19530}",
        token=token,
        db_name=url.query.get("database", ""),
    )

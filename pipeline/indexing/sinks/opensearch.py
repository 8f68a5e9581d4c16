"""OpenSearch with k-NN: an index of chunks and one of ledger entries, each behind an alias.

``opensearch://host:9200#docs``, ``opensearch://user:password@host:9200?tls=true#docs``. `docs` and
`docs__documents` are aliases of `docs.1` and `docs__documents.1`: the store can be told to make no index
for an alias, and other aliases can lead readers there. The identity is the mapping's ``_meta``.
What must stay true: a missing index is never made by a write; a bulk answer is 200 also when items
failed, so every item's status is read; a ledger entry is written only over the one that was judged (its
sequence number says so), so of two writers one is refused and asks again; what is to be found by a
search is refreshed first. Versions of documents are not the store's own: numbers of two logs cannot
be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from opensearchpy import AsyncOpenSearch, exceptions
from opensearchpy.helpers import async_scan

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
from pipeline.indexing.vectors import Vector, dense

TIMEOUT_S = 30
MAX_DIMENSIONS = 16_000
"""Of a `knn_vector` in OpenSearch 2.12 and newer."""
SUFFIX = ".1"
"""Of an index's own name: no name of a collection holds a dot."""
_PAGE = 500
_WHOLE = {"allow_partial_search_results": "false"}  # a shard that is away is an error


class OpenSearchCollection(Collection):
    """See the module."""

    # aiohttp warns that a body of 1 MiB blocks the loop; smaller requests are no slower.
    limits = SinkLimits(max_points=500, max_bytes=960 * 1024)
    has_aliases = True

    def __init__(self, name: str, where: str, **client: Any) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.ledger = f"{name}__documents"
        self._options = client
        self._client: Any = None
        self._seen: dict[
            str, Mapping[str, Any]
        ] = {}  # ledger id -> where a write is conditional on

    async def connect(self) -> None:
        """Make the client, and ask once."""
        if self._client is None:
            self._client = AsyncOpenSearch(**self._options, timeout=TIMEOUT_S, max_retries=0)
        with told():
            await self._client.info()

    async def read_identity(self) -> CollectionIdentity | None:
        """From the mapping of the index behind the alias."""
        with told():
            try:
                found = await self._client.indices.get_mapping(index=self.name)
            except exceptions.NotFoundError:
                return None
        (mapping,) = found.values()
        meta = mapping["mappings"].get("_meta") or {}
        return CollectionIdentity.from_json(meta.get("embedstream"), self.where)

    async def open(self, identity: CollectionIdentity, *, create: bool = True) -> None:
        """See `Collection`. An alias for readers may name another index tomorrow: it is not written."""
        await self.connect()
        if (owner := await self._owner(self.name)) not in (None, self.name):
            raise WrongCollection(
                f"{self.where} is an alias of {owner}, and aliases are for readers: write into #{owner}"
            )
        await super().open(identity, create=create)

    async def _owner(self, alias: str) -> str | None:
        """The collection whose index this alias names; None when there is none."""
        with told():
            try:
                found = await self._client.indices.get_alias(name=alias)
            except exceptions.NotFoundError:
                return None
        owner: str = next(iter(found)).removesuffix(SUFFIX)
        return owner

    async def lead_alias(self, alias: str) -> None:
        """See `Collection`. Chunks and ledger change their names in one step."""
        actions: list[Any] = []
        for name, mine in ((alias, self.name), (f"{alias}__documents", self.ledger)):
            owner = await self._owner(name)
            with told():
                if owner == name or (
                    owner is None and await self._client.indices.exists(index=name)
                ):
                    raise StoreRefused(f"{name} is a collection, not an alias: choose another name")
            if owner is not None:
                actions.append({"remove": {"index": owner + SUFFIX, "alias": name}})
            actions.append({"add": {"index": mine + SUFFIX, "alias": name}})
        with told():
            await self._client.indices.update_aliases(body={"actions": actions})

    async def create(self, identity: CollectionIdentity) -> None:
        """The ledger first: chunks without one would be unfinished."""
        if identity.dimensions > MAX_DIMENSIONS:
            raise WrongCollection(
                f"OpenSearch takes {MAX_DIMENSIONS} dimensions at most and the model gives "
                f"{identity.dimensions}: set document.dimensions"
            )
        await self._make(self.ledger, LEDGER, {})
        meta = {"_meta": {"embedstream": identity.to_json()}}
        await self._make(self.name, {**meta, **_chunk_mapping(identity.dimensions)}, {"knn": True})

    async def _make(
        self, alias: str, mapping: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        with told():
            body = {"settings": {"index": settings}, "mappings": mapping, "aliases": {alias: {}}}
            try:
                await self._client.indices.create(index=alias + SUFFIX, body=body)
            except exceptions.RequestError as error:
                if error.error != "resource_already_exists_exception":
                    raise  # else it is there

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`. By id, which sees what no refresh has shown yet."""
        if not document_ids:
            return {}
        self._seen = {_entry_id(one): {"op_type": "create"} for one in document_ids}
        with told():
            answer = await self._client.mget(index=self.ledger, body={"ids": list(self._seen)})
        entries = {}
        for doc in answer["docs"]:
            if "error" in doc:
                raise StoreUnavailable(f"the ledger cannot be read: {doc['error']['type']}")
            if doc["found"]:
                self._judged(doc)
                entry = Entry.from_fields(doc["_source"])
                entries[entry.document_id] = entry
        return entries

    def _judged(self, doc: Mapping[str, Any]) -> None:
        self._seen[doc["_id"]] = {
            "if_seq_no": doc["_seq_no"],
            "if_primary_term": doc["_primary_term"],
        }

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        points = (
            (
                (
                    {"index": {"_id": chunk_id(write.document_id, chunk.ordinal)}},
                    {
                        "document_id": write.document_id,
                        "ordinal": chunk.ordinal,
                        "text": chunk.text,
                        "metadata": dict(write.metadata),
                        "embedding": dense(chunk.vector).tolist(),
                    },
                ),
                # As JSON a number takes about twenty characters.
                21 * chunk.vector.size + 4 * len(chunk.text) + 4 * len(str(write.metadata)) + 800,
            )
            for write in writes
            for chunk in write.chunks or ()
        )
        for batch in batched(points, self.limits):
            await self._bulk(self.name, [line for pair in batch for line in pair])

    async def _bulk(self, alias: str, lines: list[Any], *, refresh: bool = False) -> list[Any]:
        with told():
            answer = await self._client.bulk(
                index=alias,
                body=lines,
                params={"require_alias": "true", "refresh": "true" if refresh else "false"},
            )
        items = [next(iter(item.values())) for item in answer["items"]]
        failed = [one for one in items if "error" in one]
        for one in failed:
            if one["status"] != 400:  # the others are asked again with it
                raise StoreUnavailable(_told_of(one["status"], one["error"]))
        if failed:
            raise StoreRefused(_told_of(400, failed[0]["error"]))
        return items

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`. Also what this very write stored can be searched after it."""
        by_count: dict[int, list[str]] = {}
        for document_id, n in keep.items():
            by_count.setdefault(n, []).append(document_id)
        groups = [
            _filtered({"terms": {"document_id": ids}}, {"range": {"ordinal": {"gte": n}}})
            for n, ids in by_count.items()
        ]
        with told():
            await self._client.indices.refresh(index=self.name)
        for start in range(0, len(groups), 256):  # clauses of one query are limited to 1,024
            query = {"bool": {"should": groups[start : start + 256]}}
            while hits := await self._hits(query=query, size=_PAGE, _source=False, sort=["_doc"]):
                gone = [{"delete": {"_id": hit["_id"]}} for hit in hits]
                await self._bulk(self.name, gone, refresh=True)

    async def _hits(self, **body: Any) -> list[Any]:
        with told():
            answer = await self._client.search(index=self.name, body=body, params=_WHOLE)
        hits: list[Any] = answer["hits"]["hits"]
        return hits

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`. Only over the entries that were read."""
        lines: list[Any] = []
        for entry in entries:
            condition = dict(self._seen[_entry_id(entry.document_id)])
            action = condition.pop("op_type", "index")
            lines.append({action: {"_id": _entry_id(entry.document_id), **condition}})
            lines.append(entry.to_fields())
        for item in await self._bulk(self.ledger, lines):
            self._judged(item)

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        hits = await self._hits(
            size=k,
            query={"knn": {"embedding": {"vector": dense(vector).tolist(), "k": k}}},
            _source={"excludes": ["embedding"]},
        )
        return [
            Hit(
                hit["_source"]["document_id"],
                hit["_source"]["ordinal"],
                hit["_source"]["text"],
                hit["_source"]["metadata"],
                2.0 * hit["_score"] - 1.0,  # a score of the space cosinesimil is (1 + cosine) / 2
            )
            for hit in hits
        ]

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        there = {"bool": {"must_not": {"term": {"content_hash": DELETED}}}}
        with told():
            await self._client.indices.refresh(index=f"{self.name},{self.ledger}")
            n_documents = await self._client.count(index=self.ledger, body={"query": there})
            n_chunks = await self._client.count(index=self.name)
            newest = await self._client.search(
                index=self.ledger,
                body={"size": 1, "sort": [{"changed_at_ms": "desc"}]},
                params=_WHOLE,
            )
        hits = newest["hits"]["hits"]
        changed = hits[0]["_source"]["changed_at_ms"] if hits else None
        return n_documents["count"], n_chunks["count"], changed

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        with told():
            await self._client.indices.refresh(index=self.name)
            async for hit in async_scan(self._client, index=self.name, size=_PAGE):
                source = hit["_source"]
                yield Row(
                    hit["_id"],
                    source["document_id"],
                    source["ordinal"],
                    source["text"],
                    source["metadata"],
                    np.asarray(source["embedding"], dtype=np.float32),
                )

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        with told():
            await self._client.indices.refresh(index=self.ledger)
            async for hit in async_scan(self._client, index=self.ledger, size=_PAGE):
                yield Entry.from_fields(hit["_source"])

    async def drop(self) -> None:
        """See `Collection`."""
        with told():
            for alias in (self.name, self.ledger):
                await self._client.indices.delete(index=alias + SUFFIX, ignore_unavailable=True)

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _chunk_mapping(dimensions: int) -> dict[str, Any]:
    return {
        "dynamic": "strict",
        "properties": {
            "document_id": {"type": "keyword"},
            "ordinal": {"type": "integer"},
            "text": {"type": "text"},
            # Kept, not indexed: the same field is a number in one document and a text in another.
            "metadata": {"type": "object", "enabled": False},
            "embedding": {
                "type": "knn_vector",
                "dimension": dimensions,
                "method": {"name": "hnsw", "space_type": "cosinesimil", "engine": "lucene"},
            },
        },
    }


_KEPT = {"type": "keyword", "index": False, "doc_values": False}
LEDGER: dict[str, Any] = {
    "dynamic": "strict",
    "properties": {
        "document_id": _KEPT,
        "source": _KEPT,
        "number": {"type": "long", "index": False, "doc_values": False},
        "content_hash": {"type": "keyword"},
        "n_chunks": {"type": "integer", "index": False},
        "changed_at_ms": {"type": "long"},
    },
}


def _filtered(*filters: dict[str, Any]) -> dict[str, Any]:
    return {"bool": {"filter": list(filters)}}


def _entry_id(document_id: str) -> str:
    """Beside the chunks' ordinals. One id over 512 bytes would fail its whole request."""
    return chunk_id(document_id, -1)


def _told_of(status: Any, error: Mapping[str, Any]) -> str:
    """Kinds of errors, which are words of the store; its reasons quote what a document held."""
    kind = str(error.get("type", ""))[:100]
    hint = {
        "cluster_block_exception": "the index is read-only, or the disk is nearly full",
        "version_conflict_engine_exception": "another writer changed the document meanwhile",
        "rejected_execution_exception": "the node has too much to do",
        "security_exception": "this user may not",
    }.get(kind)
    return f"HTTP {status}: {kind}{f' ({hint})' if hint else ''}"


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the client as ours."""
    try:
        yield
    except exceptions.ConnectionError as error:  # also a time-out
        raise StoreUnavailable(f"no answer ({type(error.info).__name__})") from error
    except exceptions.TransportError as error:
        info = error.info if isinstance(error.info, dict) else {}
        cause = info.get("error") if isinstance(info.get("error"), dict) else {}
        if error.status_code == 401:
            raise StoreUnavailable("HTTP 401: user or password is wrong") from error
        if error.status_code == 413:  # its body is empty
            raise StoreRefused("HTTP 413: larger than http.max_content_length") from error
        message = _told_of(error.status_code, cause or {})
        if error.status_code == 400:
            raise StoreRefused(message) from error
        raise StoreUnavailable(message) from error
    except exceptions.OpenSearchException as error:  # what answered is no OpenSearch
        raise StoreUnavailable(f"the answer cannot be read ({type(error).__name__})") from error


def collection(url: CollectionUrl) -> OpenSearchCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("tls", "ssl_ca_certs"))
    if url.host is None:
        raise ValueError("opensearch: no host is named: opensearch://localhost:9200#docs")
    tls = url.query.get("tls", "false")
    if tls not in ("true", "false"):
        raise ValueError(f"opensearch: tls is {tls!r}: true or false")
    if tls == "false" and "ssl_ca_certs" in url.query:
        raise ValueError("opensearch: ssl_ca_certs needs tls=true")
    login = {"http_auth": (url.user, url.password or "")} if url.user else {}
    host = {"host": url.host, "port": url.port or 9200}
    prefix = url.path.strip("/")
    return OpenSearchCollection(
        url.collection,
        url.shown,
        hosts=[{**host, "url_prefix": prefix} if prefix else host],
        use_ssl=tls == "true",
        ca_certs=url.query.get("ssl_ca_certs"),
        **login,
    )

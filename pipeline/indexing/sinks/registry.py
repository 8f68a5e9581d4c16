"""The stores: scheme -> where its sink is, and what to install for it. One row each.

Who calls it: the settings (is this a destination?), the graph and the commands (open it).
What must stay true: a sink's module, and with it the vendor's client, is imported only when an
address names it.
"""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import dataclass
from importlib.util import find_spec

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.sinks.base import Collection, StoreUnavailable
from pipeline.indexing.urls import CollectionUrl, parse_collection_url


@dataclass(frozen=True, slots=True)
class SinkRow:
    """module holds a function ``collection(url)``; client: the package it imports; extra: the
    optional dependency that brings it; one_process: a second process that writes is locked out."""

    module: str
    client: str
    extra: str
    example: str
    one_process: bool = False


SINKS: dict[str, SinkRow] = {
    "lance": SinkRow("lance", "lancedb", "lance", "lance:///var/lib/index#docs"),
    "qdrant": SinkRow("qdrant", "qdrant_client", "qdrant", "qdrant://localhost:6333#docs"),
    "postgresql": SinkRow("pgvector", "psycopg", "pgvector", "postgresql://user@host/db#docs"),
    "opensearch": SinkRow(
        "opensearch", "opensearchpy", "opensearch", "opensearch://localhost:9200#docs"
    ),
    "chroma": SinkRow("chroma", "chromadb", "chroma", "chroma://localhost:8000#docs"),
    "milvus": SinkRow("milvus", "pymilvus", "milvus", "milvus://localhost:19530#docs"),
    "parquet": SinkRow(
        "parquet", "pyarrow", "parquet", "parquet:///var/lib/index#docs", one_process=True
    ),
    "redis-vectors": SinkRow(
        "redis_vectors", "redis", "redis-vectors", "redis-vectors://localhost:6379#docs"
    ),
}


NOT_THERE: dict[str, str] = {
    "elasticsearch": "its mapping and its search for vectors are others than OpenSearch's, and opensearch:// "
    "speaks OpenSearch's alone: it is not supported",
    "weaviate": "it is not supported",
    "vespa": "it is not supported",
    "postgres": "write postgresql://",
    "pgvector": "write postgresql://",
}
"""Schemes of stores that somebody may try, and what to say."""


def is_collection(url: str) -> bool:
    """Does this address name a vector store, be it one that is not supported?"""
    scheme = url.partition(":")[0].lower()
    return scheme in SINKS or scheme in NOT_THERE


def check_collection_url(url: str) -> tuple[CollectionUrl, SinkRow]:
    """An address, parsed, and its store; nothing is imported.

    Raises `ValueError`: no such store, a faulty address, or its client is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme in NOT_THERE:
        raise ValueError(f"{scheme}: {NOT_THERE[scheme]}; there are: {', '.join(sorted(SINKS))}")
    parsed = parse_collection_url(url)
    row = SINKS.get(parsed.scheme)
    if row is None:
        raise ValueError(f"{parsed.scheme}: no such store; known: {', '.join(sorted(SINKS))}")
    if find_spec(row.client) is None:
        raise ValueError(
            f"{parsed.scheme}: its client is not installed: pip install 'embedstream[{row.extra}]'"
        )
    return parsed, row


def open_collection(url: str) -> Collection:
    """The collection at an address, not connected yet. Raises `ValueError`."""
    parsed, row = check_collection_url(url)
    module = importlib.import_module(f"pipeline.indexing.sinks.{row.module}")
    collection: Collection = module.collection(parsed)
    return collection


async def reach_collection(url: str) -> tuple[str, ...]:
    """Whether the store behind an address answers; creates no collection.

    Returns one line when the collection does not exist yet. Raises `ConnectionError` or `ValueError`
    with one line and the remedy.
    """
    collection = await asyncio.to_thread(open_collection, url)
    try:
        await collection.connect()
        found = await collection.read_identity()
    except StoreUnavailable as error:
        raise ConnectionError(f"{collection.where}: {error}") from error
    except WrongCollection as error:
        raise ValueError(str(error)) from error
    finally:
        await collection.aclose()
    return () if found else (f"{collection.where} does not exist yet: it will be made",)

"""The stores: scheme -> where its sink is, and what to install for it. One row each.

Who calls it: the settings (is this a destination?), the graph and the commands (open it).
What must stay true: a sink's module, and with it the vendor's client, is imported only when an
address names it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from pipeline.indexing.sinks.base import Collection
from pipeline.indexing.urls import parse_collection_url


@dataclass(frozen=True, slots=True)
class SinkRow:
    """module holds a function ``collection(url)``; extra: the optional dependency that it needs."""

    module: str
    extra: str
    example: str


SINKS: dict[str, SinkRow] = {
    "lance": SinkRow("lance", "lance", "lance:///var/lib/index#docs"),
    "postgresql": SinkRow("pgvector", "pgvector", "postgresql://user@localhost/db#docs"),
}


def is_collection(url: str) -> bool:
    """Does this address name a vector store?"""
    return url.partition(":")[0].lower() in SINKS


def open_collection(url: str) -> Collection:
    """The collection at an address, not connected yet.

    Raises `ValueError`: no such store, a faulty address, or its client is not installed.
    """
    parsed = parse_collection_url(url)
    row = SINKS.get(parsed.scheme)
    if row is None:
        raise ValueError(f"{parsed.scheme}: no such store; known: {', '.join(sorted(SINKS))}")
    try:
        module = importlib.import_module(f"pipeline.indexing.sinks.{row.module}")
    except ImportError as error:
        raise ValueError(
            f"{parsed.scheme}: its client is not installed ({error.name}): "
            f"pip install 'embedstream[{row.extra}]'"
        ) from error
    collection: Collection = module.collection(parsed)
    return collection

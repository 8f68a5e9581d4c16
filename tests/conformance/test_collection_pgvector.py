"""PostgreSQL with pgvector under the suite of collections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.conformance.collection_suite import CollectionConformance
from tests.support.stores import new_postgres


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """One server for the module."""
    made = new_postgres()
    asyncio.run(made.start())
    try:
        yield made.url
    finally:
        made.close()


class TestVector(CollectionConformance):
    """Type `vector`, with an HNSW index."""

    @pytest.fixture
    def address(self, server: str) -> str:
        """One database, a table per test."""
        return f"{server}#NAME"

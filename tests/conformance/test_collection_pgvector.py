"""PostgreSQL with pgvector under the suite of collections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import Chunk, Version, Write
from pipeline.indexing.sinks.base import Collection
from pipeline.indexing.sinks.registry import open_collection
from pipeline.indexing.vectors import SparseVector
from tests.conformance.collection_suite import IDENTITIES, CollectionConformance
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


class TestSparse(TestVector):
    """Type `sparsevec`, with an HNSW index over the inner product."""

    kind = "sparse"

    async def test_a_vector_with_more_weights_than_the_index_takes_is_refused_alone(
        self, collection: Collection
    ) -> None:
        """A table takes 16,000 weights of a `sparsevec`, an HNSW index 1,000."""
        ids = np.arange(1001, dtype=np.int32)
        heavy = SparseVector(ids, np.ones(len(ids), np.float32))
        fits = SparseVector(ids[1:], np.ones(1000, np.float32))
        writes = [
            Write(name, Version("topic/0", 1), name, (Chunk(0, name, vector),))
            for name, vector in (("fits", fits), ("heavy", heavy), ("fits too", fits))
        ]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]
        assert "1000" in outcomes[1].reason

    async def test_halves_of_numbers_are_for_dense_vectors(self, server: str) -> None:
        made = open_collection(server + "?type=halfvec#halves")
        try:
            with pytest.raises(WrongCollection, match="halfvec is for dense vectors"):
                await made.open(IDENTITIES["sparse"])
        finally:
            await made.aclose()

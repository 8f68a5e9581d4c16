"""OpenSearch under the suite of collections: a real node with k-NN, and what only it refuses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from opensearchpy import AsyncOpenSearch, exceptions

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import chunk_id
from pipeline.indexing.sinks.base import StoreRefused, StoreUnavailable
from pipeline.indexing.sinks.opensearch import OpenSearchCollection, told
from pipeline.indexing.sinks.registry import open_collection
from tests.conformance.collection_suite import (
    IDENTITY,
    CollectionConformance,
    contents,
    expected,
    put,
)
from tests.support.stores import OpenSearchServer, new_opensearch

pytestmark = [pytest.mark.heavy_store, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[OpenSearchServer]:
    """One node for the module; requests over 1 MB are refused, as proxies do it."""
    made = new_opensearch(http__max_content_length="1mb")
    asyncio.run(made.start())
    try:
        yield made
    finally:
        made.close()


class TestOpenSearch(CollectionConformance):
    """Engine lucene, space cosinesimil."""

    examples = 8

    @pytest.fixture
    def address(self, server: OpenSearchServer) -> str:
        """An alias per test."""
        return f"{server.url}#NAME"

    @pytest.fixture
    async def client(self, server: OpenSearchServer) -> Any:
        """The vendor's client, beside the collection."""
        made = AsyncOpenSearch(hosts=[{"host": server.host, "port": server.port}])
        yield made
        await made.close()

    async def test_an_id_beyond_what_the_store_takes_fails_nobody_elses_write(
        self, collection: OpenSearchCollection
    ) -> None:
        """H01: an _id over 512 bytes would fail the whole bulk request."""
        writes = [put(name, 1, ["x"]) for name in ("a", "é" * 400, "b")]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written"] * 3
        assert await contents(collection) == expected({w.document_id: w for w in writes})

    async def test_what_one_document_may_not_say_is_told_without_its_words(
        self, collection: OpenSearchCollection, client: AsyncOpenSearch
    ) -> None:
        """H06: HTTP 200 with errors inside; the bad document fails alone."""
        # A keyword is limited to 32,766 bytes: the only field of ours that can be too long.
        writes = [put("a", 1, ["x"]), put("secret" * 6000, 1, ["y"]), put("b", 1, ["z"])]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]
        assert outcomes[1].reason == "HTTP 400: illegal_argument_exception"
        assert set(await contents(collection)) == {chunk_id("a", 0), chunk_id("b", 0)}

    @pytest.mark.filterwarnings("ignore:Sending a large body")
    async def test_a_document_over_the_size_of_a_request_is_refused_alone(
        self, collection: OpenSearchCollection
    ) -> None:
        """H02: 413 comes with an empty body."""
        writes = [put("a", 1, ["x"]), put("big", 1, ["y" * 1_200_000]), put("b", 1, ["z"])]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]
        assert outcomes[1].reason == "HTTP 413: larger than http.max_content_length"

    async def test_metadata_of_changing_types_is_kept_as_it_is(
        self, collection: OpenSearchCollection
    ) -> None:
        writes = [
            put("a", 1, ["x"], n=1),
            put("b", 1, ["x"], n="one"),
            put("c", 1, ["x"], n={"deep": [1, {"a": None}], "a.b": 2**60}),
        ]
        assert {o.kind for o in await collection.write(writes, now_ms=1)} == {"written"}
        assert await contents(collection) == expected({w.document_id: w for w in writes})

    async def test_a_write_makes_no_index(self, url: str, client: AsyncOpenSearch) -> None:
        """Also where the node would make one: automatic creation is on by default."""
        made = open_collection(url)
        await made.open(IDENTITY)
        await made.drop()
        with pytest.raises(StoreUnavailable, match="index_not_found"):
            await made.write([put("a", 1, ["x"])], now_ms=1)
        with pytest.raises(StoreUnavailable, match="index_not_found"):
            await made.put_chunks([put("a", 1, ["x"])])
        name = url.partition("#")[2]
        assert await client.indices.get(index=f"{name}*") == {}
        await made.aclose()

    async def test_a_read_only_index_holds_the_batch_back(
        self, collection: OpenSearchCollection, client: AsyncOpenSearch
    ) -> None:
        """The node does this by itself when its disk is nearly full."""
        for setting in ("read_only_allow_delete", "read_only", "write"):
            blocks = {f"index.blocks.{setting}": True}
            await client.indices.put_settings(index=collection.name, body=blocks)
            with pytest.raises(StoreUnavailable, match="cluster_block_exception"):
                await collection.write([put("a", 1, ["x"])], now_ms=1)
            blocks = {f"index.blocks.{setting}": None}
            await client.indices.put_settings(index=collection.name, body=blocks)
        outcomes = await collection.write([put("a", 1, ["x"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["written"]

    @pytest.mark.parametrize("existing", [False, True])
    async def test_of_two_writers_of_one_document_the_one_that_judged_early_is_sent_back(
        self, collection: OpenSearchCollection, url: str, existing: bool
    ) -> None:
        """The ledger is written only over the entry that was read, or where there was none."""
        other = open_collection(url)
        await other.open(IDENTITY)
        if existing:
            await collection.write([put("a", 1, ["first"])], now_ms=1)
        real = collection.put_chunks

        async def overtaken(writes: Any) -> None:
            await other.write([put("a", 7, ["newer"])], now_ms=1)
            await real(writes)

        collection.put_chunks = overtaken  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="another writer"):
            await collection.write([put("a", 2, ["older"])], now_ms=1)
        del collection.put_chunks
        outcomes = await collection.write([put("a", 2, ["older"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["stale"]
        await other.aclose()

    async def test_an_alias_never_takes_the_name_of_a_collection(
        self, collection: OpenSearchCollection, url: str, client: AsyncOpenSearch
    ) -> None:
        other = open_collection(f"{url}x")
        await other.open(IDENTITY)
        with pytest.raises(StoreRefused, match="not an alias"):
            await collection.lead_alias(f"{collection.name}x")
        await client.indices.create(index=f"{collection.name}y")
        with pytest.raises(StoreRefused, match="not an alias"):
            await collection.lead_alias(f"{collection.name}y")
        await client.indices.delete(index=f"{collection.name}y")
        await other.drop()
        await other.aclose()

    async def test_an_index_of_others_is_left_alone(
        self, url: str, client: AsyncOpenSearch
    ) -> None:
        name = url.partition("#")[2]
        await client.indices.create(index=name)
        made = open_collection(url)
        with pytest.raises(WrongCollection, match="another collection"):
            await made.open(IDENTITY)
        await made.aclose()
        await client.indices.delete(index=name)


@pytest.fixture
def busy() -> Iterator[OpenSearchServer]:
    """A node that takes almost no writes at a time."""
    made = new_opensearch(indexing_pressure__memory__limit="20kb")
    asyncio.run(made.start())
    try:
        yield made
    finally:
        made.close()


async def test_a_node_with_too_much_to_do_and_one_that_died_lose_nothing(
    busy: OpenSearchServer,
) -> None:
    """H08: 429 is waited for; what was told as written is there after SIGKILL."""
    made = open_collection(f"{busy.url}#docs")
    await made.open(IDENTITY)
    kept = put("kept", 1, ["x"])
    assert [o.kind for o in await made.write([kept], now_ms=1)] == ["written"]
    with pytest.raises(StoreUnavailable, match="rejected_execution_exception"):
        await made.write([put("big", 1, ["y" * 60_000])], now_ms=1)
    busy.kill()
    with pytest.raises(StoreUnavailable, match="no answer"):
        await made.write([put("a", 1, ["x"])], now_ms=1)
    await busy.restart()
    async with asyncio.timeout(60):
        while True:
            try:
                outcomes = await made.write([put("a", 1, ["x"])], now_ms=1)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.2)
    assert [o.kind for o in outcomes] == ["written"]
    assert set(await contents(made)) == {chunk_id("a", 0), chunk_id("kept", 0)}
    await made.aclose()


async def test_a_store_that_is_down_is_told_in_one_line_without_the_password() -> None:
    made = open_collection(f"opensearch://me:{uuid.uuid4().hex}@127.0.0.1:1#docs")
    with pytest.raises(StoreUnavailable) as caught:
        await made.open(IDENTITY)
    await made.aclose()
    assert "\n" not in str(caught.value) and made.where == "opensearch://me@127.0.0.1:1#docs"
    assert str(caught.value) == "no answer (ClientConnectorError)"


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (exceptions.AuthenticationException(401, "x", {}), StoreUnavailable, "password is wrong"),
        (exceptions.AuthorizationException(403, "x", {}), StoreUnavailable, "HTTP 403"),
        (exceptions.TransportError(429, "x", "too many"), StoreUnavailable, "HTTP 429"),
        (exceptions.TransportError(503, "x", None), StoreUnavailable, "HTTP 503"),
        (exceptions.TransportError(413, "", ""), StoreRefused, "max_content_length"),
        (exceptions.ConnectionTimeout("T", "x", TimeoutError("x")), StoreUnavailable, "no answer"),
        (exceptions.SerializationError("<html>"), StoreUnavailable, "cannot be read"),
    ],
)
def test_answers_that_this_node_does_not_give_are_sorted_too(
    error: Exception, expected: type[Exception], words: str
) -> None:
    """The node here has no security plugin, and no proxy stands before it."""
    with pytest.raises(expected, match=words), told():
        raise error


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("opensearch:///folder#docs", "no host"),
        ("opensearch://h?tls=maybe#docs", "true or false"),
        ("opensearch://h?ssl_ca_certs=/x#docs", "needs tls=true"),
        ("opensearch://h?engine=faiss#docs", "unknown parameter 'engine'"),
    ],
)
def test_a_faulty_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_collection(url)

"""Redis 8 vector sets under the suite of collections: a real Redis, and what only it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import Chunk, Version, Write, chunk_id
from pipeline.indexing.sinks.base import StoreRefused, StoreUnavailable
from pipeline.indexing.sinks.redis_vectors import RedisVectorCollection
from pipeline.indexing.sinks.registry import open_collection
from pipeline.local.redis import RedisServer
from tests.conformance.collection_suite import (
    IDENTITY,
    CollectionConformance,
    contents,
    expected,
    put,
    same,
)
from tests.support.servers import new_redis
from tests.support.stores import new_redis8

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One server for the module, which keeps what it has acknowledged."""
    made = new_redis8("--appendfsync", "always")
    asyncio.run(made.start())
    try:
        yield made
    finally:
        made.close()


class TestVectorSets(CollectionConformance):
    """Unquantized; length and direction are kept apart."""

    exact = False

    @pytest.fixture
    def address(self, server: RedisServer) -> str:
        """Keys per test."""
        return f"redis-vectors://{server.address}#NAME"

    @pytest.fixture
    async def client(self, server: RedisServer) -> AsyncIterator[Any]:
        """The vendor's client, beside the collection."""
        made = Redis(host=server.host, port=server.port)
        yield made
        await made.aclose()

    async def test_nothing_is_left_of_a_collection_that_was_dropped_or_emptied(
        self, collection: RedisVectorCollection, client: Any
    ) -> None:
        await collection.write([put("a", 1, ["x", "y"])], now_ms=1)
        await collection.write([put("a", 2, [])], now_ms=1)
        assert (await collection.status()).n_chunks == 0
        assert await client.exists(collection.name, collection.reach) == 0
        await collection.drop()
        assert await client.keys(f"{collection.name}*") == []
        await collection.create(IDENTITY)

    async def test_surplus_of_a_write_that_died_between_two_calls_is_found(
        self, collection: RedisVectorCollection
    ) -> None:
        """A vector set cannot be asked for the chunks of a document: the reach was raised first."""
        collection.limits = type(collection.limits)(max_points=2)
        real, calls = collection._call, 0

        async def dies_in_the_second(*commands: Any) -> list[Any]:
            nonlocal calls
            calls += commands[0][0] == "VADD"
            if calls == 2:
                raise ConnectionError("the process died here")
            return await real(*commands)

        collection._call = dies_in_the_second  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await collection.write([put("a", 1, list("vwxyz"))], now_ms=1)
        del collection._call
        assert len(await contents(collection)) == 2
        last = put("a", 2, ["only"])
        await collection.write([last], now_ms=1)
        assert same(await contents(collection), expected({"a": last}), exact=False)

    async def test_a_set_of_another_size_is_told_without_the_document(
        self, collection: RedisVectorCollection, client: Any
    ) -> None:
        """H03: somebody else's element fixed the size; the pipeline's error would quote the text."""
        await client.execute_command("VADD", collection.name, "VALUES", 3, 1, 2, 3, "x", "NOQUANT")
        outcomes = await collection.write([put("a", 1, ["secret"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["refused"]
        assert outcomes[0].reason == "Vector dimension mismatch - got 4 but set has 3"
        with pytest.raises(StoreRefused):
            await collection.put_chunks([put("a", 1, ["secret"])])

    async def test_of_two_writers_of_one_document_the_one_that_judged_early_is_sent_back(
        self, collection: RedisVectorCollection, url: str
    ) -> None:
        other = open_collection(url)
        await other.open(IDENTITY)
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

    async def test_a_collection_that_another_model_took_is_not_written_to(
        self, collection: RedisVectorCollection, url: str
    ) -> None:
        """Dropped and made anew while this one was open."""
        other = open_collection(url)
        await other.open(IDENTITY)
        await other.drop()
        newer = type(IDENTITY)(model="other", fingerprint="f9", dimensions=4)
        await other.open(newer)
        with pytest.raises(StoreUnavailable, match="made anew"):
            await collection.write([put("a", 1, ["x"])], now_ms=1)
        assert await contents(other) == {}
        await other.aclose()

    async def test_what_the_server_cannot_take_now_is_held_back(
        self, collection: RedisVectorCollection, client: Any
    ) -> None:
        """H08: full, and a replica."""
        await client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="memory is full"):
            await collection.write([put("a", 1, ["x"])], now_ms=1)
        await client.config_set("maxmemory", "0")
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match="read-only replica"):
            await collection.write([put("a", 1, ["x"])], now_ms=1)
        await client.execute_command("REPLICAOF", "NO", "ONE")
        outcomes = await collection.write([put("a", 1, ["x"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["written"]

    async def test_a_server_that_throws_keys_away_is_refused(self, url: str, client: Any) -> None:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            made = open_collection(url)
            with pytest.raises(StoreUnavailable, match="set noeviction"):
                await made.open(IDENTITY)
            await made.aclose()
        finally:
            await client.config_set("maxmemory-policy", "noeviction")

    async def test_keys_of_others_are_left_alone(self, url: str, client: Any) -> None:
        await client.set(url.partition("#")[2], "mine")
        made = open_collection(url)
        with pytest.raises(WrongCollection, match="another collection"):
            await made.open(IDENTITY)
        await made.aclose()

    async def test_vectors_of_any_length_come_back(self, collection: RedisVectorCollection) -> None:
        chunks = tuple(
            Chunk(i, "x", np.asarray([1, -2, 3, 0.5], np.float32) * np.float32(10.0**power))
            for i, power in enumerate((-6, 0, 6))
        )
        write = Write("a", Version("topic/0", 1), "h", chunks)
        await collection.write([write], now_ms=1)
        found = await contents(collection)
        for chunk in chunks:
            vector = np.frombuffer(found[chunk_id("a", chunk.ordinal)][4], np.float32)
            np.testing.assert_allclose(vector, chunk.vector, rtol=1e-5)


async def test_what_was_told_as_written_is_there_after_sigkill() -> None:
    """With `appendfsync always`."""
    server = new_redis8("--appendfsync", "always")
    await server.start()
    made = open_collection(f"redis-vectors://{server.address}#docs")
    await made.open(IDENTITY)
    writes = {f"d{i}": put(f"d{i}", 1, ["x", f"y{i}"]) for i in range(50)}
    await made.write(list(writes.values()), now_ms=1)
    server.kill()
    with pytest.raises(StoreUnavailable, match="no answer"):
        await made.write([put("a", 1, ["x"])], now_ms=1)
    await server.restart()
    assert same(await contents(made), expected(writes), exact=False)
    outcomes = await made.write(list(writes.values()), now_ms=2)
    assert {o.kind for o in outcomes} == {"unchanged"}
    await made.aclose()
    server.close()


async def test_a_wrong_password_is_told_in_one_line_without_it() -> None:
    server = new_redis8("--requirepass", "right")
    await server.start()
    for login, words in ((":hunter2@", "password is wrong"), ("", "password is wrong")):
        made = open_collection(f"redis-vectors://{login}{server.address}#docs")
        with pytest.raises(StoreUnavailable, match=words) as caught:
            await made.open(IDENTITY)
        assert "hunter2" not in str(caught.value) + made.where
        await made.aclose()
    server.close()


async def test_a_server_without_vector_sets_is_told_with_the_remedy() -> None:
    """Redis before 8, and Valkey."""
    server = new_redis()
    await server.start()
    made = open_collection(f"redis-vectors://{server.address}#docs")
    with pytest.raises(StoreUnavailable, match="Redis 8 has them"):
        await made.open(IDENTITY)
    await made.aclose()
    server.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis-vectors:///0#docs", "no host"),
        ("redis-vectors://h/folder#docs", "database number"),
        ("redis-vectors://h?tls=maybe#docs", "true or false"),
        ("redis-vectors://h?ssl_ca_certs=/x#docs", "needs tls=true"),
        ("redis-vectors://h?cluster=true#docs", "unknown parameter 'cluster'"),
    ],
)
def test_a_faulty_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_collection(url)

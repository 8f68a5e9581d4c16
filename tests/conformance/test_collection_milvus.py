"""Milvus under the suite of collections: Milvus Lite's server, and what the client refuses.

Lite is Milvus's own rewrite: its interface is the real one, its engine is not. Codes of errors that it
does not give are tested as the client raises them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from pymilvus import DataType, MilvusException

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import Chunk, Version, Write
from pipeline.indexing.sinks import milvus
from pipeline.indexing.sinks.base import StoreRefused, StoreUnavailable
from pipeline.indexing.sinks.milvus import MilvusCollection, told
from pipeline.indexing.sinks.registry import open_collection
from tests.conformance.collection_suite import (
    IDENTITY,
    CollectionConformance,
    contents,
    expected,
    put,
)
from tests.support.stores import MilvusServer, new_milvus

pytestmark = [pytest.mark.heavy_store, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[MilvusServer]:
    """One server for the module."""
    made = new_milvus()
    asyncio.run(made.start())
    try:
        yield made
    finally:
        made.close()


class TestMilvus(CollectionConformance):
    """Metric COSINE, strongly consistent."""

    examples = 8

    @pytest.fixture
    def address(self, server: MilvusServer) -> str:
        """A pair of collections per test."""
        return f"{server.url}#NAME"

    async def test_a_text_over_what_the_store_takes_is_refused_alone(
        self, collection: MilvusCollection
    ) -> None:
        """A bad row fails its batch, and the server does not name it. Bytes count, not characters."""
        writes = [put("a", 1, ["x"]), put("big", 1, ["é" * 40_000]), put("b", 1, ["z"])]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]
        assert outcomes[1].reason == "a chunk's text is over 65535 bytes"
        wanted = expected({w.document_id: w for w in (writes[0], writes[2])})
        assert await contents(collection) == wanted

    async def test_what_the_client_refuses_is_told_without_its_words(
        self, collection: MilvusCollection, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The client's own log quotes the value."""
        writes = [put("a", 1, ["x"]), put("bad", 1, ["x"], secret=2**70), put("b", 1, ["z"])]
        with caplog.at_level(logging.DEBUG):
            outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]
        assert outcomes[1].reason == "the client refused a value (DataNotMatchException)"
        assert "secret" not in caplog.text

    async def test_metadata_is_replaced_and_may_be_nested(
        self, collection: MilvusCollection
    ) -> None:
        await collection.write([put("a", 1, ["x"], old={"deep": [1, None]})], now_ms=1)
        last = put("a", 2, ["x"], new={"deep": ["1", {"b": True}]})
        await collection.write([last], now_ms=1)
        assert await contents(collection) == expected({"a": last})

    async def test_another_size_is_refused_by_the_server_too(
        self, collection: MilvusCollection
    ) -> None:
        """H03."""
        chunk = Chunk(0, "secret", np.ones(3, np.float32))
        with pytest.raises(StoreRefused) as caught:
            await collection.put_chunks([Write("b", Version("t", 1), "h", (chunk,))])
        assert "secret" not in str(caught.value)

    async def test_a_collection_of_others_is_left_alone(
        self, collection: MilvusCollection, url: str
    ) -> None:
        name = f"{url.partition('#')[2]}x"
        schema = collection._client.create_schema()
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("v", DataType.FLOAT_VECTOR, dim=2)
        collection._client.create_collection(name, schema=schema)
        made = open_collection(f"{url}x")
        with pytest.raises(WrongCollection, match="another collection"):
            await made.open(IDENTITY)
        await made.aclose()
        collection._client.drop_collection(name)

    async def test_an_alias_never_takes_the_name_of_a_collection(
        self, collection: MilvusCollection, url: str
    ) -> None:
        other = open_collection(f"{url}x")
        await other.open(IDENTITY)
        with pytest.raises(StoreRefused, match="not an alias"):
            await collection.lead_alias(f"{collection.name}x")
        await other.drop()
        await other.aclose()


async def test_a_server_that_ended_is_told_and_what_was_written_is_there_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM: Lite does not sync each batch, so it says nothing about SIGKILL."""
    monkeypatch.setattr(milvus, "TIMEOUT_S", 5.0)
    server = new_milvus()
    await server.start()
    made = open_collection(f"{server.url}#docs")
    await made.open(IDENTITY)
    writes = {f"d{i}": put(f"d{i}", 1, ["x", f"y{i}"]) for i in range(60)}
    await made.write(list(writes.values()), now_ms=1)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    async with asyncio.timeout(60):
        while server.running:
            await asyncio.sleep(0.05)
    with pytest.raises(StoreUnavailable):
        await made.write([put("a", 1, ["x"])], now_ms=1)
    await server.restart()
    async with asyncio.timeout(60):
        while True:
            try:
                assert await contents(made) == expected(writes)
                break
            except StoreUnavailable:
                await made.aclose()
                await made.connect()
                await made.read_identity()
    outcomes = await made.write(list(writes.values()), now_ms=2)
    assert {o.kind for o in outcomes} == {"unchanged"}
    await made.aclose()
    server.close()


async def test_a_store_that_is_down_is_told_in_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(milvus, "TIMEOUT_S", 1.0)
    made = open_collection("milvus://me:hunter2@127.0.0.1:1#docs")
    with pytest.raises(StoreUnavailable) as caught:
        await made.open(IDENTITY)
    await made.aclose()
    assert str(caught.value) == "no answer (code 2)"
    assert "hunter2" not in made.where


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (MilvusException(1100, "a secret"), StoreRefused, "code 1100"),
        (MilvusException(1, "a secret", is_input_error=True), StoreRefused, "code 1"),
        (MilvusException(8, "a secret"), StoreUnavailable, "too many requests"),
        (MilvusException(9, "a secret"), StoreUnavailable, "no writes are allowed now"),
        (MilvusException(100, "a secret"), StoreUnavailable, "collection is gone"),
        (MilvusException(65535, "auth check failure"), StoreUnavailable, "password is wrong"),
        (MilvusException(2, "a secret"), StoreUnavailable, "no answer"),
        (MilvusException(5000, "a secret"), StoreUnavailable, "the server failed"),
    ],
)
def test_answers_that_this_server_does_not_give_are_sorted_too(
    error: Exception, expected: type[Exception], words: str
) -> None:
    with pytest.raises(expected, match=words) as caught, told():
        raise error
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("milvus:///folder#docs", "no host"),
        ("milvus://h#a-b", "no '-'"),
        ("milvus://h?tls=maybe#docs", "true or false"),
        ("milvus://h?token=x#docs", "unknown parameter 'token'"),
    ],
)
def test_a_faulty_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_collection(url)


class TestSparse(CollectionConformance):
    """An inverted index, metric IP."""

    kind = "sparse"
    examples = 8

    @pytest.fixture
    def address(self, server: MilvusServer) -> str:
        """A pair of collections per test."""
        return f"{server.url}#NAME"

"""Chroma under the suite of collections: its real server, and what only it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from chromadb import errors

from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import Chunk, Version, Write
from pipeline.indexing.sinks import chroma
from pipeline.indexing.sinks.base import SinkLimits, StoreRefused, StoreUnavailable
from pipeline.indexing.sinks.chroma import ChromaCollection, told
from pipeline.indexing.sinks.registry import open_collection
from tests.conformance.collection_suite import (
    IDENTITY,
    CollectionConformance,
    contents,
    expected,
    put,
    same,
)
from tests.support.stores import ChromaServer, new_chroma

pytestmark = [pytest.mark.heavy_store, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[ChromaServer]:
    """One server for the module."""
    made = new_chroma()
    asyncio.run(made.start())
    try:
        yield made
    finally:
        made.close()


class TestChroma(CollectionConformance):
    """Space cosine; vectors are normalized and scaled back."""

    exact = False
    examples = 8

    @pytest.fixture
    def address(self, server: ChromaServer) -> str:
        """A pair of collections per test."""
        return f"{server.url}#NAME"

    async def test_metadata_is_replaced_not_merged(self, collection: ChromaCollection) -> None:
        """An upsert of Chroma keeps the fields that it does not name."""
        await collection.write([put("a", 1, ["x"], old=1, both=1)], now_ms=1)
        last = put("a", 2, ["x"], both=2)
        await collection.write([last], now_ms=1)
        assert same(await contents(collection), expected({"a": last}), exact=False)

    async def test_metadata_that_the_store_refuses_is_kept_as_it_is(
        self, collection: ChromaCollection
    ) -> None:
        writes = [
            put("nested", 1, ["x"], n={"deep": [1, {"a": None}]}),
            put("empty", 1, ["x"]),
            put("none", 1, ["x"], n=None, big=2**70),
        ]
        assert {o.kind for o in await collection.write(writes, now_ms=1)} == {"written"}
        wanted = expected({w.document_id: w for w in writes})
        assert same(await contents(collection), wanted, exact=False)

    async def test_more_than_the_server_takes_in_a_call_is_cut_into_calls(
        self, collection: ChromaCollection
    ) -> None:
        """H02: 5,461 points; above that the client itself refuses the whole batch."""
        vector = np.ones(4, np.float32)
        chunks = tuple(Chunk(i, "x", vector) for i in range(5600))
        write = Write("a", Version("topic/0", 1), "h", chunks)
        assert [o.kind for o in await collection.write([write], now_ms=1)] == ["written"]
        assert (await collection.status()).n_chunks == 5600
        collection.limits = SinkLimits(max_points=6000, max_bytes=1 << 30)
        again = dataclasses.replace(write, version=Version("topic/0", 2), content_hash="i")
        assert [o.kind for o in await collection.write([again], now_ms=1)] == ["refused"]

    async def test_a_chunk_beyond_what_a_request_holds_is_refused_alone(
        self, collection: ChromaCollection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server closes the connection at about 40 MB: that would be taken for an outage."""
        monkeypatch.setattr(chroma, "MAX_POINT_BYTES", 10_000)
        writes = [put("a", 1, ["x"]), put("big", 1, ["y" * 20_000]), put("b", 1, ["z"])]
        outcomes = await collection.write(writes, now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "written"]

    async def test_the_server_takes_the_largest_chunk_that_is_sent(
        self, collection: ChromaCollection
    ) -> None:
        write = put("big", 1, ["y" * (chroma.MAX_POINT_BYTES // 4 - 1000)])
        assert [o.kind for o in await collection.write([write], now_ms=1)] == ["written"]

    async def test_another_size_is_refused_by_the_server_too(
        self, collection: ChromaCollection
    ) -> None:
        """H03."""
        await collection.write([put("a", 1, ["x"])], now_ms=1)
        chunk = Chunk(0, "secret", np.ones(3, np.float32))
        with pytest.raises(StoreRefused) as caught:
            await collection.put_chunks([Write("b", Version("t", 1), "h", (chunk,))])
        assert str(caught.value) == "Collection expecting embedding with dimension of 4, got 3"

    async def test_a_collection_of_others_is_left_alone(
        self, collection: ChromaCollection, url: str
    ) -> None:
        name = f"{url.partition('#')[2]}x"
        await collection._client.create_collection(name)
        made = open_collection(f"{url}x")
        with pytest.raises(WrongCollection, match="another collection"):
            await made.open(IDENTITY)
        await made.aclose()
        await collection._client.delete_collection(name)

    async def test_a_tenant_that_is_not_there_is_told(self, server: ChromaServer) -> None:
        made = open_collection(f"{server.url}?tenant=nobody#docs")
        with pytest.raises(StoreUnavailable, match="tenant or database is gone"):
            await made.open(IDENTITY)
        await made.aclose()


async def test_what_was_told_as_written_is_there_after_sigkill() -> None:
    server = new_chroma()
    await server.start()
    made = open_collection(f"{server.url}#docs")
    await made.open(IDENTITY)
    writes = {f"d{i}": put(f"d{i}", 1, ["x", f"y{i}"]) for i in range(60)}
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


@pytest.fixture
async def heard() -> AsyncIterator[tuple[int, list[str]]]:
    """A listener that answers 401 to everything, and what it was told."""
    headers: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = b'{"error":"AuthorizationError","message":"a secret of theirs"}'
        head = f"HTTP/1.1 401 x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], headers
    server.close()
    await server.wait_closed()


async def test_each_collection_sends_its_own_token_and_tells_none(
    heard: tuple[int, list[str]],
) -> None:
    """The server here knows no users. The client shares connections with the first one's headers."""
    port, headers = heard
    for login in (":first@", ":second@", "me:third@"):
        made = open_collection(f"chroma://{login}127.0.0.1:{port}#docs")
        with pytest.raises(StoreUnavailable) as caught:
            await made.open(IDENTITY)
        await made.aclose()
        assert str(caught.value) == "the token, user or password is wrong"
        assert not any(word in made.where for word in ("first", "second", "third"))
    told_there = [head.lower() for head in headers]
    assert "x-chroma-token: first" in told_there[0] and "x-chroma-token: second" in told_there[1]
    assert "authorization: basic " in told_there[2] and "x-chroma-token" not in told_there[2]


def _answered(status: int, **headers: str) -> Exception:
    """What the client raises for an answer that it does not know."""
    request = httpx.Request("POST", "http://x")
    response = httpx.Response(status, request=request, text="a secret", headers=headers)
    error = Exception(response.text)
    error.__context__ = httpx.HTTPStatusError("x", request=request, response=response)
    return error


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (_answered(413), StoreRefused, "HTTP 413"),
        (_answered(429, **{"retry-after": "7"}), StoreUnavailable, "HTTP 429"),
        (_answered(503), StoreUnavailable, "HTTP 503"),
        (errors.RateLimitError("a secret"), StoreUnavailable, "RateLimitError"),
        (errors.QuotaError("a secret"), StoreUnavailable, "QuotaError"),
        (errors.InternalError("a secret"), StoreUnavailable, "InternalError"),
        (errors.InvalidArgumentError("a secret"), StoreRefused, "refused a value"),
        (httpx.ConnectError("a secret"), StoreUnavailable, "ConnectError"),
    ],
)
async def test_answers_that_this_server_does_not_give_are_sorted_too(
    error: Exception, expected: type[Exception], words: str
) -> None:
    async def fails() -> Any:
        raise error

    with pytest.raises(expected, match=words) as caught:
        await told(fails())
    assert "secret" not in str(caught.value)
    if "429" in words:
        assert isinstance(caught.value, StoreUnavailable) and caught.value.retry_after_s == 7.0


async def test_a_server_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client has no time-out."""
    monkeypatch.setattr(chroma, "TIMEOUT_S", 0.05)
    with pytest.raises(StoreUnavailable, match="no answer within"):
        await told(asyncio.Event().wait())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("chroma:///folder#docs", "no host"),
        ("chroma://h#ab", "3 characters"),
        ("chroma://h#docs-", "ends with a letter or number"),
        ("chroma://h?tls=maybe#docs", "true or false"),
        ("chroma://h?token=x#docs", "unknown parameter 'token'"),
    ],
)
def test_a_faulty_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_collection(url)

"""The client over a real Redis, against the real service with a fake model."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from embedstream_client import (
    AsyncClient,
    Client,
    Embeddings,
    EmbedstreamError,
    NoReply,
    Unreachable,
    _redis,
)
from embedstream_client.errors import (
    BadReply,
    ClientClosed,
    ClientFull,
    EmptyInput,
    Expired,
    Internal,
    InvalidRequest,
    Overloaded,
    TooLong,
)
from gpu.batch import PackedBatch
from pipeline.observe.metrics import PrometheusMetrics
from tests.support.client import (
    ScriptedService,
    embed_reply,
    failure,
    held,
    service,
    until,
    waiting_for,
)
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.killable import Proxy
from tests.support.servers import ServerInfo, new_redis, redis_ladder, unique

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


@pytest.fixture
def stream() -> str:
    return unique("embedstream.test")


@pytest.fixture
def url(redis_info: ServerInfo, stream: str) -> str:
    return f"redis://{redis_info.address}/0?stream={stream}"


@pytest.fixture
def source(redis_info: ServerInfo, stream: str) -> str:
    return f"redis://{redis_info.address}/{stream}"


@pytest.fixture
async def script(redis_info: ServerInfo, stream: str) -> AsyncIterator[ScriptedService]:
    scripted = ScriptedService(redis_info.address, stream)
    yield scripted
    await scripted.aclose()


def host_and_port(info: ServerInfo) -> tuple[str, int]:
    host, _, port = info.address.partition(":")
    return host, int(port)


def expected(text: str) -> np.ndarray:
    return fake_vector(fake_ids(text))


# --- what it is for ----------------------------------------------------------------------------------


async def test_the_four_tasks(url: str, source: str) -> None:
    runner = partial(FakeRunner, labels=("first", "second", "third"))
    async with service(source, runner=runner), AsyncClient.from_url(url) as client:
        embedded = await client.embed(["a b", "c", "d e f"])
        assert [e.index for e in embedded] == [0, 1, 2] and embedded.dimensions == 8
        for text, vector in zip(["a b", "c", "d e f"], embedded.vectors, strict=True):
            np.testing.assert_array_equal(vector, expected(text))
        assert np.asarray(embedded).shape == (3, 8)
        np.testing.assert_array_equal((await client.embed("c")).vector, embedded[1].vector)
        np.testing.assert_array_equal(
            (await client.embed([fake_ids("c")[0]])).vector, embedded[1].vector
        )

        documents = ["x y", {"id": "second", "text": "z"}, "w"]
        ranking = await client.rerank("q", documents)
        texts = ["x y", "z", "w"]
        for ranked in ranking:
            assert ranked.document == texts[ranked.index]
            assert ranked.score == pytest.approx(expected(f"q {ranked.document}")[0])
        assert [r.score for r in ranking] == sorted((r.score for r in ranking), reverse=True)
        assert next(r for r in ranking if r.index == 1).id == "second"
        assert len(await client.rerank("q", documents, top_n=1)) == 1
        assert (await client.rerank("q", documents, top_n=1)).best.index == ranking.best.index

        scores = await client.score("q", documents)
        assert [s.index for s in scores] == [0, 1, 2]
        np.testing.assert_allclose(scores.scores, [expected(f"q {t}")[0] for t in texts], rtol=1e-6)

        classified = await client.classify(["a b", "c"])
        by_label = dict(zip(("first", "second", "third"), expected("c").tolist(), strict=False))
        assert classified[1].scores == pytest.approx(by_label)
        assert classified.labels[1] == max(by_label, key=by_label.__getitem__)
        assert classified[1].score == pytest.approx(max(by_label.values()))
        assert embedded.usage.total_tokens == 6 and embedded.model.name == "fake"


async def test_vectors_are_views_of_the_reply(url: str, source: str) -> None:
    async with service(source), AsyncClient.from_url(url) as client:
        half = await client.embed("a b", dtype="float16")
        assert half.vector.dtype == np.float16 and half.dtype == "float16"
        assert not half.vector.flags.owndata and not half.vector.flags.writeable
        small = await client.embed("a b", dtype="int8")
        assert small.vector.dtype == np.int8 and small[0].scale is not None
        np.testing.assert_allclose(small.vector * small[0].scale, expected("a b"), atol=0.05)
        bits = await client.embed("a b", dtype="binary")
        np.testing.assert_array_equal(np.unpackbits(bits.vector), expected("a b") > 0)


async def test_a_thousand_callers_share_two_connections_and_one_reply_stream(
    source: str, stream: str, redis_info: ServerInfo, script: ScriptedService
) -> None:
    """K29, K28: the naive client needs a connection per caller and dies at the pool's bound."""
    async with (
        service(source),
        Proxy(*host_and_port(redis_info)) as proxy,
        AsyncClient.from_url(
            f"redis://127.0.0.1:{proxy.port}/0?stream={stream}", timeout=60
        ) as client,
    ):

        async def caller(number: int) -> None:
            text = f"caller {number}"
            np.testing.assert_array_equal((await client.embed(text)).vector, expected(text))

        await asyncio.gather(*(caller(number) for number in range(1000)))
        assert proxy.connections == 2
        streams = [k async for k in script.redis.scan_iter(match="embedstream.replies.*")]
        assert len(streams) == 1
        assert 0 < await script.redis.ttl(streams[0]) <= 300
        assert await script.redis.xlen(streams[0]) <= 512  # what was read is removed
    assert not await script.redis.exists(streams[0])


async def test_calls_survive_cut_connections(
    source: str, stream: str, redis_info: ServerInfo
) -> None:
    """Cut under load, again and again; every call is answered."""
    async with (
        service(source),
        Proxy(*host_and_port(redis_info)) as proxy,
        AsyncClient.from_url(
            f"redis://127.0.0.1:{proxy.port}/0?stream={stream}", timeout=50
        ) as client,
    ):
        done = 0

        async def caller(number: int) -> None:
            nonlocal done
            for turn in range(5):
                text = f"caller {number} turn {turn}"
                np.testing.assert_array_equal((await client.embed(text)).vector, expected(text))
                done += 1
                if done % 40 == 0:
                    proxy.cut()

        await asyncio.gather(*(caller(number) for number in range(40)))
        assert done == 200 and proxy.connections > 2


async def test_embed_many_keeps_order_bounds_and_counts(url: str, source: str) -> None:
    counts: list[int] = []
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for number in range(500):
            taken += 1
            yield f"text {number}"

    async with service(source), AsyncClient.from_url(url) as client:
        many = client.embed_many(texts(), batch_items=7, in_flight=3, progress=counts.append)
        number = 0
        async for embedding in many:
            assert embedding.index == number
            np.testing.assert_array_equal(embedding.vector, expected(f"text {number}"))
            number += 1
            assert taken <= number + 7 * (3 + 2)
        assert number == 500 and counts == sorted(counts) and counts[-1] == 500

        async def endless() -> AsyncIterator[str]:
            while True:
                yield "again"

        async with contextlib.aclosing(client.embed_many(endless(), batch_items=2)) as some:
            async for embedding in some:
                if embedding.index == 5:
                    break
        await until(lambda: len(client._open().calls) == 0)


# --- errors ------------------------------------------------------------------------------------------


async def test_errors_are_typed_and_name_their_items(url: str, source: str) -> None:
    long = " ".join(["word"] * 2000)
    async with service(source), AsyncClient.from_url(url) as client:
        with pytest.raises(TooLong) as caught:
            await client.embed(["fine", long, "fine too", long])
        assert caught.value.items == (1, 3) and not caught.value.retryable
        partial = await client.embed(["fine", long, "", "fine too"], partial=True)
        assert {i: e.code for i, e in partial.errors.items()} == {1: "too_long", 2: "empty_input"}
        np.testing.assert_array_equal(partial[3].vector, expected("fine too"))
        with pytest.raises(TooLong):
            _ = partial[1].vector
        ranking = await client.rerank("q", ["x", long, "y"], partial=True)
        assert [r.index for r in ranking][-1] == 1 and len(ranking) == 3
        with pytest.raises(InvalidRequest) as refused:
            await client.embed("x", truncate="middle")  # type: ignore[arg-type]
        assert refused.value.path == "$.truncate"
        with pytest.raises(EmptyInput):
            await client.embed([])
        with pytest.raises(TypeError):
            await client.embed("x", dimensionz=3)  # type: ignore[call-arg]
        for wrong, path in (([None], "$.input[0]"), (["a", 1.5], "$.input[1]"), (b"x", "$.input")):
            with pytest.raises(InvalidRequest) as caught_here:
                await client.embed(wrong)  # type: ignore[arg-type]
            assert caught_here.value.path == path
        with pytest.raises(InvalidRequest, match="list of texts"):
            await client.rerank("q", "one text")


async def test_one_oversized_item_of_many_fails_alone(url: str, source: str) -> None:
    """The service refuses the whole request; `embed_many` asks again for the rest."""
    texts = ["a", "b" * (1024 * 1024 + 1), "c"]
    async with service(source), AsyncClient.from_url(url) as client:
        found = [e async for e in client.embed_many(texts)]
    assert [e.error.code if e.error else None for e in found] == [None, "item_too_large", None]
    np.testing.assert_array_equal(found[2].vector, expected("c"))


async def test_silence_ends_at_the_time_out_and_says_what_to_look_at(url: str) -> None:
    """K29: the documented sample hung 58.9 s."""
    async with AsyncClient.from_url(url, timeout=0.1) as client:
        with pytest.raises(
            NoReply, match=r"no service reads the stream embedstream\.test"
        ) as caught:
            await client.embed("x")
    assert isinstance(caught.value, TimeoutError) and caught.value.retryable


async def test_a_reply_stream_that_is_not_allowed_is_named(url: str, source: str) -> None:
    async with (
        service(source + "?reply_prefixes=other."),
        AsyncClient.from_url(url, timeout=1.0) as client,
    ):
        with pytest.raises(NoReply, match="set reply_prefix"):
            await client.embed("x")


async def test_no_server_is_unreachable() -> None:
    async with AsyncClient.from_url("redis://127.0.0.1:1", timeout=0.3) as client:
        with pytest.raises(Unreachable) as caught:
            await client.ping()
        assert isinstance(caught.value, ConnectionError) and caught.value.retryable
        with pytest.raises(NoReply, match="cannot be used"):
            await client.embed("x")


async def test_wrong_credentials_fail_at_once_and_stay_secret() -> None:
    server = new_redis("--requirepass", "right")
    await server.start()
    for given in ("", ":wrong-secret@"):
        async with AsyncClient.from_url(f"redis://{given}{server.address}", timeout=60) as client:
            with pytest.raises(Unreachable, match="refuses this client") as caught:
                await client.embed("x")
            assert not caught.value.retryable and "wrong-secret" not in str(caught.value)
            assert "wrong-secret" not in repr(client)
    await server.stop()


async def test_few_rights_are_enough(stream: str) -> None:
    """The rights that docs/web.md names, and no others."""
    page = (Path(__file__).parents[2] / "docs" / "web.md").read_text("utf-8")
    (rights,) = re.findall(r"`ACL SETUSER web on >secret ([^`]*)`", page)
    server = new_redis()
    await server.start()
    scripted = ScriptedService(server.address, stream)
    allowed = rights.replace("embedstream.requests", stream).split()
    await scripted.redis.execute_command("ACL", "SETUSER", "web", "on", ">secret", *allowed)
    url = f"redis://web:secret@{server.address}/0?stream={stream}"
    async with AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        await client.ping()
        asking = group.create_task(client.embed("x"))
        await scripted.reply(await scripted.request(), embed_reply([(0, 3.0)]))
        assert (await asking).vector[0] == 3.0
        with pytest.raises(NoReply, match="busy or stopped"):
            await client.embed("y", timeout=0.2)
    elsewhere = f"redis://web:secret@{server.address}/0?stream=other"
    async with AsyncClient.from_url(elsewhere, timeout=30) as client:
        with pytest.raises(Unreachable, match="rights") as caught:
            await client.embed("x")
        assert not caught.value.retryable
    await scripted.aclose()
    await server.stop()


async def test_a_full_redis_is_overloaded(stream: str) -> None:
    server = new_redis("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    await server.start()
    url = f"redis://{server.address}?stream={stream}"
    async with AsyncClient.from_url(url, retries=0) as client:
        with pytest.raises(Overloaded) as caught:
            await client.embed("x" * 900_000)
        assert caught.value.retryable
    await server.stop()


# --- retries -----------------------------------------------------------------------------------------


async def test_only_what_is_retryable_is_tried_again(url: str, script: ScriptedService) -> None:
    async with AsyncClient.from_url(url, retries=2) as client, asyncio.TaskGroup() as group:
        asking = group.create_task(client.embed("x"))
        first = await script.request()
        await script.reply(first, failure("overloaded", retryable=True))
        second = await script.request()
        assert second["id"] != first["id"], "an answer that is remembered must not be had again"
        await script.reply(second, embed_reply([(0, 2.0)]))
        assert (await asking).vector[0] == 2.0

        asking = group.create_task(_error_of(client.embed("x")))
        await script.reply(await script.request(), failure("too_long", retryable=False, items=[0]))
        assert (await asking).code == "too_long"

        asking = group.create_task(_error_of(client.embed("x")))
        for _ in range(3):
            await script.reply(await script.request(), failure("a_new_code", retryable=True))
        error = await asking
        assert isinstance(error, Internal) and error.code == "a_new_code"


async def _error_of(call: Awaitable[object]) -> EmbedstreamError:
    with pytest.raises(EmbedstreamError) as caught:
        await call
    return caught.value


async def _result_of(call: Awaitable[Embeddings]) -> Embeddings | EmbedstreamError:
    try:
        return await call
    except EmbedstreamError as error:
        return error


async def test_an_early_expired_is_blamed_on_the_clocks(url: str, script: ScriptedService) -> None:
    async with AsyncClient.from_url(url, retries=0) as client, asyncio.TaskGroup() as group:
        asking = group.create_task(_error_of(client.embed("x", timeout=25)))
        await script.reply(await script.request(), failure("expired", retryable=True))
        error = await asking
        assert isinstance(error, Expired) and "clocks" in error.message


# --- replies -----------------------------------------------------------------------------------------


async def test_replies_are_matched_by_id_and_index_never_by_order(
    url: str, script: ScriptedService
) -> None:
    """D02: strangers' replies, doubled ones and shuffled items reach nobody they do not belong to."""
    async with AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(_result_of(client.embed([f"{i}", "y"]))) for i in range(3)]
        requests = [await script.request() for _ in asking]
        by_text = {r["input"][0]: r for r in requests}
        await script.reply(requests[0], {**embed_reply([(0, 9.0), (1, 9.0)]), "id": "a-stranger"})
        await script.reply(requests[0], b"\xff no reply at all")  # its own header names the call
        for number in (2, 1):
            request = by_text[str(number)]
            if request is requests[0]:
                continue
            await script.reply(request, embed_reply([(1, 10.0 + number), (0, float(number))]))
            await script.reply(request, embed_reply([(0, 77.0), (1, 77.0)]))
        for number, asked in enumerate(asking):
            result = await asked
            if by_text[str(number)] is requests[0]:
                assert isinstance(result, BadReply)
            else:
                assert isinstance(result, Embeddings)
                assert [float(v[0]) for v in result.vectors] == [number, 10.0 + number]
        assert client._open().calls.n_unknown >= 1


async def test_parts_are_joined_in_any_order(url: str, script: ScriptedService) -> None:
    async with AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        asking = group.create_task(client.embed(["a", "b", "c"]))
        request = await script.request()
        parts = [
            embed_reply([(index, float(index))], n=3, part=index, parts=3) for index in range(3)
        ]
        stale = embed_reply([(0, 50.0)], n=3, part=0, parts=2)  # cut by an earlier attempt
        for part in (stale, parts[2], parts[2], parts[0], parts[1]):
            await script.reply(request, part)
        assert [float(v[0]) for v in (await asking).vectors] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "wrong",
    [
        embed_reply([(0, 1.0)], n=1),
        embed_reply([(0, 1.0), (0, 2.0)]),
        embed_reply([(0, 1.0), (2, 2.0)]),
        embed_reply([(0, 1.0), (1, 2.0)], part=2, parts=2),
        {**embed_reply([(0, 1.0), (1, 2.0)]), "task": "rerank", "results": []},
        {**embed_reply([]), "data": [{"index": 0}, {"index": 1}], "n": 2},
    ],
    ids=["missing", "twice", "none-of-ours", "part-of-none", "other-task", "empty"],
)
async def test_a_reply_that_does_not_fit_is_refused(
    url: str, script: ScriptedService, wrong: dict[str, object]
) -> None:
    async with AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        asking = group.create_task(_error_of(client.embed(["a", "b"])))
        await script.reply(await script.request(), wrong)
        assert isinstance(await asking, BadReply)


# --- cancelling and closing --------------------------------------------------------------------------


async def test_a_cancelled_call_withdraws_its_queued_request(url: str, source: str) -> None:
    """The work is not done once nobody waits for it."""
    go = threading.Event()
    seen: list[int] = []

    def before(batch: PackedBatch) -> None:
        go.wait(20)
        seen.append(len(batch.items))

    metrics = PrometheusMetrics()
    async with (
        service(
            source,
            runner=lambda: FakeRunner(before_forward=before, max_batch_tokens=2),
            metrics=metrics,
        ) as app,
        AsyncClient.from_url(url) as client,
        asyncio.TaskGroup() as group,
    ):
        # the first two fill the executor and the batch that waits behind it
        kept = [group.create_task(client.embed(f"kept {i}")) for i in range(2)]
        await until(lambda: held(app) == 2)
        gone = group.create_task(client.embed(["gone a", "gone b", "gone c", "gone d"]))
        await until(lambda: held(app) == 3)
        gone.cancel()
        await until(lambda: _count(metrics, "cancel_records_total", outcome="cancelled") == 1)
        go.set()
        for task in kept:
            await task
    assert sum(seen) < 6, "some of the four withdrawn items were never computed"


def _count(metrics: PrometheusMetrics, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith(name) and labels.items() <= sample.labels.items()
    )


async def test_closing_ends_what_waits(url: str) -> None:
    client = AsyncClient.from_url(url)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_error_of(client.embed("x")))
        await until(lambda: client._session is not None and len(client._session.calls) == 1)
        await client.aclose()
        assert isinstance(await asking, ClientClosed)
    await client.aclose()
    with pytest.raises(ClientClosed):
        await client.embed("x")


async def test_more_calls_than_allowed_are_refused(url: str) -> None:
    async with AsyncClient.from_url(url, max_pending=2, retries=0, timeout=0.5) as client:
        results = await asyncio.gather(
            *(client.embed("x") for _ in range(5)), return_exceptions=True
        )
    assert [type(r) for r in results].count(ClientFull) == 3


async def test_calls_in_flight_survive_a_restart_that_loses_everything(stream: str) -> None:
    """The server forgets requests, group and reply stream; every call is answered all the same."""
    server = new_redis("--save", "")
    await server.start()
    go = threading.Event()
    runner = partial(FakeRunner, before_forward=waiting_for(go))
    url = f"redis://{server.address}/0?stream={stream}"
    async with (
        service(f"redis://{server.address}/{stream}", runner=runner) as app,
        AsyncClient.from_url(url, timeout=50) as client,
        asyncio.TaskGroup() as group,
    ):
        asking = {f"text {i}": group.create_task(client.embed(f"text {i}")) for i in range(60)}
        await until(lambda: held(app) > 0)
        server.kill()
        asking |= {f"late {i}": group.create_task(client.embed(f"late {i}")) for i in range(20)}
        await server.restart()
        go.set()
        for text, task in asking.items():
            np.testing.assert_array_equal((await task).vector, expected(text))
    await server.stop()


async def test_a_half_open_connection_is_left_and_the_call_answered(
    redis_info: ServerInfo, stream: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes back and nothing is closed: only a time-out of our own can tell."""
    monkeypatch.setattr(_redis, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(_redis, "BLOCK_S", 0.2)
    async with (
        service(source),
        Proxy(*host_and_port(redis_info)) as proxy,
        AsyncClient.from_url(
            f"redis://127.0.0.1:{proxy.port}/0?stream={stream}", timeout=50
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        await client.ping()
        proxy.hold()
        asking = group.create_task(client.embed("x"))
        opened = proxy.connections
        await until(lambda: proxy.connections >= opened + 2)  # both ends were given up
        proxy.release()
        np.testing.assert_array_equal((await asking).vector, expected("x"))


async def test_a_demoted_server_is_waited_out(stream: str) -> None:
    """After a fail-over the old server answers READONLY: not an error of the caller's."""
    server = new_redis("--save", "")
    await server.start()
    url = f"redis://{server.address}/0?stream={stream}"
    scripted = ScriptedService(server.address, stream)
    async with AsyncClient.from_url(url, timeout=50) as client, asyncio.TaskGroup() as group:
        await scripted.redis.replicaof("127.0.0.1", "1")
        asking = group.create_task(client.embed("x"))
        link = client._open().link
        await until(lambda: type(link.trouble).__name__ == "ReadOnlyError")  # type: ignore[attr-defined]
        assert not asking.done()
        await scripted.redis.replicaof("NO", "ONE")
        await scripted.reply(await scripted.request(), embed_reply([(0, 4.0)]))
        assert (await asking).vector[0] == 4.0
    await scripted.aclose()
    await server.stop()


# --- the blocking client -----------------------------------------------------------------------------


async def test_the_blocking_client_serves_many_threads(url: str, source: str) -> None:
    with Client.from_url(url) as client:

        def ask(number: int) -> bool:
            vector = client.embed(f"thread {number}").vector
            return bool((vector == expected(f"thread {number}")).all())

        def many() -> list[int]:
            counts: list[int] = []
            found = client.embed_many(
                (f"t {i}" for i in range(50)), batch_items=3, in_flight=2, progress=counts.append
            )
            return [e.index for e in found if (e.vector == expected(f"t {e.index}")).all()]

        async with service(source):
            loop = asyncio.get_running_loop()
            asked = [loop.run_in_executor(None, ask, number) for number in range(40)]
            assert all(await asyncio.gather(*asked))
            assert await asyncio.to_thread(many) == list(range(50))
            ranking = await asyncio.to_thread(client.rerank, "q", ["a", "b"])
            assert {r.document for r in ranking} == {"a", "b"}
            assert (await asyncio.to_thread(client.score, "q", ["a"])).scores[0] != 0
            assert len(await asyncio.to_thread(client.classify, "a")) == 1
            await asyncio.to_thread(client.ping)
    with pytest.raises(ClientClosed):
        client.embed("x")


def test_the_blocking_client_times_out(url: str) -> None:
    with Client.from_url(url, timeout=0.2) as client:
        began = time.monotonic()
        with pytest.raises(NoReply):
            client.embed("x")
        assert time.monotonic() - began < 10


def test_one_client_on_one_loop_after_another(url: str) -> None:
    """A client at module level, each request on a loop of its own, as `async_to_sync` does it."""
    client = AsyncClient.from_url(url, timeout=5)
    asyncio.run(client.ping())
    asyncio.run(client.ping())

    async def elsewhere() -> None:
        await client.ping()
        loop_error = await asyncio.to_thread(_ping_on_another_loop, client)
        assert isinstance(loop_error, RuntimeError) and "event loop" in str(loop_error)
        await client.aclose()

    asyncio.run(elsewhere())


def _ping_on_another_loop(client: AsyncClient) -> Exception | None:
    try:
        asyncio.run(client.ping())
    except RuntimeError as error:
        return error
    return None

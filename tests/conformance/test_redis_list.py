"""The suite over a Redis list, and what only a list can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.ports import NoMetrics, PublishError, SystemClock
from pipeline.lifecycle import beside
from pipeline.local.redis import RedisServer
from pipeline.transports.redis_list.commands import ListCommands, digest
from pipeline.transports.redis_list.options import RedisListOptions
from pipeline.transports.redis_list.reach import reach
from pipeline.transports.redis_list.source import RedisListSource
from pipeline.transports.registry import open_transport
from tests.conformance.redis_harness import RedisHarness
from tests.conformance.test_redis_faults import documented_acl, set_user
from tests.conformance.transport_suite import WAIT_S, TransportSuite, collect, flushed, running
from tests.support.killable import CountingMetrics, Proxy, consumer_process
from tests.support.servers import ServerInfo, new_redis, start_now, unique

pytestmark = pytest.mark.redis


class RedisListHarness(RedisHarness):
    headers = False

    def __init__(self, server: ServerInfo) -> None:
        super().__init__(server)
        self.key = self.stream
        own = self.options().own_prefix
        self.bad_destinations += [f"list:{own}consumers", f"list:{own}attempts"]

    def options(self, **overrides: Any) -> Any:
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "key": self.stream,
            "dead_letter_stream": self.dead_letters,
            "block_ms": 200,
            "release_backoff_ms": 5,
            "max_record_bytes": 300_000,
            **overrides,
        }
        return RedisListOptions(**settings)

    def url(self, query: str) -> str:
        return f"redis-list://{self.server.address}/{self.key}?block_ms=200&{query}"

    async def produce(
        self, body: bytes | None, headers: Mapping[str, bytes] | None = None, key: str | None = None
    ) -> None:
        assert body is not None
        await self.redis.lpush(self.key, body)

    async def unsettled(self) -> int:
        found = await ListCommands(self.redis, self.options(), "nobody").backlog()
        assert found is not None
        return found


@pytest.fixture
async def harness(redis_server: ServerInfo) -> AsyncIterator[RedisListHarness]:
    harness = RedisListHarness(redis_server)
    yield harness
    await harness.aclose()


class TestRedisList(TransportSuite):
    """The harness of this module."""


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """A server of this module's own, to flush and kill."""
    server = new_redis("--appendfsync", "always")
    start_now(server)
    yield server
    server.close()


@pytest.fixture
async def own(own_redis: RedisServer) -> AsyncIterator[RedisListHarness]:
    await own_redis.start()
    harness = RedisListHarness(ServerInfo(own_redis.address, own_redis.kind, own_redis))
    yield harness
    await own_redis.start()
    await harness.aclose()


SOON = {"claim_idle_ms": 300, "claim_interval_ms": 50}


def source_of(transport: Any) -> RedisListSource:
    assert isinstance(transport.source, RedisListSource)
    return transport.source


async def own_keys(harness: RedisListHarness) -> set[str]:
    """What is left of the keys that the source keeps."""
    prefix = harness.options().own_prefix
    found = [key.decode() async for key in harness.redis.scan_iter(f"{prefix}*", count=1000)]
    return {key.removeprefix(prefix) for key in found}


@pytest.mark.parametrize(("push", "take_from"), [("lpush", "right"), ("rpush", "left")])
async def test_the_oldest_comes_first(harness: RedisListHarness, push: str, take_from: str) -> None:
    """Either way of pushing is read in the order of its sender."""
    for i in range(20):
        await getattr(harness.redis, push)(harness.key, b"%d" % i)
    async with running(harness.options(take_from=take_from)) as transport:
        got = await collect(transport.source, 20)
        assert [d.body for d in got] == [b"%d" % i for i in range(20)]


async def test_killed_process_is_taken_over(harness: RedisListHarness) -> None:
    """F04, F08, K39: SIGKILL with five in hand: all come again after the lease, oldest first, not as
    another attempt; the dead one's name goes in the end."""
    for i in range(5):
        await harness.produce(b"%d" % i)
    async with consumer_process(harness.url("claim_idle_ms=300&claim_interval_ms=50"), "none") as p:
        assert sorted(await p.got(5)) == [str(i) for i in range(5)]
        await p.kill()
    async with running(harness.options(claim_idle_ms=50, claim_interval_ms=20)) as transport:
        got = await collect(transport.source, 5)
        assert [d.body for d in got] == [b"%d" % i for i in range(5)]
        assert {(d.attempt, d.redelivered) for d in got} == {(1, True)}
        await flushed(transport.source)
        assert await harness.unsettled() == 0
        async with asyncio.timeout(WAIT_S):
            while await harness.redis.zcard(harness.options().consumers) > 1:
                await asyncio.sleep(0.02)
    assert await own_keys(harness) == {"consumers"}


async def test_attempts_survive_a_death(harness: RedisListHarness) -> None:
    """K39: what was in a forward that did not come back is known to whoever gets it next; what came
    back, and what was only held beside it, is not counted; after a settle nothing is left of it."""
    for body in (b"poison", b"came back", b"beside"):
        await harness.produce(body)
    async with running(harness.options()) as transport:
        await collect(transport.source, 3, settle=False)
    async with running(harness.options()) as transport:
        poison, came_back, _ = await collect(transport.source, 3, settle=False)
        await transport.source.attempt_begins([poison, came_back])
        await transport.source.attempt_came_back([came_back])
    async with running(harness.options()) as transport:
        got = await collect(transport.source, 3)
        assert {d.body: d.attempt for d in got} == {b"poison": 2, b"came back": 1, b"beside": 1}
        await flushed(transport.source)
    assert await own_keys(harness) == {"consumers"}


async def test_a_move_whose_answer_was_lost_is_found(harness: RedisListHarness) -> None:
    """F13: the connection is cut after the server moved an element to us, five times while others come
    and settle: each is handed out once."""
    async with Proxy(harness.host, harness.port) as proxy:
        options = harness.options(host="127.0.0.1", port=proxy.port, claim_interval_ms=50)
        async with running(options) as transport:
            source, seen = source_of(transport), Counter[bytes | None]()
            for i in range(5):
                held = await collect(source, 1, settle=False) if i else []
                # The move, made for a connection that is gone.
                await harness.produce(b"lost%d" % i)
                ours = options.processing(source.consumer)
                await harness.redis.lmove(harness.key, ours, "RIGHT", "LEFT")
                proxy.cut()
                await harness.produce(b"next%d" % i)
                for delivery in held:
                    seen[delivery.body] += 1
                    delivery.settle()
            while len(seen) < 10:
                seen.update(d.body for d in await collect(source, 1))
            await flushed(source)
            assert await harness.unsettled() == 0
            assert set(seen.values()) == {1}


async def test_equal_elements_are_as_many_as_were_pushed(harness: RedisListHarness) -> None:
    """Elements have no name of their own: equal bytes are told apart by their number only."""
    for _ in range(30):
        await harness.produce(b"same")
    async with running(harness.options()) as transport:
        got = await collect(transport.source, 30, settle=False)
        assert len(got) == 30
        assert {d.default_id for d in got} == {digest(b"same")}
        for delivery in got[:10]:
            delivery.settle()
        await flushed(transport.source)
        assert await harness.unsettled() == 20
    async with running(harness.options()) as transport:
        assert len(await collect(transport.source, 20)) == 20
        await flushed(transport.source)
        assert await harness.unsettled() == 0


async def test_long_work_keeps_its_lease(harness: RedisListHarness) -> None:
    """F05: work of four leases, paused and with nothing to read, beside a second member: done once."""
    await harness.produce(b"long")
    options = harness.options(**SOON)
    async with running(options) as owner, running(options) as other:
        first = asyncio.create_task(owner.source.receive())
        second = asyncio.create_task(other.source.receive())
        done, waiting = await asyncio.wait({first, second}, return_when="FIRST_COMPLETED")
        owner.source.pause()
        other.source.pause()
        assert not (await asyncio.wait(waiting, timeout=4 * 0.3))[0]
        for task in waiting:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for delivery in done.pop().result():
            delivery.settle()
        await flushed(owner.source)
        await flushed(other.source)
        assert await harness.unsettled() == 0


async def test_a_stalled_owner_is_robbed_and_says_so(harness: RedisListHarness) -> None:
    """F05: what another took over meanwhile is finished there; our own settle is counted as too late."""
    metrics = CountingMetrics()
    await harness.produce(b"a")
    async with running(harness.options(claim_idle_ms=60_000), metrics) as stalled:
        (delivery,) = await collect(stalled.source, 1, settle=False)

        async def silent() -> None:
            """Whatever it says by reading on."""
            while True:
                ours = {source_of(stalled).consumer: 0}
                await harness.redis.zadd(harness.options().consumers, ours)
                await asyncio.sleep(0.01)

        async with running(harness.options(**SOON)) as other:
            async with beside(silent()):
                (again,) = await collect(other.source, 1, settle=False)
            assert (again.body, again.redelivered) == (b"a", True)
            delivery.settle()
            await metrics.reached("source_leases_lost_total", 1)
            assert await harness.unsettled() == 1
            again.settle()
            await flushed(other.source)
    assert await harness.unsettled() == 0


async def test_flushall_and_a_kill_of_the_server(
    own: RedisListHarness, own_redis: RedisServer
) -> None:
    """F02, F13, F14: a restart keeps what we hold; after a flush what comes is served, and taken over."""
    options = own.options(**SOON)
    await own.produce(b"held")
    async with running(options) as transport:
        (held,) = await collect(transport.source, 1, settle=False)
        own_redis.kill()
        async with asyncio.timeout(WAIT_S):
            while transport.source.status().connected:
                await asyncio.sleep(0.01)
        await own_redis.restart()
        held.settle()
        await own.produce(b"new")
        assert [d.body for d in await collect(transport.source, 1)] == [b"new"]
        await flushed(transport.source)
        assert await own.unsettled() == 0
        await own.redis.flushall()
        await own.produce(b"after")
        await collect(transport.source, 1, settle=False)
        transport.source.pause()
    async with running(options) as transport:
        assert [d.body for d in await collect(transport.source, 1)] == [b"after"]


async def test_a_server_made_a_replica_is_unready_until_it_takes_writes_again(
    own: RedisListHarness,
) -> None:
    """K04: what is held is settled and what is pushed is served, once it is a master again."""
    async with running(own.options(**SOON)) as transport:
        await own.produce(b"a")
        (delivery,) = await collect(transport.source, 1, settle=False)
        await own.redis.replicaof("127.0.0.1", 1)
        delivery.settle()
        async with asyncio.timeout(WAIT_S):
            while transport.source.status().connected:
                await asyncio.sleep(0.01)
        with pytest.raises(PublishError, match="READONLY") as caught:
            await transport.sink.publish(own.reply_destination(), "r", b"x", {})
        assert caught.value.retryable
        await own.redis.replicaof("NO", "ONE")
        await own.produce(b"b")
        assert [d.body for d in await collect(transport.source, 1)] == [b"b"]
        await flushed(transport.source)
        assert await own.unsettled() == 0
        async with asyncio.timeout(WAIT_S):
            while not transport.source.status().connected:
                await asyncio.sleep(0.01)


async def test_the_documented_acl_is_enough(own: RedisListHarness) -> None:
    """K43: a request through its whole life, a take-over and a dead letter, as that user."""
    page = (Path(__file__).parents[2] / "docs" / "delivery.md").read_text()
    words = page.partition("instead of the stream commands:")[2].partition("```")[2]
    extra = [w.replace("embedstream.requests", own.key) for w in words.partition("```")[0].split()]
    plain = [w for w in documented_acl(own) if not w.startswith("+x") or w == "+xadd"]
    user = await set_user(own, *plain, *extra)
    options = own.options(username=user, password="pw", **SOON)
    await own.produce(b"a")
    async with running(own.options()) as transport:
        await collect(transport.source, 1, settle=False)
    async with running(options) as transport:
        (delivery,) = await collect(transport.source, 1, settle=False)
        assert delivery.redelivered
        await transport.source.attempt_begins([delivery])
        for place in (own.reply_destination(), transport.sink.dead_letter_destination):
            await transport.sink.publish(place, "r", b"x", {})
        delivery.settle()
        await flushed(transport.source)
        source_of(transport)._doubt()
        await own.produce(b"b")
        await collect(transport.source, 1)
        await flushed(transport.source)
        assert transport.source.status().connected
    assert await own.unsettled() == 0
    poor = await set_user(own, *plain, *(word for word in extra if word != "+blmove"))
    with pytest.raises(ConnectionError, match=f"blmove on {own.key}"):
        await reach(own.options(username=poor, password="pw"))


async def test_the_backlog_and_the_wrong_type_are_told(harness: RedisListHarness) -> None:
    """Waiting and taken together; a key of another type is named at the start and by `check`."""
    for i in range(10):
        await harness.produce(b"%d" % i)
    metrics = CountingMetrics()
    async with running(
        harness.options(max_in_flight=4, claim_interval_ms=20), metrics
    ) as transport:
        await collect(transport.source, 4)
        async with asyncio.timeout(WAIT_S):
            while metrics.gauges.get("source_lag_records") != 6:
                await asyncio.sleep(0.01)
    options = harness.options(key=unique("taken"))
    await harness.redis.set(options.key, "text")
    with pytest.raises(ConnectionError, match="is no list"):
        await reach(options)
    with pytest.raises(ConnectionError, match="is no list"):
        await open_transport(options, clock=SystemClock(), metrics=NoMetrics())

"""Redis only: leases, take-over, restarts, FLUSHALL, memory, time to live, old servers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from actors.ports import NoMetrics, PublishError, SystemClock
from pipeline.local.redis import RedisServer
from pipeline.local.server import free_port
from pipeline.observe.logs import configure_logging
from pipeline.transports.redis.client import create_group
from pipeline.transports.redis.connect import close_client, make_client
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis.reach import reach
from pipeline.transports.redis.source import RedisSource
from pipeline.transports.registry import open_transport
from tests.conformance.redis_harness import RedisHarness
from tests.conformance.transport_suite import WAIT_S, collect, flushed, nothing_comes, running
from tests.support.client import service
from tests.support.killable import CountingMetrics, Proxy, consumer_process
from tests.support.servers import ServerInfo, new_redis, start_now, unique

pytestmark = pytest.mark.redis


@pytest.fixture
async def harness(redis_server: ServerInfo) -> AsyncIterator[RedisHarness]:
    harness = RedisHarness(redis_server)
    yield harness
    await harness.aclose()


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """A server of this module's own, to flush, fill and kill."""
    server = new_redis()
    start_now(server)
    yield server
    server.close()


@pytest.fixture
async def own(own_redis: RedisServer) -> AsyncIterator[RedisHarness]:
    await own_redis.start()
    harness = RedisHarness(ServerInfo(own_redis.address, own_redis.kind, own_redis))
    yield harness
    await own_redis.start()
    await harness.redis.config_set("maxmemory", 0)
    await harness.redis.config_set("maxmemory-policy", "noeviction")
    await harness.aclose()


def source_of(transport: Any) -> RedisSource:
    assert isinstance(transport.source, RedisSource)
    return transport.source


async def connected(source: Any, wanted: bool) -> None:
    async with asyncio.timeout(WAIT_S):
        while source.status().connected is not wanted:
            await asyncio.sleep(0.01)


async def pending(harness: RedisHarness) -> int:
    return int((await harness.redis.xpending(harness.stream, harness.group))["pending"])


async def test_idle_stream_raises_nothing(harness: RedisHarness) -> None:
    """F01: reads that block and end empty, for longer than the socket time-out, are no error."""
    metrics = CountingMetrics()
    options = harness.options(block_ms=150, socket_timeout_s=1.0)
    async with running(options, metrics) as transport:
        assert await nothing_comes(transport.source)
        assert await nothing_comes(transport.source)
        assert await nothing_comes(transport.source)
        assert await nothing_comes(transport.source)
        assert metrics.counts.get("source_reconnects_total", 0) == 0
        await harness.produce(b"a")
        assert [d.body for d in await collect(transport.source, 1)] == [b"a"]


async def test_half_open_connection_is_noticed(harness: RedisHarness) -> None:
    """F01: the socket time-out is finite: a connection that went silent is replaced."""
    async with Proxy(harness.host, harness.port) as proxy:
        options = harness.options(host="127.0.0.1", port=proxy.port, socket_timeout_s=0.5)
        async with running(options) as transport:
            await connected(transport.source, True)
            proxy.hold()
            await connected(transport.source, False)
            proxy.cut()
            proxy.release()
            await connected(transport.source, True)
            await harness.produce(b"a")
            assert [d.body for d in await collect(transport.source, 1)] == [b"a"]


async def test_cut_five_times(harness: RedisHarness) -> None:
    """F13: connections cut five times while entries come and settle: all are handed out."""
    async with Proxy(harness.host, harness.port) as proxy:
        options = harness.options(host="127.0.0.1", port=proxy.port)
        async with running(options) as transport:
            seen: set[bytes | None] = set()
            for i in range(5):
                await harness.produce(b"%d" % i)
                proxy.cut()
                while b"%d" % i not in seen:
                    seen |= {d.body for d in await collect(transport.source, 1)}
            await flushed(transport.source)
            assert await harness.unsettled() == 0
            assert await pending(harness) == 0


async def test_refused_connections_make_it_unready(harness: RedisHarness) -> None:
    """F13: while nothing answers, status is not connected; it recovers by itself."""
    async with Proxy(harness.host, harness.port) as proxy:
        options = harness.options(host="127.0.0.1", port=proxy.port)
        async with running(options) as transport:
            proxy.refuse = True
            proxy.cut()
            await connected(transport.source, False)
            assert "Redis at" in transport.source.status().detail
            with pytest.raises(PublishError) as caught:
                await transport.sink.publish("list:" + unique("embedstream"), "r", b"x", {})
            assert caught.value.retryable
            proxy.refuse = False
            await connected(transport.source, True)


async def test_flushall_recreates_the_group(own: RedisHarness) -> None:
    """F02: everything vanishes while we run: repaired within a cycle, counted, nothing lost after."""
    metrics = CountingMetrics()
    async with running(own.options(), metrics) as transport:
        await own.produce(b"before")
        (held,) = await collect(transport.source, 1, settle=False)
        await own.redis.flushall()
        await own.produce(b"after")
        assert [d.body for d in await collect(transport.source, 1)] == [b"after"]
        held.settle()
        await flushed(transport.source)
        assert metrics.counts["source_group_recreated_total"] == 1
        assert await own.unsettled() == 0


async def test_restart_without_data_recreates_the_group(
    own: RedisHarness, own_redis: RedisServer
) -> None:
    """F02: the server comes back empty."""
    metrics = CountingMetrics()
    async with running(own.options(), metrics) as transport:
        await connected(transport.source, True)
        await own.redis.flushall()
        own_redis.kill()
        await connected(transport.source, False)
        await own_redis.restart()
        await own.produce(b"after")
        assert [d.body for d in await collect(transport.source, 1)] == [b"after"]


async def test_killed_server_comes_back_with_its_data(
    own: RedisHarness, own_redis: RedisServer
) -> None:
    """F13, F14: SIGKILL during BLOCK, restart from the append-only file: nothing is lost, what we
    hold stays ours, a reply written before is still there."""
    for i in range(10):
        await own.produce(b"%d" % i)
    await own.redis.config_set("appendfsync", "always")
    async with running(own.options(block_ms=5000)) as transport:
        held = await collect(transport.source, 10, settle=False)
        destination = own.reply_destination()
        await transport.sink.publish(destination, "r", b"reply", {})
        own_redis.kill()
        await connected(transport.source, False)
        for delivery in held[:5]:
            delivery.settle()
        await own_redis.restart()
        await connected(transport.source, True)
        assert await own.replies(destination, bool) == [b"reply"]
        await own.produce(b"new")
        assert [d.body for d in await collect(transport.source, 1)] == [b"new"]
        for delivery in held[5:]:
            delivery.settle()
        await flushed(transport.source)
        assert await own.unsettled() == 0


@pytest.mark.parametrize(("start", "expected"), [("0", b"0"), ("$", b"later")])
async def test_start_of_a_new_group(harness: RedisHarness, start: str, expected: bytes) -> None:
    """F03: the default reads the whole backlog; `$` only what comes later."""
    for i in range(10):
        await harness.produce(b"%d" % i)
    async with running(harness.options(start=start)) as transport:
        await harness.produce(b"later")
        got = await collect(transport.source, 11 if start == "0" else 1)
        assert got[0].body == expected


async def test_killed_process_is_taken_over(harness: RedisHarness) -> None:
    """F04, F08: SIGKILL between read and acknowledge: handed to us after claim_idle, not
    as another attempt: it was never in a forward that did not come back (K39)."""
    for i in range(5):
        await harness.produce(b"%d" % i)
    url = f"redis://{harness.server.address}/{harness.stream}?group={harness.group}&block_ms=200"
    async with consumer_process(url, "none") as process:
        assert sorted(await process.got(5)) == [str(i) for i in range(5)]
        await process.kill()
    async with running(harness.options(claim_idle_ms=500, claim_interval_ms=100)) as transport:
        got = await collect(transport.source, 5)
        assert sorted(d.body or b"" for d in got) == [b"%d" % i for i in range(5)]
        assert {(d.attempt, d.redelivered) for d in got} == {(1, True)}
        await flushed(transport.source)
        assert await harness.unsettled() == 0


async def test_same_consumer_name_resumes_its_own(harness: RedisHarness) -> None:
    """F04: a process that died and comes back under its name gets its entries at once."""
    await harness.produce(b"a")
    url = (
        f"redis://{harness.server.address}/{harness.stream}?group={harness.group}"
        "&block_ms=200&consumer=fixed"
    )
    async with consumer_process(url, "none") as process:
        await process.got(1)
        await process.kill()
    async with running(harness.options(consumer="fixed", claim_idle_ms=60_000)) as transport:
        (delivery,) = await collect(transport.source, 1)
        assert (delivery.body, delivery.attempt, delivery.redelivered) == (b"a", 1, True)


async def test_long_work_keeps_its_lease(harness: RedisHarness) -> None:
    """F05: work of four idle limits beside a second member: executed once while the owner lives."""
    await harness.produce(b"long")
    options = harness.options(claim_idle_ms=300, claim_interval_ms=50)
    async with running(options) as owner:
        (delivery,) = await collect(owner.source, 1, settle=False)
        async with running(options) as other:
            assert await nothing_comes(other.source)
            assert await nothing_comes(other.source)
            assert await nothing_comes(other.source)
            assert await nothing_comes(other.source)
            delivery.settle()
            await flushed(owner.source)
        assert await harness.unsettled() == 0


async def test_lost_lease_is_not_stolen_back(harness: RedisHarness) -> None:
    """F05: an owner that was stalled beyond the limit sees that another has the entry."""
    metrics = CountingMetrics()
    await harness.produce(b"a")
    options = harness.options(claim_idle_ms=60_000)
    async with running(options, metrics) as transport:
        source = source_of(transport)
        (delivery,) = await collect(source, 1, settle=False)
        entry = delivery.default_id
        await harness.redis.xclaim(harness.stream, harness.group, "thief", 0, [entry])
        source._leases.hold([entry], SystemClock().monotonic() - 61)
        source._tick.set()
        await metrics.reached("source_leases_lost_total", 1)
        (row,) = await harness.redis.xpending_range(harness.stream, harness.group, "-", "+", 5)
        assert row["consumer"] == b"thief"
        delivery.settle()
        await flushed(source)
        assert await pending(harness) == 0


async def test_settled_entries_do_not_pile_up(harness: RedisHarness) -> None:
    """F06: after 3,000 requests the stream is empty and nothing is pending."""
    pipe = harness.redis.pipeline(transaction=False)
    for i in range(3000):
        pipe.xadd(harness.stream, {"data": b"%d" % i})
    await pipe.execute()
    async with running(harness.options()) as transport:
        seen = 0
        while seen < 3000:
            seen += len(await collect(transport.source, 1))
        await flushed(transport.source)
        assert await harness.unsettled() == 0
        assert await pending(harness) == 0


async def test_full_memory_is_retryable_and_recovers(own: RedisHarness) -> None:
    """F07: maxmemory is reached while replies are written: the record may pass later, and does."""
    async with running(own.options()) as transport:
        await own.produce(b"a")
        (delivery,) = await collect(transport.source, 1, settle=False)
        await own.redis.config_set("maxmemory", 1)
        destination = own.reply_destination()
        with pytest.raises(PublishError) as caught:
            await transport.sink.publish(destination, "r", b"x", {})
        assert caught.value.retryable
        assert "maxmemory" in str(caught.value)
        assert await pending(own) == 1
        await own.redis.config_set("maxmemory", 0)
        await transport.sink.publish(destination, "r", b"x", {})
        delivery.settle()
        await flushed(transport.source)
        assert await own.unsettled() == 0


async def test_evicting_policy_is_named_at_start(own: RedisHarness) -> None:
    """F07: a policy that may evict requests is a notice at open."""
    await own.redis.config_set("maxmemory", 100_000_000)
    await own.redis.config_set("maxmemory-policy", "allkeys-lru")
    async with running(own.options()) as transport:
        facts = source_of(transport).facts
        assert facts is not None
        assert "noeviction" in facts.notices[0]


async def test_every_key_written_expires(harness: RedisHarness) -> None:
    """F11, F12: lists, streams and dead letters have a TTL, on success and failure paths alike."""
    async with running(harness.options(reply_ttl_s=77, dead_letter_ttl_s=999)) as transport:
        sink = transport.sink
        default = sink.default_destination(unique("id"))
        stream = "stream:" + unique("embedstream.replies")
        for destination in (default, stream, sink.dead_letter_destination):
            await sink.publish(destination, "r", b"x", {"content-type": b"application/json"})
            assert 0 < await harness.redis.ttl(destination.split(":", 1)[1]) <= 999
        assert await harness.redis.ttl(default.removeprefix("list:")) <= 77
        ((_, fields),) = await harness.redis.xrange(stream.removeprefix("stream:"))
        assert fields == {b"data": b"x", b"request-id": b"r", b"content-type": b"application/json"}


async def key_state(harness: RedisHarness, key: str) -> tuple[Any, int]:
    """Bytes of the value, and its time to live in seconds."""
    return await harness.redis.dump(key), await harness.redis.ttl(key)


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("theirs", ["string", "list", "stream", "hash", "zset"])
@pytest.mark.parametrize("ttl_s", [None, 100_000])
async def test_a_key_of_somebody_else_is_left_as_it_is(
    harness: RedisHarness, kind: str, theirs: str, ttl_s: int | None
) -> None:
    """K30: `reply_to` of a key that no reply made: no element, no trim, no time to live."""
    key, redis = unique("embedstream.other-service"), harness.redis
    if theirs == "string":
        await redis.set(key, "text")
    elif theirs == "list":
        await redis.rpush(key, *range(20))
    elif theirs == "stream":
        for i in range(20):
            await redis.xadd(key, {"n": i})
    elif theirs == "hash":
        await redis.hset(key, "field", "value")
    else:
        await redis.zadd(key, {"member": 1.0})
    if ttl_s is not None:
        await redis.expire(key, ttl_s)
    before = await redis.dump(key)
    async with running(harness.options(reply_stream_maxlen=5)) as transport:
        with pytest.raises(PublishError, match="nothing was written") as caught:
            await transport.sink.publish(f"{kind}:{key}", "r", b"x", {})
        assert not caught.value.retryable
    after, left_s = await key_state(harness, key)
    assert after == before
    assert left_s == -1 if ttl_s is None else left_s > 99_000


async def test_a_reply_key_is_appended_to_and_lives_on(harness: RedisHarness) -> None:
    """K30: a key with a time to live within reply_ttl_s is one of ours: the next reply refreshes it."""
    async with running(harness.options(reply_ttl_s=500)) as transport:
        for kind in ("list", "stream"):
            key = unique("embedstream.reply")
            await transport.sink.publish(f"{kind}:{key}", "r", b"1", {})
            await harness.redis.expire(key, 20)
            await transport.sink.publish(f"{kind}:{key}", "r", b"2", {})
            assert await harness.redis.ttl(key) > 400
            length = harness.redis.llen if kind == "list" else harness.redis.xlen
            assert await length(key) == 2


async def test_dead_letters_go_to_a_stream_that_the_operator_made(harness: RedisHarness) -> None:
    """K30: the settings name that stream, so it is written to, and keeps its own time to live."""
    await harness.redis.xgroup_create(harness.dead_letters, "readers", mkstream=True)
    async with running(harness.options(dead_letter_ttl_s=999)) as transport:
        await transport.sink.publish(transport.sink.dead_letter_destination, "r", b"x", {})
    assert await harness.redis.xlen(harness.dead_letters) == 1
    assert await harness.redis.ttl(harness.dead_letters) == -1


async def test_one_place_of_the_settings_keeps_its_own_time_to_live(harness: RedisHarness) -> None:
    """K30: a route's `destination` is the operator's word: an existing stream there is written to."""
    place = unique("results")
    await harness.redis.xgroup_create(place, "readers", mkstream=True)
    transport = await open_transport(
        harness.options(),
        destination=f"redis://{harness.server.address}/stream:{place}",
        clock=SystemClock(),
        metrics=NoMetrics(),
    )
    await transport.sink.publish(f"stream:{place}", "r", b"x", {})
    await transport.source.aclose()
    await transport.sink.aclose()
    assert await harness.redis.xlen(place) == 1
    assert await harness.redis.ttl(place) == -1


async def test_a_server_that_forgot_the_script_is_told_again(own: RedisHarness) -> None:
    async with running(own.options()) as transport:
        for body in (b"1", b"2"):
            await own.redis.script_flush()
            destinations = [own.reply_destination() for _ in range(20)]
            await asyncio.gather(*(transport.sink.publish(d, "r", body, {}) for d in destinations))
            for destination in destinations:
                assert await own.replies(destination, bool) == [body]


async def test_a_user_without_scripts_is_named_at_open(own: RedisHarness) -> None:
    """K30: replies are written by a script; a user that may run none is told so at start."""
    await own.redis.execute_command("ACL", "SETUSER", "plain", "on", ">pw", "~*", "+@all", "-eval")
    with pytest.raises(ConnectionError, match="may not run eval"):
        await open_transport(
            own.options(username="plain", password="pw"), clock=SystemClock(), metrics=NoMetrics()
        )


async def test_an_entry_of_thousands_of_fields_is_dead_lettered(harness: RedisHarness) -> None:
    """K30: more words than a script hands on: the entry is refused, and its dead letter is written."""
    fields = {f"h{i}": b"x" for i in range(6000)} | {
        "data": b"{}",
        "reply-to": b"list:embedstream.x",
    }
    await harness.redis.xadd(harness.stream, fields)
    async with running(harness.options()) as transport:
        (delivery,) = await collect(transport.source, 1)
        assert "6001 fields" in str(delivery.damage)
        assert delivery.headers["reply-to"] == b"list:embedstream.x"
        sink = transport.sink
        await sink.publish(sink.dead_letter_destination, "r", b"{}", delivery.headers)
    assert await harness.redis.xlen(harness.dead_letters) == 1


async def test_unread_replies_are_bounded(harness: RedisHarness) -> None:
    """F11: replies that nobody reads do not grow without end."""
    async with running(harness.options(reply_stream_maxlen=100)) as transport:
        shared = "list:" + unique("embedstream.shared")
        await asyncio.gather(
            *(transport.sink.publish(shared, "r", b"%d" % i, {}) for i in range(500))
        )
        assert await harness.redis.llen(shared.removeprefix("list:")) == 100


async def test_one_bad_destination_fails_alone(harness: RedisHarness) -> None:
    """A key of another type refuses its record; the records sent with it pass."""
    taken = unique("embedstream.taken")
    await harness.redis.set(taken, "text")
    good = [harness.reply_destination() for _ in range(20)]
    async with running(harness.options()) as transport:
        destinations = [*good[:10], f"list:{taken}", *good[10:], "nonsense"]
        results = await asyncio.gather(
            *(transport.sink.publish(d, "r", b"x", {}) for d in destinations),
            return_exceptions=True,
        )
        errors = [r for r in results if r is not None]
        assert len(errors) == 2
        assert all(isinstance(e, PublishError) and not e.retryable for e in errors)
        for destination in good:
            assert await harness.replies(destination, bool) == [b"x"]


async def test_publishes_share_few_connections(harness: RedisHarness) -> None:
    """Thousands of publishes at a time need no thousand sockets."""
    async with Proxy(harness.host, harness.port) as proxy:
        options = harness.options(host="127.0.0.1", port=proxy.port)
        async with running(options) as transport:
            destination = harness.reply_destination()
            await asyncio.gather(
                *(transport.sink.publish(destination, "r", b"%d" % i, {}) for i in range(2000))
            )
            assert await harness.redis.llen(destination.removeprefix("list:")) == 2000
            assert proxy.connections <= 5


async def test_entry_without_data_and_deleted_entry(harness: RedisHarness) -> None:
    """E13, K46, K50: an entry without the field `data` is handed out damaged, for ingress to refuse; one that
    was deleted while pending is acknowledged, not handed out, and counted and logged once."""
    lines, metrics = io.StringIO(), CountingMetrics()
    configure_logging("info", "json", stream=lines)
    await harness.redis.xadd(harness.stream, {"other": "x"})
    url = (
        f"redis://{harness.server.address}/{harness.stream}?group={harness.group}"
        "&block_ms=200&consumer=fixed"
    )
    await harness.produce(b"gone")
    async with consumer_process(url, "none") as process:
        assert len([await process.line() for _ in range(3)]) == 3  # READY and two records
        await process.kill()
    entries = await harness.redis.xrange(harness.stream)
    await harness.redis.xdel(harness.stream, entries[1][0])
    async with running(harness.options(consumer="fixed"), metrics) as transport:
        (delivery,) = await collect(transport.source, 1)
        assert delivery.body == b""
        assert delivery.headers["other"] == b"x"
        assert delivery.damage == "no field named data; it has: 'other'"
        await flushed(transport.source)
        async with asyncio.timeout(WAIT_S):
            while await pending(harness):
                await asyncio.sleep(0.01)
    structlog.reset_defaults()
    assert metrics.counts["source_records_gone_total"] == 1
    assert lines.getvalue().count("redis_entries_gone") == 1


async def test_old_server_is_refused() -> None:
    """F16: a server without XAUTOCLAIM is refused at open with version and remedy."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                words = [
                    (await reader.readexactly(int((await reader.readline())[1:]) + 2)).strip()
                    for _ in range(int(line[1:]))
                ]
                if words[0].upper() == b"INFO":
                    text = b"redis_version:6.0.16\r\n"
                    writer.write(b"$%d\r\n%s\r\n" % (len(text), text))
                else:
                    writer.write(b"+OK\r\n")
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        options = RedisOptions(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        with pytest.raises(ConnectionError) as caught:
            await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
    finally:
        server.close()
    assert "6.0.16" in str(caught.value)
    assert "6.2" in str(caught.value)


async def test_stop_does_not_wait_for_block(harness: RedisHarness) -> None:
    """F17, G02: closing while a read blocks for a minute returns at once, and loses nothing."""
    options = harness.options(block_ms=60_000, socket_timeout_s=90)
    async with running(options) as transport:
        await harness.produce(b"a")
        await collect(transport.source, 1)
        async with asyncio.timeout(4):
            await transport.source.aclose()
    await harness.produce(b"b")
    async with running(harness.options()) as transport:
        assert [d.body for d in await collect(transport.source, 1)] == [b"b"]


async def test_cancellation_is_never_swallowed(harness: RedisHarness) -> None:
    """G02: `asyncio.wait_for` of Python 3.11, inside redis-py, may swallow a cancellation: a reader
    told to stop at that moment would go on to block. Cancelled after every number of steps."""
    options = harness.options(block_ms=10_000, socket_timeout_s=30)
    client = make_client(options, connections=1)
    await create_group(client, options, "0")
    read = ("XREADGROUP", "GROUP", harness.group, "me", "BLOCK", 10_000, "STREAMS")
    async with asyncio.timeout(9), asyncio.TaskGroup() as group:
        for steps in range(25):
            reading = group.create_task(client.execute_command(*read, harness.stream, ">"))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
    await close_client(client, 1.0)


async def test_dead_consumers_are_removed(harness: RedisHarness) -> None:
    """F18: names of dead members without pending entries go; one with pending entries stays until
    they are taken over; closed members remove themselves."""
    await harness.produce(b"a")
    await harness.redis.xgroup_create(harness.stream, harness.group, "0")
    for i in range(30):
        await harness.redis.xgroup_createconsumer(harness.stream, harness.group, f"dead{i}")
    await harness.redis.xreadgroup(harness.group, "holder", {harness.stream: ">"})
    options = harness.options(claim_idle_ms=200, claim_interval_ms=20, block_ms=50)
    async with running(options) as transport:
        (delivery,) = await collect(transport.source, 1)
        assert (delivery.attempt, delivery.redelivered) == (1, True)
        async with asyncio.timeout(WAIT_S):
            while len(await harness.redis.xinfo_consumers(harness.stream, harness.group)) > 1:
                await asyncio.sleep(0.02)
    assert await harness.redis.xinfo_consumers(harness.stream, harness.group) == []


async def test_two_members_share_the_work(harness: RedisHarness) -> None:
    seen: list[bytes | None] = []
    async with (
        running(harness.options()) as one,
        running(harness.options()) as two,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as group,
    ):

        async def drink(source: Any) -> None:
            while True:
                for delivery in await source.receive():
                    seen.append(delivery.body)
                    delivery.settle()

        tasks = [group.create_task(drink(t.source)) for t in (one, two)]
        for i in range(200):
            await harness.produce(b"%d" % i)
        while len(seen) < 200:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    assert sorted(int(b or b"") for b in seen) == list(range(200))


async def test_unreachable_server_and_wrong_key_are_named(harness: RedisHarness) -> None:
    """The message at open names address or key, and the remedy, without the password."""
    address = free_port()
    for options, words in [
        (RedisOptions(host="127.0.0.1", port=address, password="s3cret"), [str(address), "check"]),
        (harness.options(stream="text." + harness.stream), ["is no stream", "text."]),
        (harness.options(db=9999), ["lower db"]),
        (harness.options(username="nobody", password="s3cret"), ["check user and password"]),
    ]:
        await harness.redis.set("text." + harness.stream, "x")
        with pytest.raises(ConnectionError) as caught:
            await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "s3cret" not in message


async def test_plain_client_reads_its_reply(harness: RedisHarness) -> None:
    """A client without our code: XADD the request, BRPOP the reply."""
    client: Any = Redis(host=harness.host, port=harness.port)
    async with running(harness.options()) as transport, asyncio.TaskGroup() as group:
        reply_key = unique("embedstream.reply")
        waiting = group.create_task(client.blpop([reply_key], timeout=10))
        await client.xadd(harness.stream, {"data": b"{}", "reply-to": f"list:{reply_key}"})
        (delivery,) = await collect(transport.source, 1, settle=False)
        await transport.sink.publish(delivery.headers["reply-to"].decode(), "r", b"answer", {})
        delivery.settle()
        assert (await waiting)[1] == b"answer"
    await client.aclose()


def documented_acl(harness: RedisHarness) -> list[str]:
    """The words of the ACL in docs/delivery.md, for this test's keys."""
    page = (Path(__file__).parents[2] / "docs" / "delivery.md").read_text()
    words = page.partition("ACL SETUSER embedstream on >PASSWORD")[2].partition("```")[0].split()
    keys = {
        "~embedstream.requests": f"~{harness.stream}",
        "~embedstream.dead-letters": f"~{harness.dead_letters}",
    }
    return [keys.get(word, word) for word in words]


async def set_user(harness: RedisHarness, *words: str) -> str:
    user = unique("user")
    await harness.redis.execute_command("ACL", "SETUSER", user, "on", ">pw", *words)
    return user


async def test_the_documented_acl_is_enough(own: RedisHarness) -> None:
    """K43: a request through its whole life, a dead letter and a take-over, as that user."""
    user = await set_user(own, *documented_acl(own))
    options = own.options(username=user, password="pw", claim_idle_ms=100, claim_interval_ms=20)
    await own.produce(b"a")
    await own.redis.xgroup_create(own.stream, own.group, "0")
    await own.redis.xreadgroup(own.group, "dead", {own.stream: ">"})
    async with running(options) as transport:
        (delivery,) = await collect(transport.source, 1, settle=False)
        await transport.source.attempt_begins([delivery])
        for place in (own.reply_destination(), transport.sink.dead_letter_destination):
            await transport.sink.publish(place, "r", b"x", {})
        delivery.settle()
        await flushed(transport.source)
        assert transport.source.status().connected
    left = await own.redis.xinfo_consumers(own.stream, own.group)
    assert {row["name"] for row in left} <= {b"dead"}  # we left the group
    assert await own.unsettled() == 0


@pytest.mark.parametrize(
    ("taken", "named"),
    [
        (["-xack"], "xack on embedstream.requests"),
        (["-xgroup|create"], "xgroup|create on embedstream.requests"),
        (["-xautoclaim"], "xautoclaim on embedstream.requests"),
        (["-rpush"], "rpush on embedstream.reply.any"),
        (["-pttl"], "pttl on embedstream.dead-letters"),
        (["-evalsha"], "evalsha"),
        (["-eval"], "eval"),
        (["resetkeys", "~embedstream.re*"], "xadd on embedstream.dead-letters"),
    ],
)
async def test_each_missing_right_is_named(own: RedisHarness, taken: list[str], named: str) -> None:
    """K43, K49: at start and by `check`, which creates nothing; without the right to INFO too."""
    user = await set_user(own, *documented_acl(own), *taken, "-info")
    options = own.options(username=user, password="pw")
    with pytest.raises(ConnectionError, match="may not run") as caught:
        await reach(options)
    assert named in str(caught.value)
    with pytest.raises(ConnectionError, match="may not run") as caught:
        await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
    assert named in str(caught.value)
    assert not await own.redis.exists(own.stream)


async def test_replies_that_may_not_be_written_wait_for_the_operator(own: RedisHarness) -> None:
    """K41: not ready, nothing is taken and nothing is given up; it goes on with the right granted. A key
    of its own that a request names costs that request alone."""
    words = documented_acl(own)
    user = await set_user(own, *words, "~embedstream.reply*")
    source = (
        f"redis://{user}:pw@{own.server.address}/{own.stream}?group={own.group}&block_ms=100"
        f"&dead_letter_stream={own.dead_letters}&max_in_flight=8"
    )
    reply = unique("embedstream.reply")
    async with service(source) as app:
        keys = [word for word in words if word.startswith("~") and "reply" not in word]
        await own.redis.execute_command("ACL", "SETUSER", user, "resetkeys", *keys)
        other = json.dumps({"id": "x", "input": "a", "reply_to": f"list:{unique('embedstream.x')}"})
        await own.produce(other.encode())
        async with asyncio.timeout(WAIT_S):
            while not await own.redis.xlen(own.dead_letters):
                await asyncio.sleep(0.01)
        for n in range(30):
            record = {"id": f"r{n}", "input": f"text {n}", "reply_to": f"list:{reply}"}
            await own.produce(json.dumps(record).encode())
        status = app.graph.routes[0].source.status  # type: ignore[union-attr]
        async with asyncio.timeout(WAIT_S):
            while status().connected:
                await asyncio.sleep(0.01)
        assert "NOPERM" in status().detail
        pending = await own.redis.xpending(own.stream, own.group)
        assert pending["pending"] < 30, "work was taken that could not be answered"
        await own.redis.execute_command("ACL", "SETUSER", user, "~embedstream.reply*")
        async with asyncio.timeout(WAIT_S):
            while await own.redis.llen(reply) < 30:
                await asyncio.sleep(0.01)
        assert await own.redis.xlen(own.dead_letters) == 1
        async with asyncio.timeout(WAIT_S):
            while not status().connected:
                await asyncio.sleep(0.01)


async def test_a_node_of_a_cluster_is_refused() -> None:
    """K14: at start, with what to do."""
    server = new_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    await server.start()
    harness = RedisHarness(ServerInfo(server.address, server.kind, server))
    with pytest.raises(ConnectionError, match="add cluster=true"):
        await reach(harness.options())
    await harness.aclose()
    server.close()


async def test_check_finds_what_serve_would_stumble_over() -> None:
    """K49: a key of another type at each place, and a server that takes no writes; nothing is made."""
    server = new_redis()
    await server.start()
    harness = RedisHarness(ServerInfo(server.address, server.kind, server))
    options = harness.options()
    assert await reach(options) == () and await reach(options, place="list:out") == ()
    assert await harness.redis.keys("*") == []
    for key, place in (
        (options.stream, None),
        (options.dead_letter_stream, None),
        ("out", "stream:out"),
    ):
        await harness.redis.rpush(key, b"x")
        with pytest.raises(ConnectionError, match=rf"{key} exists and is no stream"):
            await reach(options, place=place)
        await harness.redis.delete(key)
    await harness.redis.replicaof("127.0.0.1", "1")
    with pytest.raises(ConnectionError, match=r"takes no writes now \(READONLY\)"):
        await reach(options)
    await harness.aclose()
    server.close()


@pytest.mark.parametrize("counted", [True, False])
async def test_the_backlog_is_told(harness: RedisHarness, counted: bool) -> None:
    """Waiting and pending together; by the length of the stream where the server has lost count."""
    for i in range(10):
        await harness.produce(b"%d" % i)
    if not counted:  # a deletion ahead of what was handed out
        entries = await harness.redis.xrange(harness.stream)
        await harness.redis.xdel(harness.stream, entries[7][0])
    metrics = CountingMetrics()
    options = harness.options(max_in_flight=4, claim_interval_ms=20)
    async with running(options, metrics) as transport:
        await until_gauge(metrics, 10.0 if counted else 9.0)
        for delivery in await collect(transport.source, 4, settle=False):
            delivery.settle()
        await until_gauge(metrics, 6.0 if counted else 5.0)


async def until_gauge(metrics: CountingMetrics, value: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while metrics.gauges.get("source_lag_records") != value:
            await asyncio.sleep(0.01)

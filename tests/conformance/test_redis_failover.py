"""Fail-over of a real Redis under live connections: the wrong server is left, no line flaps, no user text."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from actors.ports import PublishError
from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.local.redis import RedisServer
from pipeline.observe.logs import configure_logging
from pipeline.settings.load import RouteSettings, Settings
from tests.conformance.redis_harness import RedisHarness
from tests.conformance.transport_suite import QUIET_S, WAIT_S, collect, flushed, running
from tests.support.fakes import FakeRunner
from tests.support.killable import Proxy
from tests.support.servers import ServerInfo, new_redis, start_now, unique

pytestmark = pytest.mark.redis
MARK = "XYZZY-what-a-sender-wrote"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    servers = new_redis(), new_redis()
    for server in servers:
        start_now(server)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
async def first(pair: tuple[RedisServer, RedisServer]) -> AsyncIterator[RedisHarness]:
    server = pair[0]
    harness = RedisHarness(ServerInfo(server.address, server.kind, server))
    await harness.redis.replicaof("NO", "ONE")
    yield harness
    await harness.redis.replicaof("NO", "ONE")
    await harness.aclose()


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("debug", "json", stream=stream)
    yield stream
    structlog.reset_defaults()


def events(lines: io.StringIO, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [event for event in found if event["event"] == name]


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_server_made_a_replica_is_unready_until_it_takes_writes_again(
    first: RedisHarness, lines: io.StringIO
) -> None:
    """K04, K50: one event when it turns read-only, one when a write works; nothing is lost."""
    async with running(first.options()) as transport:
        source = transport.source
        await first.produce(b"a")
        (delivery,) = await collect(source, 1, settle=False)
        await first.redis.replicaof("127.0.0.1", 1)
        delivery.settle()  # the settle loop fails too
        await until(lambda: not source.status().connected)
        # A reader that was blocked is told UNBLOCKED, whoever writes is told READONLY.
        assert any(code in source.status().detail for code in ("READONLY", "UNBLOCKED"))
        source.pause()  # a reader that does not read proves nothing
        with pytest.raises(PublishError, match="READONLY") as caught:
            await transport.sink.publish(first.reply_destination(), "r", b"x", {})
        assert caught.value.retryable
        await asyncio.sleep(2 * QUIET_S)  # the absence of further events is watched
        assert not source.status().connected
        assert len(events(lines, "redis_connection")) == 1
        await first.redis.replicaof("NO", "ONE")
        await until(lambda: source.status().connected)
        source.resume()
        await flushed(source)
        assert await first.unsettled() == 0
        assert [event["connected"] for event in events(lines, "redis_connection")] == [False, True]


async def test_connections_follow_a_fail_over(
    pair: tuple[RedisServer, RedisServer], first: RedisHarness
) -> None:
    """K04: the old server lives on as a replica and cuts nobody off; we leave it by ourselves."""
    host, _, port = pair[1].address.rpartition(":")
    second: Any = Redis(host=host, port=int(port))
    await second.replicaof("NO", "ONE")
    await second.flushall()
    await second.replicaof(first.host, first.port)
    async with Proxy(first.host, first.port) as proxy:
        options = first.options(host="127.0.0.1", port=proxy.port)
        async with running(options) as transport:
            await first.produce(b"a")
            (delivery,) = await collect(transport.source, 1, settle=False)
            assert await first.redis.wait(1, int(WAIT_S * 1000)) == 1
            proxy.lead_to(host, int(port))  # what is connected stays connected to the old one
            await second.replicaof("NO", "ONE")
            await first.redis.replicaof(host, port)
            destination = first.reply_destination()
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(PublishError):
                        await transport.sink.publish(destination, "r", b"x", {})
                        break
            assert await second.lrange(destination.removeprefix("list:"), 0, -1) == [b"x"]
            delivery.settle()
            await flushed(transport.source)
            await second.xadd(first.stream, {"data": b"b"})
            assert [d.body for d in await collect(transport.source, 1)] == [b"b"]
            await until(lambda: transport.source.status().connected)
    await second.aclose()


async def test_what_a_sender_wrote_is_in_no_line(first: RedisHarness, lines: io.StringIO) -> None:
    """K40: dead letters and replies that the server refuses, with every level logged."""
    started, go_on = threading.Event(), threading.Event()

    def forward(batch: object) -> None:
        started.set()
        go_on.wait(WAIT_S)

    user = unique("user")
    every = ("~*", "+@all")
    await first.redis.execute_command("ACL", "SETUSER", user, "on", ">pw", *every)
    source = (
        f"redis://{user}:pw@{first.server.address}/{first.stream}?group={first.group}"
        f"&dead_letter_stream={first.dead_letters}&block_ms=100&release_backoff_ms=5"
    )
    settings = Settings(routes=(RouteSettings(name="r", source=source),))
    runner: Any = FakeRunner(before_forward=forward)
    app = App(settings, runner_factories={"fake": lambda: runner})
    stop = StopSignal(5.0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        serving = group.create_task(app.run(stop))
        await app.ready.wait()
        reply = unique("embedstream.reply")
        await first.produce(
            json.dumps({"id": "a", "input": MARK, "reply_to": f"list:{reply}"}).encode()
        )
        await until(started.is_set)
        await first.redis.replicaof("127.0.0.1", 1)
        go_on.set()
        await until(lambda: events(lines, "publish_retried"))
        await first.redis.replicaof("NO", "ONE")
        assert await first.redis.blpop([reply], timeout=WAIT_S) is not None
        allowed = ("resetkeys", f"~{first.stream}", "~embedstream.reply*")
        await first.redis.execute_command("ACL", "SETUSER", user, *allowed)
        await first.produce(f"no record, {MARK}".encode())
        await until(lambda: any("NOPERM" in e["reason"] for e in events(lines, "publish_retried")))
        await first.redis.execute_command("ACL", "SETUSER", user, *every)
        async with asyncio.timeout(WAIT_S):
            while not await first.redis.xlen(first.dead_letters):
                await asyncio.sleep(0.01)
        stop.request("test")
        await serving
    assert "READONLY" in events(lines, "publish_retried")[0]["reason"]
    assert MARK not in lines.getvalue()

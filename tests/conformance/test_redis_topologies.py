"""Redis behind sentinels, as a cluster, and with TLS: fail-over with calls in flight loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from redis.crc import key_slot

from actors.ports import NoMetrics, SystemClock
from embedstream_client import AsyncClient
from pipeline.local.redis import RedisServer
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.registry import open_transport, parse_url, reach
from tests.conformance.transport_suite import WAIT_S, collect, flushed, running
from tests.support.client import service
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.redis_topologies import (
    Cluster,
    TlsServer,
    client_of,
    cluster,
    sentinel_pair,
    tls_server,
)
from tests.support.servers import ServerInfo, unique

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

QUICK = "&block_ms=200&claim_interval_ms=100&claim_idle_ms=2000"


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster(unique("embedstream.requests")) as found:
        yield found


async def survives(source: str, url: str, kill: RedisServer) -> None:
    """60 callers ask without pause while `kill` is killed; each gets its own vector every time."""
    over, asked, slowest = asyncio.Event(), 0, 0.0
    loop = asyncio.get_running_loop()

    async def ask(client: AsyncClient, caller: int) -> None:
        nonlocal asked, slowest
        number = 0
        while not over.is_set():
            text = f"caller{caller} text{number}"
            began = loop.time()
            vector = (await client.embed(text)).vector
            slowest = max(slowest, loop.time() - began)
            np.testing.assert_array_equal(vector, fake_vector(fake_ids(text)))
            number += 1
            asked += 1

    slow = partial(FakeRunner, before_forward=lambda batch: time.sleep(0.02))
    async with service(source, runner=slow) as app, AsyncClient.from_url(url, timeout=40) as client:
        assert app.graph is not None
        async with asyncio.TaskGroup() as callers:
            for caller in range(60):
                callers.create_task(ask(client, caller))
            while asked < 120:
                await asyncio.sleep(0.01)
            kill.kill()
            before = asked
            async with asyncio.timeout(WAIT_S):
                while asked < before + 300:
                    await asyncio.sleep(0.01)
            over.set()
    print(f"fail-over: {asked} answers, none wrong or missing, the slowest after {slowest:.1f} s")


async def test_sentinels_lead_to_the_new_master() -> None:
    """K04: the master dies with calls in flight; service and client ask the sentinels anew. One sentinel
    is enough to be told; a service that none of them knows is named."""
    stream = unique("embedstream.requests")
    async with sentinel_pair() as pair:
        wrong = pair.url(stream).replace("sentinel=mymaster", "sentinel=other")
        with pytest.raises(
            ConnectionError, match="no sentinel that answers has a master of the name"
        ):
            await reach(wrong)
        await survives(pair.url(stream, QUICK), pair.url(stream), pair.master)
        async with client_of(pair.replica) as promoted:
            assert (await promoted.info("replication"))["role"] == "master"
        pair.sentinels[0].kill()
        assert await reach(pair.url(stream)) == ()


async def test_a_cluster_serves_and_fails_over(nodes: Cluster) -> None:
    """K14: requests, replies and dead letters lie on different nodes; the one with the requests dies.
    Without the word in the address it is refused with what to write."""
    plain = f"redis://{nodes.masters[0].address}/{nodes.key}"
    with pytest.raises(ConnectionError, match="add cluster=true"):
        await reach(plain)
    await survives(nodes.url(QUICK), nodes.url(), nodes.owner())


def third_of(destination: str) -> int:
    """Which of the three masters has that key."""
    return min(2, key_slot(destination.partition(":")[2].encode()) * 3 // 16384)


async def test_every_node_of_a_cluster_is_written_to(nodes: Cluster) -> None:
    """K14: streams and lists, replies on all three nodes; one node's death costs only what lies on it."""
    stream = nodes.url(QUICK)
    lists = stream.replace("redis:", "redis-list:").replace("?stream=", "?key={l}")
    replies = [f"list:{unique('embedstream.reply')}" for _ in range(30)]
    assert {third_of(reply) for reply in replies} == {0, 1, 2}
    async with client_of(nodes.owner()) as client:
        for n in range(20):
            await client.xadd(nodes.key, {"data": b"%d" % n})
    async with running(parse_url(lists)) as transport:
        sink, source = transport.sink, transport.source
        async with client_of(nodes.masters[third_of("key:l")]) as client:
            for n in range(20):
                await client.lpush("{l}" + nodes.key, b"%d" % n)
        assert {d.body for d in await collect(source, 20)} == {b"%d" % n for n in range(20)}
        await flushed(source)
    async with running(parse_url(stream)) as transport:
        sink, source = transport.sink, transport.source
        assert {d.body for d in await collect(source, 20)} == {b"%d" % n for n in range(20)}
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(sink.publish(r, "r", b"x", {}) for r in replies))
            await sink.publish(sink.dead_letter_destination, "r", b"x", {})
        await flushed(source)
        third = next(n for n in range(3) if nodes.masters[n] is not nodes.owner())
        nodes.masters[third].kill()
        results = await asyncio.gather(
            *(sink.publish(r, "r", b"x", {}) for r in replies), return_exceptions=True
        )
        for reply, result in zip(replies, results, strict=True):
            assert (result is None) is (third_of(reply) != third)


async def test_a_single_server_is_no_cluster(redis_server: ServerInfo) -> None:
    with pytest.raises(ConnectionError, match="take cluster=true out"):
        await reach(f"redis://{redis_server.address}/x?cluster=true")


@pytest.fixture
async def tls(tmp_path: Path) -> AsyncIterator[TlsServer]:
    async with tls_server(tmp_path) as server:
        yield server


async def test_tls_with_certificates_on_both_sides(tls: TlsServer) -> None:
    """Service and client over rediss://; a wrong authority, name or no certificate of ours is refused."""
    stream = unique("embedstream.requests")
    url = f"rediss://localhost:{tls.port}/0?stream={stream}{tls.login}"
    async with service(url + QUICK), AsyncClient.from_url(url, timeout=20) as client:
        vector = (await client.embed("a b")).vector
        np.testing.assert_array_equal(vector, fake_vector(fake_ids("a b")))
    by_address = url.replace("localhost", "127.0.0.1")
    assert await reach(by_address + "&ssl_check_hostname=false") == ()
    for wrong in (
        by_address,
        url.replace(f"ssl_ca_certs={tls.ca_certs}", f"ssl_ca_certs={tls.stranger}"),
        f"rediss://localhost:{tls.port}/0?stream={stream}&ssl_ca_certs={tls.ca_certs}",
        f"redis://localhost:{tls.port}/0?stream={stream}&connect_timeout_s=1&socket_timeout_s=3",
    ):
        options = parse_url(wrong)
        assert isinstance(options, RedisOptions)
        with pytest.raises(ConnectionError, match=f"localhost:{tls.port}|127.0.0.1:{tls.port}"):
            await open_transport(options, clock=SystemClock(), metrics=NoMetrics())

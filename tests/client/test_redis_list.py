"""The client of a service that reads a Redis list."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio as redis

from embedstream_client import AsyncClient, NoReply
from pipeline.observe.metrics import PrometheusMetrics
from tests.support.client import held, service, until, waiting_for
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.killable import Proxy
from tests.support.servers import ServerInfo, new_redis, redis_ladder, unique

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


def expected(text: str) -> np.ndarray:
    return fake_vector(fake_ids(text))


@pytest.mark.parametrize("end", ["right", "left"])
async def test_many_callers_share_two_connections_and_one_reply_stream(
    redis_info: ServerInfo, end: str
) -> None:
    """Replies have a time to live and nothing is left behind."""
    key = unique("embedstream.list")
    host, _, port = redis_info.address.partition(":")
    query = f"/{key}?take_from={end}"
    async with (
        service(f"redis-list://{redis_info.address}{query}"),
        redis.Redis.from_url(f"redis://{redis_info.address}") as looker,
        Proxy(host, int(port)) as proxy,
    ):
        client = AsyncClient.from_url(f"redis-list://127.0.0.1:{proxy.port}{query}", timeout=60)
        texts = [f"caller {number}" for number in range(300)]
        results = await asyncio.gather(*(client.embed(text) for text in texts))
        for text, result in zip(texts, results, strict=True):
            np.testing.assert_array_equal(result.vector, expected(text))
        assert proxy.connections == 2
        reply_stream = client._open().link.reply_to.removeprefix("stream:")
        assert 0 < await looker.ttl(reply_stream) <= 300
        ranking = await client.rerank("q", ["a", "b"], top_n=1)
        assert len(ranking) == 1
        await client.aclose()
        assert not await looker.exists(reply_stream) and not await looker.llen(key)


async def test_a_cancelled_call_withdraws_its_request(redis_info: ServerInfo) -> None:
    go = threading.Event()
    metrics = PrometheusMetrics()
    url = f"redis-list://{redis_info.address}/{unique('embedstream.list')}"
    runner = partial(FakeRunner, before_forward=waiting_for(go), max_batch_tokens=2)
    async with (
        service(url, runner=runner, metrics=metrics) as app,
        AsyncClient.from_url(url) as client,
        asyncio.TaskGroup() as group,
    ):
        kept = [group.create_task(client.embed(f"kept {i}")) for i in range(2)]
        await until(lambda: held(app) == 2)
        gone = group.create_task(client.embed(["gone a", "gone b", "gone c"]))
        await until(lambda: held(app) == 3)
        gone.cancel()
        await until(lambda: metrics.registry.get_sample_value(
            "embedstream_cancel_records_total", {"route": "r", "outcome": "cancelled"}) == 1)  # fmt: skip
        go.set()
        for task in kept:
            await task


async def test_calls_in_flight_survive_a_restart_that_loses_everything() -> None:
    """List, processing lists and reply stream are forgotten; every call is answered all the same."""
    server = new_redis("--save", "")
    await server.start()
    go = threading.Event()
    url = f"redis-list://{server.address}/{unique('embedstream.list')}"
    async with (
        service(url, runner=partial(FakeRunner, before_forward=waiting_for(go))) as app,
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


async def test_few_rights_are_enough() -> None:
    """The rights that docs/web.md names for a list, and no others."""
    page = (Path(__file__).parents[2] / "docs" / "web.md").read_text("utf-8")
    (rights,) = re.findall(r"`ACL SETUSER web on >secret ([^`]*)`", page)
    assert "Over a list: `+lpush` (`+rpush` with `take_from=left`) instead of `+xadd`" in page
    key = unique("embedstream.list")
    allowed = rights.replace("embedstream.requests", key).replace("+xadd", "+lpush").split()
    server = new_redis()
    await server.start()
    async with redis.Redis.from_url(f"redis://{server.address}") as admin:
        await admin.execute_command("ACL", "SETUSER", "web", "on", ">secret", *allowed)
    async with service(f"redis-list://{server.address}/{key}"):
        url = f"redis-list://web:secret@{server.address}/{key}"
        async with AsyncClient.from_url(url, timeout=30) as client:
            np.testing.assert_array_equal((await client.embed("x")).vector, expected("x"))
    await server.stop()


async def test_silence_says_what_lies_in_the_list(redis_info: ServerInfo) -> None:
    url = f"redis-list://{redis_info.address}/{unique('embedstream.list')}"
    async with AsyncClient.from_url(url, timeout=0.3) as client:
        with pytest.raises(
            NoReply, match=r"1 requests lie in the list embedstream\.list.*service reads"
        ):
            await client.embed("x")


async def test_a_record_that_no_service_reads_is_blamed_on_its_size(redis_info: ServerInfo) -> None:
    """An element has no headers: whoever does not read it does not know whom to tell."""
    url = f"redis-list://{redis_info.address}/{unique('embedstream.list')}"
    async with service(url), AsyncClient.from_url(url, timeout=30) as client:
        with pytest.raises(NoReply, match="max_record_bytes was raised: split the request"):
            await client.embed("x" * (17 * 1024 * 1024), timeout=1.0)
        assert (await client.embed("x")).vector.size

"""Asking a running service over its own broker (`--via`): Redis and Kafka, real servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.app import App
from pipeline.lifecycle import ExitStatus, StopSignal
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports.registry import open_asker, reach
from schemas.results import FailureReply, Reply
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.servers import ServerInfo, kafka_ladder, redis_ladder

ROOT = Path(__file__).parents[2]
KAFKA_TIMING = "session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=15"


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


@pytest.fixture(scope="module")
def kafka_info() -> Iterator[ServerInfo]:
    yield from kafka_ladder(packaged=True)


@asynccontextmanager
async def service(source: str) -> AsyncIterator[App]:
    """A service with a fake model on one route, until the block ends."""
    settings = Settings(routes=(RouteSettings(name="r", source=source, lane="interactive"),))
    app = App(settings, runner_factories={"fake": FakeRunner})
    stop = StopSignal(10.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(stop))
        await asyncio.wait_for(app.ready.wait(), 30)
        yield app
        stop.request("the test is over")
    assert running.result() is ExitStatus.OK


def record(request_id: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"id": request_id, **fields})


async def ask_many(url: str, n: int) -> None:
    asker = await open_asker(url)
    run_id = uuid.uuid4().hex[:8]
    ids = [f"{run_id}-{i}" for i in range(n)]
    replies = await asyncio.gather(
        *(asker.ask(i, record(i, input=[i, "x y"]), "application/msgpack", 30.0) for i in ids)
    )
    refused = await asker.ask(
        f"{run_id}-bad", record(f"{run_id}-bad", input="x", nope=1), "application/msgpack", 30.0
    )
    await asker.aclose()
    for request_id, reply in zip(ids, replies, strict=True):
        assert isinstance(reply, Reply) and reply.id == request_id
        assert reply.items[0].embedding is not None
        vector = np.frombuffer(reply.items[0].embedding, "<f4")
        np.testing.assert_allclose(vector, fake_vector(fake_ids(request_id)), rtol=1e-6)
    assert isinstance(refused, FailureReply) and refused.error.code == "invalid_request"


@pytest.mark.redis
async def test_ask_over_redis(redis_info: ServerInfo) -> None:
    url = f"redis://{redis_info.address}/embedstream.{uuid.uuid4().hex}"
    async with service(url):
        await ask_many(url, 20)


@pytest.mark.redis
@pytest.mark.parametrize("end", ["right", "left"])
async def test_ask_over_a_redis_list(redis_info: ServerInfo, end: str) -> None:
    url = f"redis-list://{redis_info.address}/embedstream.{uuid.uuid4().hex}?take_from={end}"
    async with service(url):
        await ask_many(url, 20)
        asker = await open_asker(url)
        body = json.dumps({"id": "j", "input": "x y", "reply_to": "list:embedstream.reply.other"})
        reply = await asker.ask("j", body.encode(), "application/json", 30.0)
        assert isinstance(reply, Reply) and reply.n == 1
        await asker.aclose()


@pytest.mark.kafka
async def test_ask_over_kafka(kafka_info: ServerInfo) -> None:
    topic, replies = f"requests.{uuid.uuid4().hex}", f"embedstream.{uuid.uuid4().hex}"
    url = f"kafka://{kafka_info.address}/{topic}?group={topic}&{KAFKA_TIMING}&reply_topic={replies}"
    async with service(url):
        await ask_many(url, 20)


@pytest.mark.redis
async def test_a_silent_service_is_a_timeout_that_says_what_to_look_at(
    redis_info: ServerInfo,
) -> None:
    url = f"redis://{redis_info.address}/embedstream.{uuid.uuid4().hex}"
    asker = await open_asker(url)
    with pytest.raises(
        TimeoutError, match=r"no service reads the stream embedstream\..*check that one runs"
    ):
        await asker.ask("a", record("a", input="x"), "application/msgpack", 0.05)
    await asker.aclose()


@pytest.mark.redis
async def test_reach_creates_nothing(redis_info: ServerInfo) -> None:
    import redis.asyncio as redis

    stream = f"embedstream.{uuid.uuid4().hex}"
    assert await reach(f"redis://{redis_info.address}/{stream}") == ()
    client = redis.Redis.from_url(f"redis://{redis_info.address}")
    assert not await client.exists(stream)
    await client.aclose()


@pytest.mark.kafka
async def test_reach_names_missing_topics_and_what_would_be_made(kafka_info: ServerInfo) -> None:
    """K35: partitions and replication factor are told; a cluster that is too small for them is a problem;
    no look makes anything."""
    topic = f"requests.{uuid.uuid4().hex}"
    url = f"kafka://{kafka_info.address}/{topic}?partitions=5"
    for _ in range(2):  # the second look finds it missing again: the first one did not create it
        (notice,) = [notice for notice in await reach(url) if topic in notice]
        assert notice.startswith(f"request topic {topic}")
        assert (
            "serve will make what is missing with 5 partitions and replication factor 1" in notice
        )
    with pytest.raises(ConnectionError, match=r"cannot be made .*replication factor 3 .*1 broker"):
        await reach(f"{url}&replication_factor=3")
    (notice,) = [n for n in await reach(f"{url}&auto_create=false") if topic in n]
    assert "create what is missing, or set auto_create=true" in notice
    if kafka_info.real_kafka:
        assert "num.partitions" in notice and "default.replication.factor 1" in notice


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/q", "kafka://127.0.0.1:1/q"])
async def test_a_broker_out_of_reach_is_one_line(url: str) -> None:
    for attempt in (open_asker, reach):
        with pytest.raises(ConnectionError) as caught:
            await attempt(url)
        assert "\n" not in str(caught.value) and "check" in str(caught.value)


@pytest.mark.redis
async def test_the_cli_asks_a_service(redis_info: ServerInfo) -> None:
    url = f"redis://{redis_info.address}/embedstream.{uuid.uuid4().hex}"
    async with service(url):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipeline", "embed", "-", "-o", "jsonl", "--via", url),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if not k.startswith("EMBEDSTREAM_")},
        )
        lines = b'{"id": "same", "input": "a b"}\n{"id": "same", "input": "c"}\n{"input": ""}\n'
        lines += b'{"input": "many lines"}\n' * 200  # K28: far more than may be in flight
        out, err = await asyncio.wait_for(process.communicate(lines), 50)
    assert process.returncode == 1
    replies = [json.loads(line) for line in out.splitlines()]
    assert [r["id"] for r in replies] == ["same", "same", *(f"line-{n}" for n in range(3, 204))]
    np.testing.assert_allclose(
        replies[1]["data"][0]["embedding"], fake_vector(fake_ids("c")), rtol=1e-6
    )
    assert err.decode().splitlines() == ["embedstream: line-3, item 0: empty_input: no token"]

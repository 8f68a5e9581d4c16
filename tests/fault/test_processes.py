"""`serve --processes 2` on real brokers, killed from inside and from above: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from gpu.device.cores import usable_cores
from pipeline.local.server import free_port
from schemas.codec import decode_reply, encode_request
from schemas.requests import EmbedRequest, Text
from schemas.results import Reply
from tests.support.kafka_bench import Bench
from tests.support.models import write_model
from tests.support.servers import ServerInfo, unique

ROOT = Path(__file__).parents[2]
COUNT = 3000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(usable_cores()) < 2, reason="two processes need two cores"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


class Service:
    """`embedstream serve --processes 2` and its processes."""

    def __init__(self, source: str, model: Path, log: Path) -> None:
        self.port = free_port()
        self.log_path = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline", "serve", "--source", source, "--model", str(model),
                 "--processes", "2", "--health-port", str(self.port), "--log-format", "json",
                 "--set", f"models.{model.name}.max_batch_tokens=32"],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as found:
                return found.status, found.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:  # not up yet
            return 0, b""

    def shown(self) -> dict[str, Any]:
        processes: dict[str, Any] = json.loads(self.get("/statistics")[1])["processes"]
        return processes

    def pids(self) -> list[int]:
        return [one["pid"] for one in self.shown().values()]

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(200):
            while not await asyncio.to_thread(condition):
                assert self.process.poll() is None, self.log()[-5:]
                await asyncio.sleep(0.1)

    async def until_ready(self) -> None:
        await self.until(lambda: self.get("/ready")[0] == 200)


@contextmanager
def service(source: str, model: Path, folder: Path) -> Iterator[Service]:
    one = Service(source, model, folder / f"{unique('service')}.log")
    try:
        yield one
    finally:
        one.process.kill()  # its processes end with it: that is tested here
        one.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Queue:
    """Requests into a broker and replies out of it, each id with its count and its first bytes."""

    def __init__(self, source: str, send: Callable[[dict[str, bytes]], Awaitable[None]]) -> None:
        self.source, self.send = source, send
        self.seen: Counter[str] = Counter()
        self.first: dict[str, tuple[Any, ...]] = {}
        self.read: Callable[[], Awaitable[None]]

    def note(self, body: bytes, headers: dict[str, bytes]) -> None:
        reply = decode_reply(body, headers)
        assert isinstance(reply, Reply), reply
        self.seen[reply.id] += 1
        assert self.first.setdefault(reply.id, reply.items) == reply.items, "answered differently"

    async def until(self, count: int) -> None:
        async with asyncio.timeout(200):
            while len(self.seen) < count:
                await self.read()


def bodies(prefix: str, count: int = COUNT, reply_to: str | None = None) -> dict[str, bytes]:
    words = ("hello", "world", "red", "blue", "river", "mountain", "stream")
    return {
        f"{prefix}{i}": encode_request(
            EmbedRequest(
                id=f"{prefix}{i}",
                input=(Text(f"{words[i % 7]} {words[i % 5]} {i}"),) * 2,
                reply_to=reply_to,
            )
        )[0]
        for i in range(count)
    }


@asynccontextmanager
async def kafka_queue(server: ServerInfo) -> AsyncIterator[Queue]:
    bench = Bench(server.address)
    await bench.create(4)
    queue = Queue(bench.source, bench.produce_raw)  # type: ignore[arg-type]
    async with bench.reading(bench.replies, 4) as consumer:

        async def read() -> None:
            for records in (await consumer.getmany(timeout_ms=300)).values():
                for record in records:
                    queue.note(record.value, dict(record.headers))

        queue.read = read
        yield queue


@asynccontextmanager
async def redis_queue(server: ServerInfo) -> AsyncIterator[Queue]:
    client: Any = aioredis.Redis.from_url(f"redis://{server.address}", protocol=2)
    stream, replies = unique("embedstream.in"), unique("embedstream.out")

    async def send(records: dict[str, bytes]) -> None:
        pipeline = client.pipeline(transaction=False)
        for body in records.values():
            pipeline.xadd(stream, {"data": body})
        await pipeline.execute()

    queue = Queue(
        f"redis://{server.address}/{stream}?group=g&claim_idle_ms=1500&claim_interval_ms=200&block_ms=200",
        send,
    )
    after = b"0"

    async def read() -> None:
        nonlocal after
        for _, entries in await client.xread({replies: after}, count=500, block=300):
            for entry_id, fields in entries:
                after = entry_id
                queue.note(fields[b"data"], {"content-type": fields[b"content-type"]})

    queue.read = read
    queue.reply_to = f"stream:{replies}"  # type: ignore[attr-defined]
    try:
        yield queue
    finally:
        await client.aclose()


async def die_and_lose_nothing(queue: Queue, model: Path, folder: Path) -> None:
    """E05, E09: a process, then the parent is killed with work in flight; another service does the rest."""
    reply_to = getattr(queue, "reply_to", None)
    with service(queue.source, model, folder) as first:
        await first.until_ready()
        one, two = first.pids()
        await queue.send(bodies("a", reply_to=reply_to))
        await queue.until(100)
        os.kill(two, signal.SIGKILL)
        assert len(queue.seen) < COUNT, "the kill came too late to mean anything"
        await first.until(lambda: first.shown()["2"]["starts"] == 2)
        await first.until_ready()
        await queue.until(COUNT)
        assert first.pids()[0] == one, "the other one was left alone"
        told = first.get("/metrics")[1].decode()
        assert 'embedstream_process_restarts_total{process="2"} 1.0' in told
        assert 'embedstream_requests_total{process="1",' in told

        await queue.send(bodies("b", reply_to=reply_to))
        await queue.until(COUNT + 100)
        pids = first.pids()
        first.process.kill()
        first.process.wait()
        async with asyncio.timeout(100):
            while any(map(alive, pids)):
                await asyncio.sleep(0.1)
    lines = first.log()
    ended = [line["event"] for line in lines if line.get("process") == 1]
    assert ended[-1] == "service_stopped", "it drained, as after a SIGTERM"
    with service(queue.source, model, folder) as second:
        await queue.until(2 * COUNT)
        await second.until_ready()
        second.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.process.wait, 100) == 0, second.log()[-5:]
    duplicates = sum(queue.seen.values()) - len(queue.seen)
    print(f"{2 * COUNT} requests, a process and a parent killed: lost 0, duplicates {duplicates}")


@pytest.mark.kafka
async def test_kafka_a_process_and_the_parent_are_killed(
    kafka_server: ServerInfo, model: Path, tmp_path: Path
) -> None:
    async with kafka_queue(kafka_server) as queue:
        await die_and_lose_nothing(queue, model, tmp_path)


@pytest.mark.redis
async def test_redis_a_process_and_the_parent_are_killed(
    redis_server: ServerInfo, model: Path, tmp_path: Path
) -> None:
    async with redis_queue(redis_server) as queue:
        await die_and_lose_nothing(queue, model, tmp_path)


@pytest.mark.redis
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_all_and_each_answer_comes_once(
    redis_server: ServerInfo, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """G01: status 0, also when a terminal sends its Ctrl-C to the whole group."""
    async with redis_queue(redis_server) as queue:
        with service(queue.source, model, tmp_path) as one:
            await one.until_ready()
            pids = one.pids()
            await queue.send(bodies("a", reply_to=getattr(queue, "reply_to", None)))
            await queue.until(50)
            one.process.send_signal(number)
            assert await asyncio.to_thread(one.process.wait, 100) == 0, one.log()[-5:]
            assert not any(map(alive, pids))
        with service(queue.source, model, tmp_path):
            await queue.until(COUNT)
    assert set(queue.seen.values()) == {1}


def test_a_model_that_does_not_load_is_said_once(tmp_path: Path) -> None:
    """G07."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline", "serve", "--source", "redis://127.0.0.1:1/x", "--model",
         str(tmp_path / "m"), "--processes", "2", "--health-port", "0", "--log-format", "json"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("embedstream: ")]
    assert len(told) == 1 and "route redis" in told[0]
    events = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert [e["process"] for e in events if e["event"] == "process_started"] == [1]

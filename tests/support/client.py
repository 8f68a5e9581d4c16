"""Services for tests of the client: one with a fake model, and one that answers by script.

Who calls it: `tests/client`.
What must stay true: `service` is the real `App` on a real broker; only the model is a fake.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec

from actors.ports import Metrics
from gpu.batch import PackedBatch
from pipeline.app import App
from pipeline.lifecycle import ExitStatus, StopSignal
from pipeline.settings.load import RouteSettings, Settings
from tests.support.fakes import FakeRunner


@asynccontextmanager
async def service(
    source: str,
    *,
    runner: Callable[[], FakeRunner] = FakeRunner,
    metrics: Metrics | None = None,
) -> AsyncIterator[App]:
    """A service with one route from `source`, until the block ends."""
    route = RouteSettings(name="r", source=source, lane="interactive")
    app = App(Settings(routes=(route,)), runner_factories={"fake": runner}, metrics=metrics)
    stop = StopSignal(10.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(stop))
        await asyncio.wait_for(app.ready.wait(), 30)
        yield app
        stop.request("the test is over")
    assert running.result() is ExitStatus.OK


@contextmanager
def background_service(source: str) -> Iterator[None]:
    """As `service`, on an event loop of its own: for tests that block."""
    up, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def run() -> None:
        async with service(source):
            up.set()
            await asyncio.to_thread(done.wait)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
            up.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert up.wait(40)
        yield
    finally:
        done.set()
        thread.join()
    assert not failed, failed


class ScriptedService:
    """Stands in for a service on a Redis stream: hands out requests and writes whatever it is told to.

    For replies that no right service writes: strangers', doubled, damaged, late.
    """

    def __init__(self, address: str, stream: str) -> None:
        import redis.asyncio as redis

        self.stream = stream
        self.redis = redis.Redis.from_url(f"redis://{address}", socket_timeout=30, protocol=2)
        self._after = "0"

    async def request(self) -> dict[str, Any]:
        """The next record, decoded; header `reply-to` under that name."""
        found = await self.redis.xread({self.stream: self._after}, count=1, block=20_000)
        entry_id, fields = found[0][1][0]
        self._after = entry_id
        record: dict[str, Any] = msgspec.msgpack.decode(fields[b"data"])
        record["reply-to"] = fields.get(b"reply-to", b"").decode()
        return record

    async def reply(self, to: dict[str, Any], record: dict[str, Any] | bytes) -> None:
        """Write one record to the request's reply stream. A map is completed with the request's id."""
        if isinstance(record, dict):
            record = msgspec.msgpack.encode({"id": to["id"], **record})
        key = to["reply-to"].removeprefix("stream:")
        await self.redis.xadd(key, {"data": record, "request-id": to["id"]})
        await self.redis.expire(key, 60)

    async def aclose(self) -> None:
        await self.redis.aclose()


def embed_reply(
    vectors: Sequence[tuple[int, float]], *, n: int | None = None, **fields: Any
) -> dict[str, Any]:
    """A reply to `embed` with one-component vectors, as (index, component)."""
    return {
        "task": "embed",
        "model": {"name": "m", "fingerprint": "f", "dtype": "float32"},
        "object": "list",
        "data": [{"index": i, "embedding": struct.pack("<f", x), "tokens": 1} for i, x in vectors],
        "n": len(vectors) if n is None else n,
        "dimensions": 1,
        "dtype": "float32",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
        **fields,
    }


def failure(code: str, *, retryable: bool, **fields: Any) -> dict[str, Any]:
    """A request that failed as a whole."""
    return {"error": {"code": code, "message": "as scripted", "retryable": retryable, **fields}}


def waiting_for(go: threading.Event) -> Callable[[PackedBatch], None]:
    """A `before_forward` that holds every batch until `go`."""

    def wait(batch: PackedBatch) -> None:
        assert go.wait(30)

    return wait


async def until(condition: Callable[[], bool]) -> None:
    """Until the condition holds; fails after a while."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def held(app: App) -> int:
    """Requests between ingress and egress."""
    return 0 if app.graph is None else len(app.graph.table)

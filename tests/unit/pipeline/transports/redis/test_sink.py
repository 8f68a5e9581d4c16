"""How concurrent publishes share connections, with the server replaced by a scripted one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionFailed
from redis.exceptions import NoPermissionError, ResponseError

from actors.ports import PublishError, Record
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis.sink import RedisSink


class ScriptedSink(RedisSink):
    """`_execute` takes a few loop steps and may fail; it remembers what was written."""

    def __init__(self, seed: int, fail_share: float = 0.0) -> None:
        super().__init__(RedisOptions())
        self._chance = random.Random(seed)
        self._fail_share = fail_share
        self.written: list[bytes] = []
        self.running = 0
        self.most = 0

    async def _execute(self, calls: list[list[Any]]) -> list[Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self._chance.randrange(4)):
                await asyncio.sleep(0)
            bodies = [waiting.append.words[-1] for call in calls for waiting in call]
            if any(body == b"denied" for body in bodies):
                raise NoPermissionError("NOPERM no permissions")
            if self._chance.random() < self._fail_share:
                raise ConnectionFailed("gone")
            self.written += bodies
            return [[b"ok"] * len(call) for call in calls]
        finally:
            self.running -= 1


@pytest.mark.parametrize("seed", range(40))
async def test_random_cancellations_leave_nobody_waiting(seed: int) -> None:
    """Every publish that was not cancelled ends, and the sink is idle afterwards."""
    sink, chance = ScriptedSink(seed, fail_share=0.1), random.Random(seed)
    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(10):
        for i in range(300):
            body = b"denied" if chance.random() < 0.02 else b"%d" % i
            tasks.append(asyncio.ensure_future(sink.publish("list:embedstream.x", "r", body, {})))
            while chance.random() < 0.3:
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    passed = {b"%d" % i for i, result in enumerate(results) if result is None}
    assert passed <= set(sink.written)
    assert all(
        r is None or isinstance(r, PublishError | asyncio.CancelledError) for r in results
    ), results
    assert sink._shared.idle and not sink.running
    assert sink.most <= 2


@pytest.mark.parametrize("seed", range(40))
async def test_random_cancellations_of_lists_leave_nobody_waiting(seed: int) -> None:
    """Every list that was not cancelled hears of each of its records once, and the sink is idle afterwards."""
    sink, chance = ScriptedSink(seed, fail_share=0.1), random.Random(seed)
    told: dict[int, list[tuple[int, PublishError | None]]] = {}
    sizes: dict[int, int] = {}
    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(10):
        for i in range(60):
            n = sizes[i] = chance.randrange(0, 300)
            heard = told[i] = []
            records = [
                Record(
                    "list:embedstream.x",
                    "r",
                    b"denied" if chance.random() < 0.01 else b"%d" % k,
                    {},
                )
                for k in range(n)
            ]
            tasks.append(
                asyncio.ensure_future(
                    sink.publish_all(records, lambda n, e, heard=heard: heard.append((n, e)))  # type: ignore[misc]
                )
            )
            while chance.random() < 0.3:
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for i, result in enumerate(results):
        numbers = [number for number, _ in told[i]]
        assert len(set(numbers)) == len(numbers)
        if result is None:
            assert sorted(numbers) == list(range(sizes[i]))
        else:
            assert isinstance(result, asyncio.CancelledError)
    assert sink._shared.idle and not sink.running
    assert sink.most <= 2


async def test_one_refused_record_fails_alone() -> None:
    """The server refuses a whole call; each record is then sent by itself."""
    sink = ScriptedSink(1)
    bodies = [b"a", b"b", b"denied", b"c"]
    results = await asyncio.gather(
        *(sink.publish("list:embedstream.x", "r", body, {}) for body in bodies),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [type(None), type(None), PublishError, type(None)]
    assert sorted(sink.written) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), True),
        (ResponseError("WRONGTYPE Operation against a key"), False),
        (ResponseError("MISCONF unable to persist"), True),
        (NoPermissionError("NOPERM"), False),
        (ConnectionFailed("gone"), True),
        (TimeoutError(), True),
    ],
)
def test_what_may_pass_later(error: Exception, retryable: bool) -> None:
    """F07: only what another attempt cannot cure is final."""
    assert RedisSink(RedisOptions())._typed(error, False).retryable is retryable

"""When settles of a Redis source leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.ports import NoMetrics, SystemClock
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis.source import RedisSource


class Server:
    """Takes settles, and nothing else is asked."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.took = asyncio.Event()

    async def settle(self, entries: list[str]) -> None:
        self.batches.append(entries)
        self.took.set()


def source_of(server: Any, interval_ms: int) -> RedisSource:
    options = RedisOptions(settle_interval_ms=interval_ms, max_in_flight=20)
    source = RedisSource(options, clock=SystemClock(), metrics=NoMetrics())
    source._commands = server

    async def nothing() -> None:
        """Nobody to take over from."""

    source._claim = nothing  # type: ignore[method-assign]
    return source


@pytest.mark.parametrize("interval_ms", [0, 60_000])
async def test_settles_leave_together_and_do_not_wait_once_they_are_enough(
    interval_ms: int,
) -> None:
    """Half of what may be in flight: as many take the room of new records while they wait."""
    server = Server()
    source = source_of(server, interval_ms)
    async with asyncio.timeout(20):
        house = asyncio.ensure_future(source._keep_house())
        await asyncio.sleep(0)
        for number in range(10):
            source._settled[f"{number}-0"] = None
            source._settle_waits()
        await server.took.wait()
        house.cancel()
        await asyncio.gather(house, return_exceptions=True)
    assert server.batches == [[f"{number}-0" for number in range(10)]]

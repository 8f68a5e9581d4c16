"""The supervisor while it stops."""

from __future__ import annotations

import asyncio

from actors.ports import SystemClock
from actors.supervisor import Supervisor
from tests.support.fakes import RecordingMetrics


async def test_an_actor_that_fails_while_it_is_cancelled_is_not_started_again() -> None:
    """G02: an error in a clean-up takes the place of the cancellation: stopping ends all the same."""
    starts = 0
    running = asyncio.Event()

    async def body() -> None:
        nonlocal starts
        starts += 1
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            if starts == 1:
                raise RuntimeError("the clean-up failed")

    async with asyncio.timeout(5):
        async with Supervisor(clock=SystemClock(), metrics=RecordingMetrics()) as supervisor:
            supervisor.start("actor", body)
            await running.wait()
    assert starts == 1 and supervisor.fatal is None

"""The supervisor while it stops."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

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


async def test_an_actor_that_lost_its_cancellation_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G02: a client library may swallow one (`asyncio.wait_for` of Python 3.11 does, when the answer
    comes in the same moment); the service ends all the same."""
    monkeypatch.setattr("actors.supervisor.CANCEL_AGAIN_S", 0.05)
    running = asyncio.Event()

    async def body() -> None:
        running.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        async with Supervisor(clock=SystemClock(), metrics=RecordingMetrics()) as supervisor:
            supervisor.start("actor", body)
            await running.wait()

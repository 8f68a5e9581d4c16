"""Long work on the event loop lets others come between."""

from __future__ import annotations

import asyncio

from actors.loop_turn import LONGEST_S, LoopTurn
from tests.support.fakes import ManualClock


async def test_a_turn_ends_when_it_has_been_long_and_not_before() -> None:
    clock, turns = ManualClock(), 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(other())
    await asyncio.sleep(0)
    turn, before = LoopTurn(clock), turns
    for _ in range(100):
        if turn.is_long:
            await turn.end()
    assert turns == before
    for _ in range(10):
        clock.advance(LONGEST_S * 0.6)
        if turn.is_long:
            await turn.end()
    assert turns - before == 5
    beside.cancel()

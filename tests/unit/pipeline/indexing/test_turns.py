"""Turns: one at a time, the interactive lane first, none lost."""

from __future__ import annotations

import asyncio

from pipeline.indexing.turns import Turns
from schemas.requests import Lane


async def test_one_holds_the_turn_and_whoever_is_in_a_hurry_is_next() -> None:
    turns, order, holders = Turns(), [], 0

    async def work(name: str, lane: Lane) -> None:
        nonlocal holders
        async with turns.turn(lane):
            holders += 1
            assert holders == 1
            order.append(name)
            await asyncio.sleep(0)
            holders -= 1

    async with asyncio.TaskGroup() as group:
        for name, lane in (
            ("a", "bulk"),
            ("b", "bulk"),
            ("c", "interactive"),
            ("d", "interactive"),
        ):
            group.create_task(work(name, lane))  # type: ignore[arg-type]
    assert order == ["a", "c", "d", "b"]


async def test_a_turn_that_was_given_to_a_cancelled_task_goes_on() -> None:
    turns = Turns()
    done: list[str] = []

    async def work(name: str) -> None:
        async with turns.turn("bulk"):
            done.append(name)

    async with turns.turn("bulk"):
        waiting = [asyncio.create_task(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
    waiting[1].cancel()  # it has been given the turn and has not run yet
    await asyncio.wait(waiting)
    assert done == ["c"]
    async with turns.turn("interactive"):
        pass

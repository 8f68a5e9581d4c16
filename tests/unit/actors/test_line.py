"""The line between two stations: in order, bounded, and nothing is lost with a taker that is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from actors.line import Line


async def take(line: Line[int], most: int, into: list[list[int]]) -> None:
    while True:
        waiting = await line.some()
        into.append([waiting.popleft() for _ in range(min(most, len(waiting)))])
        line.taken()


async def turns(n: int = 10) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_what_waits_is_taken_in_order_in_lists() -> None:
    line, lists = Line[int](100), list[list[int]]()
    for number in range(5):
        line.put_nowait(number)
    taker = asyncio.create_task(take(line, 3, lists))
    await turns()
    assert lists == [[0, 1, 2], [3, 4]] and len(line) == 0
    line.put_nowait(5)
    await turns()
    assert lists[-1] == [5]
    taker.cancel()


async def test_a_full_line_lets_nobody_in_until_something_is_taken() -> None:
    line, lists = Line[int](2), list[list[int]]()
    senders = [asyncio.create_task(line.put(number)) for number in range(5)]
    await turns()
    assert line.full() and len(line) == 2 and sum(s.done() for s in senders) == 2
    taker = asyncio.create_task(take(line, 1, lists))
    await asyncio.wait_for(asyncio.gather(*senders), 10)
    while sum(map(len, lists)) < 5:
        await asyncio.sleep(0)
    assert sorted(n for some in lists for n in some) == list(range(5))
    taker.cancel()


async def test_several_takers_share_what_comes() -> None:
    line, lists = Line[int](1000), list[list[int]]()
    takers = [asyncio.create_task(take(line, 2, lists)) for _ in range(4)]
    await turns()
    for number in range(20):
        line.put_nowait(number)
    await turns(100)
    assert [n for some in lists for n in some] == list(range(20))
    for taker in takers:
        taker.cancel()


@pytest.mark.parametrize("woken", [False, True])
async def test_a_taker_that_is_cancelled_leaves_what_waits_to_the_next(woken: bool) -> None:
    line, lists = Line[int](10), list[list[int]]()
    first = asyncio.create_task(take(line, 1, []))
    await turns()
    second = asyncio.create_task(take(line, 1, lists))
    await turns()
    if woken:
        line.put_nowait(7)  # wakes the first, which is cancelled before it runs
        first.cancel()
    else:
        first.cancel()
        await turns()
        line.put_nowait(7)
    await turns()
    assert lists == [[7]] and first.cancelled()
    second.cancel()

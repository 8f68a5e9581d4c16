"""The bounded mailbox: bounds, order, closing, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from actors.mailbox import Mailbox, MailboxClosed, MailboxFull


async def test_entries_come_out_in_order() -> None:
    box: Mailbox[int] = Mailbox("m", max_items=3)
    for number in range(3):
        await box.put(number)
    assert [await box.get() for _ in range(3)] == [0, 1, 2]


async def test_put_waits_for_room_and_put_nowait_raises() -> None:
    box: Mailbox[str] = Mailbox("m", max_items=1)
    await box.put("a")
    with pytest.raises(MailboxFull):
        box.put_nowait("b")
    async with asyncio.TaskGroup() as group:
        putter = group.create_task(box.put("b"))
        await asyncio.sleep(0)
        assert not putter.done() and box.statistics().waiting_putters == 1
        assert await box.get() == "a"
        await putter
    assert await box.get() == "b"


async def test_cost_bounds_and_an_oversized_entry_passes_alone() -> None:
    box: Mailbox[str] = Mailbox("m", max_items=10, max_cost=5)
    box.put_nowait("huge", cost=99)
    with pytest.raises(MailboxFull):
        box.put_nowait("small", cost=1)
    assert box.get_nowait() == "huge"
    box.put_nowait("a", cost=3)
    with pytest.raises(MailboxFull):
        box.put_nowait("b", cost=3)
    assert box.statistics().cost == 3


async def test_a_closed_mailbox_hands_out_what_it_holds_then_raises() -> None:
    box: Mailbox[str] = Mailbox("m", max_items=2)
    box.put_nowait("a")
    box.close()
    assert await box.get() == "a"
    with pytest.raises(MailboxClosed):
        await box.get()
    with pytest.raises(MailboxClosed):
        await box.put("b")


async def test_close_wakes_waiters_on_both_ends() -> None:
    empty: Mailbox[str] = Mailbox("m", max_items=1)
    full: Mailbox[str] = Mailbox("m", max_items=1)
    full.put_nowait("a")
    getter = asyncio.get_running_loop().create_task(empty.get())
    putter = asyncio.get_running_loop().create_task(full.put("b"))
    await asyncio.sleep(0)
    empty.close()
    full.close()
    for task in (getter, putter):
        with pytest.raises(MailboxClosed):
            await task


async def test_cancelling_waiters_loses_nothing() -> None:
    """G02-style: whichever waiter is cancelled at whichever moment, the next one is served."""
    box: Mailbox[int] = Mailbox("m", max_items=1)
    loop = asyncio.get_running_loop()
    first, second = loop.create_task(box.get()), loop.create_task(box.get())
    await asyncio.sleep(0)
    box.put_nowait(1)
    first.cancel()  # after it was woken, before it ran
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    box.put_nowait(2)
    third, fourth = loop.create_task(box.put(3)), loop.create_task(box.put(4))
    await asyncio.sleep(0)
    assert box.get_nowait() == 2
    third.cancel()
    await fourth
    assert await box.get() == 4


def test_a_bound_below_one_is_refused() -> None:
    """C13"""
    with pytest.raises(ValueError, match="max_items"):
        Mailbox("m", max_items=0)

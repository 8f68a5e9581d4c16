"""Hand-off and redelivery: order, bounds, cancellation, back-off."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ports import SourceClosed
from pipeline.transports.delivery import HandOff, HeldDelivery, Redelivery


class Owner:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_settle(self, delivery: HeldDelivery) -> None:
        self.heard.append("settle")

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        self.heard.append(reason)


def delivery(owner: Owner, token: object = 0, attempt: int = 1) -> HeldDelivery:
    return HeldDelivery(
        owner,
        token,
        body=b"secret text",
        headers={"a": b"12"},
        key=None,
        default_id="i",
        received_at=0.0,
        origin={"transport": "test"},
        attempt=attempt,
    )


def test_first_outcome_only_reaches_the_owner() -> None:
    owner = Owner()
    one, two = delivery(owner), delivery(owner)
    one.settle()
    one.release("no")
    one.settle()
    two.release("why")
    two.settle()
    assert owner.heard == ["settle", "why"]
    assert "secret" not in repr(one)
    assert one.size_bytes == len(b"secret text") + 3
    assert two.again(5.0).attempt == 2


async def test_order_and_size_of_a_take() -> None:
    hand_off = HandOff(max_take=3)
    items = [delivery(Owner(), i) for i in range(7)]
    hand_off.put(items)
    taken = [await hand_off.take() for _ in range(3)]
    assert [len(batch) for batch in taken] == [3, 3, 1]
    assert [d for batch in taken for d in batch] == items


async def test_cancelled_take_loses_nothing() -> None:
    """Cancelled in the same step in which records arrive: they stay for the next taker."""
    hand_off = HandOff(max_take=10)
    waiting = asyncio.ensure_future(hand_off.take())
    await asyncio.sleep(0)
    item = delivery(Owner())
    hand_off.put([item])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await hand_off.take() == [item]


async def test_pause_end_and_close() -> None:
    hand_off = HandOff(max_take=10)
    item = delivery(Owner())
    hand_off.put([item])
    hand_off.pause()
    hand_off.end()
    waiting = asyncio.ensure_future(hand_off.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    hand_off.resume()
    assert await waiting == [item]
    with pytest.raises(SourceClosed):
        await hand_off.take()
    hand_off.put([item])
    assert hand_off.close() == [item]
    hand_off.put([item])
    assert len(hand_off) == 0
    with pytest.raises(SourceClosed):
        await hand_off.take()


async def test_discard_takes_out_and_keeps_order() -> None:
    hand_off = HandOff(max_take=10)
    items = [delivery(Owner(), i) for i in range(6)]
    hand_off.put(items)
    assert hand_off.discard(lambda d: d.token in (1, 4)) == [items[1], items[4]]
    assert await hand_off.take() == [items[0], items[2], items[3], items[5]]


@given(st.integers(1, 10_000))
def test_a_released_delivery_waits_longer_with_each_attempt_up_to_a_bound(attempt: int) -> None:
    """E07: a record that always fails comes back ever more rarely, never overflowing."""
    redelivery = Redelivery(0.2, 10.0)
    redelivery.add(delivery(Owner(), 0, attempt), 1000.0)
    full_s = min(10.0, 0.2 * 2.0 ** min(attempt - 1, 30))
    assert full_s / 2 <= (redelivery.next_due() or 0.0) - 1000.0 <= full_s + 1e-9


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), max_size=30), st.integers(0, 60))
def test_due_in_order_of_time(adds: list[tuple[int, int]], until: int) -> None:
    redelivery = Redelivery(1.0, 16.0)
    due = []
    for attempt, now in adds:
        item = delivery(Owner(), len(due), attempt)
        redelivery.add(item, float(now))
        [at] = [at for at, _, waiting in redelivery._waiting if waiting is item]
        due.append((at, len(due), item))
    due.sort(key=lambda entry: entry[:2])
    assert redelivery.next_due() == (due[0][0] if due else None)
    assert redelivery.pop_due(until) == [item for at, _, item in due if at <= until]
    left = [item for at, _, item in due if at > until]
    gone = redelivery.discard(lambda d: d.attempt > 4)
    assert sorted(id(d) for d in gone) == sorted(id(d) for d in left if d.attempt > 4)
    assert redelivery.clear() == [d for d in left if d.attempt <= 4]
    assert len(redelivery) == 0

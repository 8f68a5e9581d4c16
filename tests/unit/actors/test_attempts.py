"""Attempts: counted around what can kill, for work that was handed out before (bug log K39)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from actors.attempts import Attempts, apart
from actors.messages import InFlight
from schemas.requests import EmbedRequest, TokenIds
from tests.support.fakes import FakeDelivery
from tests.support.stations import in_flight


class NotingSource:
    """Remembers what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    async def attempt_begins(self, deliveries: Sequence[FakeDelivery]) -> None:
        self.told.append(("begins", len(deliveries)))

    async def attempt_came_back(self, deliveries: Sequence[FakeDelivery]) -> None:
        self.told.append(("came back", len(deliveries)))


@dataclass(eq=False)
class FakeRoute:
    source: NotingSource


def owner(source: NotingSource, *, redelivered: bool = False, attempt: int = 1) -> InFlight:
    route: Any = FakeRoute(source)
    one = in_flight(EmbedRequest(id="r", input=(TokenIds((1,)),)), route=route)
    one.deliveries.clear()
    one.join(FakeDelivery(redelivered=redelivered, attempt=attempt))  # type: ignore[arg-type]
    return one


async def test_what_comes_for_the_first_time_costs_nothing() -> None:
    source = NotingSource()
    async with Attempts().counted([owner(source), owner(source)]):
        assert source.told == []
    assert source.told == []


async def test_the_count_is_written_before_the_step_and_taken_back_after_it() -> None:
    source = NotingSource()
    again = owner(source, redelivered=True)
    async with Attempts().counted([again, again, owner(source)]):
        assert source.told == [("begins", 1)]
    assert source.told == [("begins", 1), ("came back", 1)]


async def test_a_step_that_was_cut_off_stays_counted() -> None:
    """The executor may still run it when its waiter is cancelled."""
    source = NotingSource()
    with pytest.raises(asyncio.CancelledError):
        async with Attempts().counted([owner(source, redelivered=True)]):
            raise asyncio.CancelledError
    assert source.told == [("begins", 1)]


def test_suspects_are_computed_alone_least_suspicious_first_and_all_others_together() -> None:
    source = NotingSource()
    fresh, again = owner(source), owner(source, redelivered=True)
    one = owner(source, redelivered=True, attempt=2)
    two = owner(source, redelivered=True, attempt=3)
    assert apart([fresh, two, again, one, fresh]) == [[fresh, again], [one], [two]]
    assert apart([one]) == [[one]]


async def test_two_suspects_are_never_in_a_step_at_once() -> None:
    """Also not on two threads or in two models: which of them killed us would stay unknown."""
    source, attempts = NotingSource(), Attempts()
    running = most = 0

    async def step() -> None:
        nonlocal running, most
        async with attempts.counted([owner(source, redelivered=True, attempt=2)]):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(step())
    assert most == 1 and len(source.told) == 10

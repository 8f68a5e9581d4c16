"""Taking work back that nobody has begun: a revoked partition, a drain that cannot finish all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.admission import Admission, LaneBudget
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.messages import InFlight
from actors.ordering import KeyOrder
from actors.ports import SystemClock
from actors.publish import PublishPolicy
from actors.rate import Rate
from schemas.requests import LANES
from tests.support.fakes import FakeDelivery, RecordingMetrics, embed
from tests.support.stations import in_flight


def station() -> tuple[Egress, InFlightTable, Any]:
    budget = LaneBudget(max_requests=100, max_tokens=10_000, max_bytes=10**6)
    table = InFlightTable(Admission(dict.fromkeys(LANES, budget)))
    egress = Egress(
        table,
        {},
        policy=PublishPolicy(),
        max_waiting=100,
        clock=SystemClock(),
        metrics=RecordingMetrics(),
    )
    return (
        egress,
        table,
        SimpleNamespace(name="r", order="key", destination=SimpleNamespace(takes_lists=True)),
    )


def admitted(table: InFlightTable, route: Any, number: int, **given: Any) -> InFlight:
    one = in_flight(embed("text", request_id=f"r{number}"), route=route)
    one.deliveries = [FakeDelivery(key=str(number))]
    for name, value in given.items():
        setattr(one, name, value)
    table.add(one)
    return one


def outcomes(requests: list[InFlight]) -> list[str | None]:
    return [one.deliveries[0].outcome for one in requests]  # type: ignore[attr-defined]


def test_what_has_begun_stays_and_the_rest_is_released_without_an_answer() -> None:
    """K48"""
    egress, table, route = station()
    begun = admitted(table, route, 0, first_forward_at=1.0)
    waiting = [admitted(table, route, number) for number in range(1, 4)]
    assert egress.withdraw() == 3
    assert outcomes([begun]) == [None]
    assert all(outcome and outcome.startswith("released") for outcome in outcomes(waiting))
    assert list(table) == [begun]
    assert all(one.closed for one in waiting), "its items fall out of the queues"
    assert not egress._outboxes, "nothing is published"


def test_only_what_is_unwanted_goes() -> None:
    egress, table, route = station()
    kept, gone = admitted(table, route, 1), admitted(table, route, 2)
    assert egress.withdraw(lambda delivery: delivery.key == "2") == 1
    assert outcomes([kept])[0] is None
    assert outcomes([gone])[0] is not None
    assert list(table) == [kept]


def test_a_request_with_deliveries_of_two_partitions_loses_one_and_goes_on() -> None:
    egress, table, route = station()
    one = admitted(table, route, 1)
    other = FakeDelivery(key="2")
    one.deliveries.append(other)
    assert egress.withdraw(lambda delivery: delivery.key == "2") == 1
    assert other.outcome is not None
    assert not one.closed
    assert [delivery.key for delivery in one.deliveries] == ["1"]


def test_the_newest_go_first() -> None:
    egress, table, route = station()
    requests = [admitted(table, route, number) for number in range(10)]
    assert egress.withdraw(at_most=4) == 4
    assert [outcome is not None for outcome in outcomes(requests)] == [False] * 6 + [True] * 4


def test_a_line_goes_on_without_what_was_withdrawn() -> None:
    """Of one key: the first is withdrawn, the second has finished and may leave now."""
    order: KeyOrder[str] = KeyOrder()
    first, second, third = (order.enter("k") for _ in range(3))
    assert order.finish(second, "second") is None
    assert order.withdraw(third) is None
    assert order.withdraw(first) == "second"
    assert order.leave(second) is None
    assert len(order) == 0


def test_of_an_ordered_line_only_the_end_is_withdrawn() -> None:
    """What has begun behind it would be published first, and its next owner would go back in time."""
    egress, table, route = station()
    lined_up = [
        admitted(table, route, number, ticket=egress.line_up(route, key))
        for number, key in enumerate("aabb")
    ]
    lined_up[1].first_forward_at = 1.0  # of line a the second, of line b none
    assert egress.withdraw() == 2
    assert [outcome is not None for outcome in outcomes(lined_up)] == [False, False, True, True]


def test_how_much_a_drain_can_finish_follows_the_measured_rate() -> None:
    _, table, route = station()
    for number in range(50):
        admitted(table, route, number, first_forward_at=1.0)
    assert table.beyond(1.0) == 0, "nothing is known yet"
    for one in list(table)[:10]:
        table.remove(one)
    table.tick(1.0)
    assert table.beyond(1.0) == 30
    assert table.beyond(100.0) == 0


def test_idle_time_says_nothing_about_the_rate() -> None:
    rate = Rate()
    rate.note(100, 1.0, busy=True)
    for _ in range(100):
        rate.note(0, 1.0, busy=False)
    assert rate.per_s == pytest.approx(100)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_a_rate_stays_within_what_was_seen(counts: list[int]) -> None:
    rate = Rate()
    for count in counts:
        rate.note(count, 0.5, busy=True)
    if rate.per_s is not None:
        assert 0 <= rate.per_s <= 2 * max(counts)

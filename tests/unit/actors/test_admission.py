"""Admission: budgets, lanes, deadlines; what is charged is refunded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.admission import Accept, Admission, LaneBudget, Reject, Wait
from schemas.errors import Expired, Overloaded
from tests.support.fakes import embed


def admission(**given: object) -> Admission:
    small = {"max_requests": 2, "max_tokens": 100, "max_bytes": 1000, **given}
    return Admission(
        {
            "interactive": LaneBudget(**small, full_policy="reject"),  # type: ignore[arg-type]
            "bulk": LaneBudget(**small, full_policy="wait"),  # type: ignore[arg-type]
        }
    )


def test_a_full_lane_waits_or_rejects_by_its_policy_and_lists_fare_as_single_items() -> None:
    """C10: one rule for "apple" and ["apple"]."""
    doors = admission()
    for lane in ("interactive", "bulk"):
        doors.charge(lane, 10)  # type: ignore[arg-type]
        doors.charge(lane, 10)  # type: ignore[arg-type]
    for request in (embed("apple"), embed("apple", "pear")):
        rejected = doors.decide(request, "interactive", 10, epoch_ms=0)
        assert isinstance(rejected, Reject) and isinstance(rejected.error, Overloaded)
        assert rejected.error.retryable
        assert isinstance(doors.decide(request, "bulk", 10, epoch_ms=0), Wait)


def test_a_request_above_a_whole_budget_passes_when_the_lane_is_empty() -> None:
    doors = admission()
    assert isinstance(doors.decide(embed("a"), "bulk", 10**9, epoch_ms=0), Accept)
    doors.charge("bulk", 10**9)
    assert isinstance(doors.decide(embed("a"), "bulk", 1, epoch_ms=0), Wait)


def test_tokens_close_the_door_behind_the_request_that_filled_it() -> None:
    doors = admission()
    doors.charge("bulk", 1)
    doors.charge_tokens("bulk", 100)
    decision = doors.decide(embed("a"), "bulk", 1, epoch_ms=0)
    assert isinstance(decision, Wait) and decision.reason == "max_in_flight_tokens"
    doors.refund("bulk", 1, 100)
    assert isinstance(doors.decide(embed("a"), "bulk", 1, epoch_ms=0), Accept)


def test_a_passed_deadline_is_answered_before_anything_else() -> None:
    """G10"""
    decision = admission().decide(embed("a", deadline_ms=1000), "bulk", 1, epoch_ms=1000)
    assert isinstance(decision, Reject) and isinstance(decision.error, Expired)


def test_a_double_refund_is_a_bug_that_is_noticed() -> None:
    doors = admission()
    doors.charge("bulk", 1)
    doors.refund("bulk", 1, 0)
    with pytest.raises(AssertionError, match="refunded twice"):
        doors.refund("bulk", 1, 0)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), max_size=30))
def test_use_returns_to_zero(costs: list[tuple[int, int]]) -> None:
    """I01: never negative, zero at the end."""
    doors = admission()
    for size, tokens in costs:
        doors.charge("bulk", size)
        doors.charge_tokens("bulk", tokens)
    for size, tokens in costs:
        doors.refund("bulk", size, tokens)
    use = doors.use["bulk"]
    assert (use.requests, use.tokens, use.bytes) == (0, 0, 0)

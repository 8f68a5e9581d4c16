"""Lease bookkeeping with a clock in the test's hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.transports.redis.leases import Leases


def test_renewed_at_half_of_the_idle_limit() -> None:
    """F05: work of three idle limits keeps its lease as long as the owner renews."""
    leases = Leases(10.0)
    leases.hold(["1-0"], now=0.0)
    now = 0.0
    for _ in range(6):
        assert leases.due(now + 4.9) == []
        now += 5.0
        assert leases.due(now) == ["1-0"]
        assert leases.overdue(now) == []
        leases.hold(["1-0"], now)
    assert now == 30.0
    assert leases.overdue(40.0) == ["1-0"]
    assert leases.drop("1-0")
    assert not leases.drop("1-0")
    assert leases.next_due() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans()), max_size=60))
def test_due_is_exactly_what_is_old(steps: list[tuple[int, int, bool]]) -> None:
    leases = Leases(6.0)
    model: dict[str, float] = {}
    now = 0.0
    for advance, entry, hold in steps:
        now += advance
        name = f"{entry}-0"
        if hold:
            leases.hold([name], now)
            model[name] = now
        else:
            assert leases.drop(name) == (model.pop(name, None) is not None)
        assert set(leases.due(now)) == {n for n, t in model.items() if now - t >= 3.0}
        assert set(leases.overdue(now)) == {n for n, t in model.items() if now - t >= 6.0}
        assert leases.due(now, limit=1) == leases.due(now)[:1]
        assert leases.next_due() == (min(model.values()) + 3.0 if model else None)

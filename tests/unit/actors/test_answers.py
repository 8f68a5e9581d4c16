"""What is remembered of answers, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.answers import _ENTRY_BYTES, Key, RecentAnswers


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def epoch_ms(self) -> int:
        return int(self.now * 1000)


def key(name: str) -> Key:
    return name, "route", "list:x", b"digest"


def bodies(recent: RecentAnswers, name: str) -> tuple[bytes, ...] | None:
    found = recent.get(key(name))
    return None if found is None else found.bodies


def test_the_first_answer_wins_until_its_time_is_over() -> None:
    """F10"""
    clock = Hands()
    recent = RecentAnswers(60, 10_000, clock=clock)
    recent.put(key("a"), (b"first",))
    clock.now += 59
    recent.put(key("a"), (b"second",))
    assert bodies(recent, "a") == (b"first",)
    clock.now += 1
    assert bodies(recent, "a") is None and len(recent) == 0
    recent.put(key("a"), (b"third", b"part"))
    assert bodies(recent, "a") == (b"third", b"part")


def test_nothing_is_remembered_where_nothing_may_be() -> None:
    for recent in (RecentAnswers(0, 10_000, clock=Hands()), RecentAnswers(60, 0, clock=Hands())):
        recent.put(key("a"), (b"x",))
        assert bodies(recent, "a") is None and len(recent) == 0


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=60),
    limit=st.integers(0, 8000),
    steps=st.lists(st.integers(0, 30), min_size=60, max_size=60),
)
def test_what_is_held_is_bounded(sizes: list[int], limit: int, steps: list[int]) -> None:
    """In bytes and in time, the newest that fit."""
    clock = Hands()
    recent = RecentAnswers(60, limit, clock=clock)
    put: list[tuple[float, int]] = []
    for n, size in enumerate(sizes):
        clock.now += steps[n]
        recent.put(key(str(n)), (b"x" * size,))
        put.append((clock.now, size))
        held = [m for m in range(n + 1) if bodies(recent, str(m)) is not None]
        assert sum(put[m][1] + _ENTRY_BYTES for m in held) <= limit
        assert all(clock.now - put[m][0] < 60 for m in held)
        fits = size + _ENTRY_BYTES <= limit
        assert (n in held) is fits
        assert len(recent) == len(held)

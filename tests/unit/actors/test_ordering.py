"""Work of one key leaves in the order in which it came in; other keys do not wait for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.backoff import Backoff
from actors.ordering import KeyOrder


def test_nothing_overtakes_within_a_key_and_keys_do_not_wait_for_each_other() -> None:
    order: KeyOrder[str] = KeyOrder()
    first, second, other = order.enter("a"), order.enter("a"), order.enter("b")
    assert order.finish(second, "a2") is None
    assert order.finish(other, "b1") == "b1"
    assert order.finish(first, "a1") == "a1"
    assert list(order.waiting()) == ["a1", "a2", "b1"]
    assert order.leave(first) == "a2"
    assert order.leave(second) is None and order.leave(other) is None
    assert len(order) == 0


@given(st.lists(st.sampled_from("abc"), max_size=30), st.randoms(use_true_random=False))
def test_any_order_of_finishing_leaves_in_the_order_of_entering(keys: list[str], rng) -> None:
    order: KeyOrder[int] = KeyOrder()
    tickets = {number: order.enter(key) for number, key in enumerate(keys)}
    finishing = list(tickets)
    rng.shuffle(finishing)
    out, left = [], []
    for number in finishing:
        ready = order.finish(tickets[number], number)
        if ready is not None:
            out.append(ready)
        if out and rng.random() < 0.5:  # what is out is written at some later time
            left.append(out.pop(rng.randrange(len(out))))
            if (following := order.leave(tickets[left[-1]])) is not None:
                out.append(following)
    while out:
        left.append(out.pop())
        if (following := order.leave(tickets[left[-1]])) is not None:
            out.append(following)
    for key in "abc":
        assert [n for n in left if keys[n] == key] == [n for n, k in enumerate(keys) if k == key]
    assert len(order) == 0


@given(st.floats(0.001, 10), st.floats(10, 100), st.integers(1, 40))
def test_waits_double_up_to_the_longest_with_jitter(first: float, longest: float, n: int) -> None:
    backoff = Backoff(first, longest)
    for tries in range(n):
        full = min(longest, first * 2.0**tries)
        assert full / 2 <= backoff.next_s() <= full
    backoff.reset()
    assert backoff.next_s() <= first

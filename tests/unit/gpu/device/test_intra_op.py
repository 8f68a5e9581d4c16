"""Parts of a forward: computed once, by whoever is free, and by nobody else's leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemResult, PackedBatch, pack
from gpu.device import intra_op
from gpu.device.intra_op import MAX_PARTS, TRIED_EVERY, Divisible, Lent, Part, even, lending, lent
from gpu.executor import ModelExecutor

WAIT_S = 20.0


def batch() -> PackedBatch:
    return pack([EncodedItem(np.ones(3, np.int32))])


class Divides:
    """A runner whose forward is a list of works, mapped if anybody is idle."""

    info: Any = None
    encoder: Any = None

    def __init__(self, *works: Callable[[], Any]) -> None:
        self.works = works
        self.found: list[Any] = []

    def forward(self, batch: PackedBatch) -> list[ItemResult]:
        threads = lent()
        self.found = [w() for w in self.works] if threads is None else threads.map(self.works)
        return [ItemResult() for _ in batch.items]

    def close(self) -> None: ...


def executed(runner: Any, workers: int) -> ModelExecutor:
    executor = ModelExecutor({"m": lambda: runner}, workers)
    executor.load("m").result(WAIT_S)
    return executor


def test_idle_threads_compute_parts_at_the_same_time() -> None:
    together = threading.Barrier(3)
    runner = Divides(*[lambda: together.wait(WAIT_S)] * 3)
    executor = executed(runner, 3)
    executor.submit("m", batch()).result(WAIT_S)
    assert sorted(runner.found) == [0, 1, 2]
    assert executor.close(WAIT_S)


def test_a_part_that_nobody_takes_is_computed_by_the_one_who_wants_it() -> None:
    """No thread is free for it, ever: the forward ends all the same."""
    handed: list[Part[Any]] = []
    threads = Lent(handed.append, lambda: 3)
    assert threads.map([lambda n=n: n * n for n in range(4)]) == [0, 1, 4, 9]  # type: ignore[misc]
    for part in handed:  # somebody comes to them at last
        part.run()


def test_a_batch_that_comes_meanwhile_is_not_kept_by_parts() -> None:
    """Another batch takes the idle thread: the first one computes its own parts."""
    entered, other_ended = threading.Event(), threading.Event()
    executor: ModelExecutor

    def first() -> str:
        entered.set()
        assert other_ended.wait(WAIT_S)
        return "first"

    class Both(Divides):
        def forward(self, batch: PackedBatch) -> list[ItemResult]:
            if batch.n_items == 2:
                return [ItemResult()] * 2
            return super().forward(batch)

    runner = Both(first, lambda: "second")
    executor = executed(runner, 2)
    running = executor.submit("m", batch())
    assert entered.wait(WAIT_S)
    executor.submit("m", pack([*batch().items] * 2)).result(WAIT_S)
    other_ended.set()
    running.result(WAIT_S)
    assert runner.found == ["first", "second"]
    assert executor.close(WAIT_S)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_part_that_fails_fails_its_forward_alone(bad: int) -> None:
    def raising() -> None:
        raise MemoryError("too large")

    works: list[Callable[[], Any]] = [lambda: 1, lambda: 2, lambda: 3]
    runner = Divides(*works[:bad], raising, *works[bad + 1 :])
    executor = executed(runner, 3)
    with pytest.raises(MemoryError, match="too large"):
        executor.submit("m", batch()).result(WAIT_S)
    runner.works = tuple(works)
    executor.submit("m", batch()).result(WAIT_S)
    assert runner.found == [1, 2, 3]
    assert executor.health().alive
    assert executor.close(WAIT_S)


def test_closing_in_the_midst_of_parts_lets_the_forward_finish() -> None:
    entered, go = threading.Event(), threading.Event()

    def first() -> int:
        entered.set()
        assert go.wait(WAIT_S)
        return 1

    runner = Divides(first, lambda: 2, lambda: 3)
    executor = executed(runner, 2)
    running = executor.submit("m", batch())
    assert entered.wait(WAIT_S)
    closing = threading.Thread(target=executor.close, args=(WAIT_S,))
    closing.start()
    go.set()
    assert len(running.result(WAIT_S)) == 1
    closing.join(WAIT_S)
    assert runner.found == [1, 2, 3] and not closing.is_alive()


def test_nobody_is_idle_beside_as_many_batches_as_threads_nor_outside_a_forward() -> None:
    seen: list[bool] = []
    both = threading.Barrier(2)

    class Looks(Divides):
        def forward(self, batch: PackedBatch) -> list[ItemResult]:
            both.wait(WAIT_S)
            seen.append(lent() is not None)
            both.wait(WAIT_S)
            return [ItemResult()]

    executor = executed(Looks(), 2)
    for future in [executor.submit("m", batch()) for _ in range(2)]:
        future.result(WAIT_S)
    assert seen == [False, False] and lent() is None
    assert executor.close(WAIT_S)


def test_a_part_is_not_divided_again() -> None:
    threads = Lent(lambda part: None, lambda: 3)
    with lending(threads):
        assert lent() is threads
        assert threads.map([lambda: lent() is None] * 2) == [True, True]
        assert lent() is threads
    assert lent() is None


def took(
    work: Divisible, monkeypatch: pytest.MonkeyPatch, units: int, parts: int, seconds: float
) -> None:
    times = iter((10.0, 10.0 + seconds))
    with monkeypatch.context() as patched:
        patched.setattr(intra_op.time, "perf_counter", lambda: next(times))
        with work.timed(units, parts):
            pass


def test_work_is_divided_where_that_was_faster_and_both_ways_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, threads = Divisible(), Lent(lambda part: None, lambda: 15)
    assert work.parts(1000, 100) == 1  # nobody lends
    with lending(threads):
        assert work.parts(1000, 100) == 1  # not seen yet
        took(work, monkeypatch, 1000, 1, 0.010)
        assert work.parts(1000, 100) == MAX_PARTS and work.parts(1000, 3) == 3
        took(work, monkeypatch, 1000, 3, 0.020)  # slower
        chosen = [work.parts(1000, 100) for _ in range(2 * TRIED_EVERY)]
        assert sorted(set(chosen)) == [1, MAX_PARTS] and chosen.count(MAX_PARTS) == 2
        for _ in range(20):
            took(work, monkeypatch, 1000, 8, 0.004)  # now faster
        chosen = [work.parts(1000, 100) for _ in range(2 * TRIED_EVERY)]
        assert sorted(set(chosen)) == [1, MAX_PARTS] and chosen.count(1) == 2
        assert work.parts(100, 100) == 1  # another size, not seen yet


def test_what_is_short_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Divisible()
    took(work, monkeypatch, 40, 1, 0.9 * intra_op.SHORTEST_S)
    with lending(Lent(lambda part: None, lambda: 15)):
        assert {work.parts(40, 100) for _ in range(100)} == {1}


def test_even_parts_cover_everything_once() -> None:
    for n in range(1, 60):
        for parts in range(1, n + 1):
            bounds = even(n, parts)
            assert [a for a, _ in bounds[1:]] == [b for _, b in bounds[:-1]]
            assert bounds[0][0] == 0 and bounds[-1][1] == n
            sizes = [b - a for a, b in bounds]
            assert max(sizes) - min(sizes) <= 1

"""Intra-op parallelism between executor threads: those without a pack compute parts of the packs that run.

Who calls it: `gpu.executor` lends its idle threads to a forward; `gpu.device.linears` and `gpu.attention.sdpa`
divide a product or the heads of an attention call among them.
What must stay true: a part that no thread has begun is computed by the one who wants it, so nothing waits for
a thread that is busy elsewhere, and a forward beside others costs what it costs alone; nothing spins: beside
other work, OpenMP's threads made a forward of 45 ms one of 150 to 580; a part's error is the error of the
forward. What is divided has the same bits as what is not: rows of a linear and heads are tasks of their own.
No torch here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

PART_S = 0.4e-3
"""What a part has to take at least: a part in another thread costs some 0.15 ms (two cores of a virtual machine)."""
PART_ROWS = 16
"""Fewer rows read a linear's weights for too little."""
MAX_PARTS = 8
"""Each part takes the interpreter's lock twice."""


class Part(Generic[T]):
    """One piece of work, computed once by whoever claims it first."""

    __slots__ = ("_claim", "_ended", "_error", "_result", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claim, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Compute it, unless somebody else does or did. Raises nothing."""
        if not self._claim.acquire(blocking=False):
            return
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            self._error = error
        finally:
            self._ended.release()

    def result(self) -> T:
        """Computed here if nobody has begun. Raises what the work raised."""
        self.run()
        self._ended.acquire()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Lent:
    """Threads that a forward may use beside its own.

    put: hands a part to whichever thread is free. idle: how many are, for this forward.
    """

    def __init__(self, put: Callable[[Part[object]], None], idle: Callable[[], int]) -> None:
        self._put = put
        self.idle = idle

    def map(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Results in order. The first work is done by this thread, the others by whoever is free. No part
        is divided again."""
        parts = [Part(work) for work in works]
        for part in parts[1:]:
            self._put(part)  # type: ignore[arg-type]
        outer, _state.lent = getattr(_state, "lent", None), None
        try:
            return [part.result() for part in parts]
        finally:
            _state.lent = outer


class Divisible:
    """Work in units that do not depend on each other (rows, heads), and what one took at the best."""

    def __init__(self) -> None:
        self._unit_s = float("inf")

    def parts(self, units: int, at_most: int) -> int:
        """Into how many parts to divide so many units, 1: leave them whole. See `timed`."""
        threads = lent()
        if threads is None or at_most < 2 or self._unit_s == float("inf"):
            return 1
        worth = int(units * self._unit_s / PART_S)
        return max(1, min(threads.idle() + 1, MAX_PARTS, at_most, worth))

    @contextmanager
    def timed(self, units: int) -> Iterator[None]:
        """Around work that was left whole although threads were idle."""
        began = time.perf_counter()
        yield
        self._unit_s = min(self._unit_s, (time.perf_counter() - began) / max(units, 1))


_state = threading.local()


def lent() -> Lent | None:
    """Threads lent to the forward that runs on this one, if any is idle."""
    found: Lent | None = getattr(_state, "lent", None)
    return found if found is not None and found.idle() else None


@contextmanager
def lending(threads: Lent) -> Iterator[None]:
    """Within, what runs on this thread may use them."""
    _state.lent = threads
    try:
        yield
    finally:
        _state.lent = None


def even(n: int, parts: int) -> list[tuple[int, int]]:
    """n rows in parts of even size: [start, end) of each."""
    bounds = [n * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))

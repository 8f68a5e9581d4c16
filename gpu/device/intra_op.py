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

SHORTEST_S = 0.3e-3
"""Work below it is left whole: to wake a thread takes 0.05 to 0.15 ms (two cores of a virtual machine)."""
PART_ROWS = 8
"""Fewer rows read a linear's weights for too little."""
MAX_PARTS = 8
"""Each part takes the interpreter's lock twice."""
TRIED_EVERY = 32
"""So often the way that was slower is tried again: other programs come and go."""
_NEW = 0.2  # weight of the newest time in a mean


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
        """Computed here if nobody has begun; ask once. Raises what the work raised."""
        self.run()
        self._ended.acquire()
        if self._error is not None:
            raise self._error
        found, self._result = self._result, None  # a part may lie in the queue for a while
        return found  # type: ignore[return-value]


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


class _Ways:
    """Mean seconds of a unit, left whole and in parts; None: not tried."""

    __slots__ = ("divided", "n", "whole")

    def __init__(self) -> None:
        self.whole: float | None = None
        self.divided: float | None = None
        self.n = 0


class Divisible:
    """Work in units that do not depend on each other (rows, heads): in parts where that has been faster
    here, among what else this machine does."""

    def __init__(self) -> None:
        self._ways: dict[int, _Ways] = {}

    def parts(self, units: int, at_most: int) -> int:
        """Into how many parts to divide so many units, 1: leave them whole. See `timed`."""
        threads = lent()
        most = 1 if threads is None else min(threads.idle() + 1, MAX_PARTS, at_most)
        if most < 2:
            return 1
        ways = self._ways_of(units)
        if ways.whole is None or ways.whole * units < SHORTEST_S:
            return 1
        ways.n += 1
        faster = ways.divided is None or ways.divided < ways.whole
        return most if faster != (ways.n % TRIED_EVERY == 0) else 1

    @contextmanager
    def timed(self, units: int, parts: int) -> Iterator[None]:
        """Around the work, if threads were idle."""
        began = time.perf_counter()
        yield
        took = (time.perf_counter() - began) / max(units, 1)
        ways = self._ways_of(units)
        if parts == 1:
            ways.whole = took if ways.whole is None else (1 - _NEW) * ways.whole + _NEW * took
        else:
            ways.divided = took if ways.divided is None else (1 - _NEW) * ways.divided + _NEW * took

    def _ways_of(self, units: int) -> _Ways:
        """Of all within a factor of two."""
        return self._ways.setdefault(units.bit_length(), _Ways())


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

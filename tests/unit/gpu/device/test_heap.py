"""Freed memory goes back to the system, now and then."""

from __future__ import annotations

import threading

from gpu.device.heap import EVERY_S, HeapTrim, trim_heap


def test_it_trims_once_in_an_interval_whoever_comes_by() -> None:
    now, trims = [100.0], []
    heap = HeapTrim(lambda: trims.append(now[0]), lambda: now[0])
    for at in (0.0, EVERY_S - 1, EVERY_S, EVERY_S + 1, 2 * EVERY_S - 1):
        now[0] = 100.0 + at
        heap.when_due()
    assert trims == [100.0 + EVERY_S]
    now[0] = 101.0 + 3 * EVERY_S
    threads = [threading.Thread(target=heap.when_due) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trims == [100.0 + EVERY_S, now[0]]


def test_a_trim_leaves_what_is_in_use() -> None:
    kept = [bytes([i]) * 100_000 for i in range(64)]
    freed = [bytes(100_000) for _ in range(64)]
    del freed
    trim_heap()
    assert all(one == bytes([i]) * 100_000 for i, one in enumerate(kept))

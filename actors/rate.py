"""How fast work gets done, measured while there is some. Pure.

Who calls it: the in-flight table for the drain, the Kafka source for its window.
What must stay true: time in which nothing was to do says nothing about the rate.
"""

from __future__ import annotations

import math

AVERAGE_OVER_S = 5.0
"""Longer: a slow model is noticed later. Shorter: one long forward makes the rate swing."""


class Rate:
    """Events per second, as a moving average; None until something was measured."""

    def __init__(self) -> None:
        self.per_s: float | None = None

    def note(self, n_done: int, elapsed_s: float, *, busy: bool) -> None:
        """`n_done` events in `elapsed_s`; not `busy`: nothing waited meanwhile."""
        if elapsed_s <= 0 or not (busy or n_done):
            return
        now = n_done / elapsed_s
        if self.per_s is None:
            self.per_s = now if n_done else None
            return
        weight = 1 - math.exp(-elapsed_s / AVERAGE_OVER_S)
        self.per_s += weight * (now - self.per_s)

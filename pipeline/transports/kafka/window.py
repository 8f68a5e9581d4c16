"""How many records a source holds at once: what a drain can finish at the measured rate. Pure.

Who calls it: `source.KafkaSource`.
What must stay true: never above `max_in_flight`, and never so little that a slow model idles.
"""

from __future__ import annotations

from actors.rate import Rate
from pipeline.transports.kafka.options import KafkaOptions

SMALLEST = 256
"""Records: a few batches, so that a slow model is never without work."""
DRAIN_SHARE = 0.5
"""Of the drain budget is planned for; the rest is for publishing, settling and a rate that falls."""


class Window:
    """Grows with what is settled per second."""

    def __init__(self, options: KafkaOptions, now: float) -> None:
        self._options = options
        self._smallest = min(options.max_in_flight, max(SMALLEST, options.max_receive))
        self._rate = Rate()
        self._n_settled = 0
        self._since = now

    def settled(self) -> None:
        """One more record is finished."""
        self._n_settled += 1

    def tick(self, now: float, *, busy: bool) -> None:
        """Once per round of housekeeping."""
        self._rate.note(self._n_settled, now - self._since, busy=busy)
        self._n_settled, self._since = 0, now

    @property
    def size(self) -> int:
        """Records, over all partitions."""
        if self._rate.per_s is None:
            return self._smallest
        finished = int(self._rate.per_s * self._options.drain_budget_s * DRAIN_SHARE)
        return max(self._smallest, min(self._options.max_in_flight, finished))

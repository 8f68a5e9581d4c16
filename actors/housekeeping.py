"""Housekeeping: what nobody else would notice, once per tick.

Who calls it: runs as a supervised task.
What must stay true: expired requests are answered even when no batch is formed; gauges show the
present; the loop's lag and the time in which the executor idled although admitted
tokens waited are measured here and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.coalescer import Coalescer
from actors.in_flight import InFlightTable
from actors.messages import InFlight
from actors.ports import Clock, Metrics
from schemas.errors import EmbedstreamError, Expired
from schemas.requests import LANES

TICK_S = 0.1
"""Longer: coarser idle accounting and later expiry answers. Shorter: wasted wake-ups."""


class Housekeeping:
    """Sweeps expired requests and samples gauges."""

    def __init__(
        self,
        table: InFlightTable,
        coalescer: Coalescer,
        *,
        n_running: Callable[[], int],
        fail: Callable[[InFlight, EmbedstreamError], None],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._table = table
        self._coalescer = coalescer
        self._n_running = n_running
        self._fail = fail
        self._clock = clock
        self._metrics = metrics
        self.loop_lag_s = 0.0
        self.idle_with_work_s = 0.0

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            before = self._clock.monotonic()
            await asyncio.sleep(TICK_S)
            now = self._clock.monotonic()
            self.tick(lag_s=max(0.0, now - before - TICK_S), elapsed_s=now - before)

    def tick(self, *, lag_s: float, elapsed_s: float) -> None:
        """One round."""
        self.loop_lag_s = lag_s
        self._table.tick(elapsed_s)
        self._metrics.observe("loop_lag_seconds", lag_s)
        epoch_ms = self._clock.epoch_ms()
        for in_flight in self._table:
            if not in_flight.closed and in_flight.expired(epoch_ms):
                self._fail(
                    in_flight,
                    Expired(
                        "deadline_ms passed before the answer was complete",
                        limit=in_flight.request.deadline_ms,
                        given=epoch_ms,
                    ),
                )
        for lane in LANES:
            self._metrics.gauge("queue_requests", self._table.count(lane), lane=lane)
        waiting = 0
        for model, packer in self._coalescer.packers.items():
            for lane in LANES:
                tokens = packer.queued_tokens(lane)
                waiting += tokens
                self._metrics.gauge("queue_tokens", tokens, model=model, lane=lane)
        if waiting and self._n_running() == 0:
            self.idle_with_work_s += elapsed_s
            self._metrics.count("executor_idle_with_work_seconds_total", elapsed_s)
        self._metrics.gauge("in_flight", len(self._table))

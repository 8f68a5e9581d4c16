"""The in-process source: the reference for what a transport must do, and the CLI's one-off path.

Who calls it: `embedstream embed|rerank|classify` without `--via`, unit and integration tests.
What must stay true: closing a source, or `crash` of its broker, puts its unsettled records back;
outcomes of deliveries from before that are ignored.
"""

from __future__ import annotations

import asyncio

from actors.ports import (
    Clock,
    Deadline,
    Delivery,
    Metrics,
    NoMetrics,
    SourceStatus,
    SystemClock,
)
from pipeline.transports.delivery import HandOff, HeldDelivery, Redelivery, UncountedAttempts
from pipeline.transports.inproc.broker import InprocBroker, broker_for
from pipeline.transports.inproc.options import InprocOptions


class InprocSource(UncountedAttempts):
    """`actors.ports.Source` over an `InprocBroker`."""

    def __init__(
        self,
        broker: InprocBroker,
        *,
        options: InprocOptions | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._broker = broker
        self._options = options or broker.options
        self._clock = clock or SystemClock()
        self._metrics = metrics or NoMetrics()
        self._hand_off = HandOff(self._options.max_receive)
        self._redelivery = Redelivery(
            self._options.release_backoff_ms / 1000, self._options.release_backoff_max_ms / 1000
        )
        self._held: dict[int, HeldDelivery] = {}
        self._wake = asyncio.Event()
        self._open = False
        self._closed = False

    async def open(self) -> None:
        """Nothing to connect to."""
        self._open = True
        self._broker.arrival_listeners.add(self._wake)

    async def run(self) -> None:
        """Move records from the broker to `receive`, and released ones back after their wait."""
        while not self._closed:
            self._wake.clear()
            now = self._clock.monotonic()
            self._redeliver(now)
            room = self._options.max_in_flight - len(self._held)
            if room > 0 and not self._hand_off.paused and not self._hand_off.closed:
                self._fetch(min(room, self._options.max_receive))
            due = self._redelivery.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _redeliver(self, now: float) -> None:
        for released in self._redelivery.pop_due(now):
            delivery = released.again(now)
            assert isinstance(delivery.token, int)
            self._broker.redelivered(delivery.token, delivery.attempt)
            self._held[delivery.token] = delivery
            self._hand_off.put([delivery])

    def _fetch(self, count: int) -> None:
        deliveries = []
        for record in self._broker.take(count):
            delivery = HeldDelivery(
                self,
                record.serial,
                body=record.body,
                headers=record.headers,
                key=record.key,
                default_id=record.default_id,
                received_at=self._clock.monotonic(),
                origin={"transport": "inproc", "stream": self._options.name, "id": record.serial},
                attempt=record.attempts,
            )
            self._held[record.serial] = delivery
            deliveries.append(delivery)
        if deliveries:
            self._metrics.count("source_records_total", len(deliveries), transport="inproc")
            self._hand_off.put(deliveries)
            self._wake.set()  # there may be more than one take's worth

    async def receive(self) -> list[Delivery]:
        return await self._hand_off.take()

    def pause(self) -> None:
        self._hand_off.pause()

    def resume(self) -> None:
        self._hand_off.resume()
        self._wake.set()

    def stop_intake(self) -> None:
        self._give_back(self._hand_off.close(), untouched=True)
        self._give_back(self._redelivery.clear())
        self._wake.set()

    def _give_back(self, deliveries: list[HeldDelivery], *, untouched: bool = False) -> None:
        serials = []
        for delivery in deliveries:
            assert isinstance(delivery.token, int)
            self._held.pop(delivery.token, None)
            serials.append(delivery.token)
        self._broker.requeue(serials, untouched=untouched)

    async def flush(self, deadline: Deadline) -> None:
        """Settles take effect at once."""

    async def aclose(self) -> None:
        self.stop_intake()
        self._closed = True
        self._broker.arrival_listeners.discard(self._wake)
        self._give_back(list(self._held.values()))
        self._wake.set()

    def status(self) -> SourceStatus:
        connected = self._open and not self._closed
        buffered = len(self._hand_off)
        return SourceStatus(
            connected,
            "" if connected else "the in-process broker is closed",
            in_flight=len(self._held) - buffered - len(self._redelivery),
            buffered=buffered,
        )

    def on_settle(self, delivery: HeldDelivery) -> None:
        assert isinstance(delivery.token, int)
        if self._held.pop(delivery.token, None) is not None:
            self._broker.settle(delivery.token)
            self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        assert isinstance(delivery.token, int)
        if delivery.token not in self._held:
            return
        self._metrics.count("source_released_total", transport="inproc")
        if self._hand_off.closed:
            self._give_back([delivery])
        else:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._wake.set()


async def open_source(options: InprocOptions, *, clock: Clock, metrics: Metrics) -> InprocSource:
    """A source over the broker of that name in this process."""
    source = InprocSource(broker_for(options), options=options, clock=clock, metrics=metrics)
    await source.open()
    return source


async def reach(options: InprocOptions) -> tuple[str, ...]:
    """It is always there."""
    return ()

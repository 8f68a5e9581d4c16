"""The in-process source: the reference for what a transport must do, and the CLI's one-off path.

Who calls it: `embedstream embed|rerank|classify` without `--via`, unit and integration tests.
What must stay true: closing a source, or `crash` of its broker, puts its unsettled records back;
outcomes of deliveries from before that are ignored.
"""

from __future__ import annotations

from actors.ports import Clock, Deadline, Metrics, SourceStatus
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.inproc.broker import InprocBroker, broker_for
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.source import LocalSource, number


class InprocSource(LocalSource):
    """`actors.ports.Source` over an `InprocBroker`."""

    kind = "inproc"

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
        super().__init__(self._options, clock=clock, metrics=metrics)
        self._open = False

    async def open(self) -> None:
        """Nothing to connect to."""
        self._open = True
        self._broker.arrival_listeners.add(self._wake)

    async def run(self) -> None:
        """Move records from the broker to `receive`, and released ones back after their wait."""
        while not self._closed:
            self._wake.clear()
            for delivery in self._redeliver():
                self._broker.redelivered(number(delivery), delivery.attempt)
            room = self._options.max_in_flight - len(self._held)
            if room > 0 and not self._hand_off.paused and not self._hand_off.closed:
                self._fetch(min(room, self._options.max_receive))
            await self._woken(self._until_due_s())

    def _fetch(self, count: int) -> None:
        deliveries = [
            HeldDelivery(
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
            for record in self._broker.take(count)
        ]
        self._hold(deliveries)
        if deliveries:
            self._wake.set()  # there may be more than one take's worth

    def stop_intake(self) -> None:
        never_received = self._hand_off.close()
        self._broker.requeue(self._take(never_received), untouched=True)
        super().stop_intake()

    def _give_up(self, deliveries: list[HeldDelivery]) -> None:
        self._broker.requeue(self._take(deliveries))

    async def flush(self, deadline: Deadline) -> None:
        """Settles take effect at once."""

    async def aclose(self) -> None:
        self.stop_intake()
        self._closed = True
        self._broker.arrival_listeners.discard(self._wake)
        self._give_up(list(self._held.values()))
        self._wake.set()

    def status(self) -> SourceStatus:
        connected = self._open and not self._closed
        return self._status(
            "" if connected else "the in-process broker is closed", held=len(self._held)
        )

    def on_settle(self, delivery: HeldDelivery) -> None:
        serial = number(delivery)
        if self._held.pop(serial, None) is not None:
            self._broker.settle(serial)
        self._wake.set()


async def open_source(options: InprocOptions, *, clock: Clock, metrics: Metrics) -> InprocSource:
    """A source over the broker of that name in this process."""
    source = InprocSource(broker_for(options), options=options, clock=clock, metrics=metrics)
    await source.open()
    return source

"""What every source does the same way, whatever it reads from.

Who calls it: `<kind>/source.py` derive from `LocalSource` or `BrokerSource`; nobody else.
What must stay true: `receive` is safe to cancel; a released record comes again after its wait, and
only while it is still ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from actors.ports import Clock, Delivery, Metrics, NoMetrics, SourceStatus, SystemClock, Withdraw
from pipeline.transports.delivery import HandOff, HeldDelivery, Redelivery


class SourceOptions(Protocol):
    """The options that every source has."""

    @property
    def max_receive(self) -> int: ...
    @property
    def release_backoff_ms(self) -> int: ...
    @property
    def release_backoff_max_ms(self) -> int: ...


class SourceBase:
    """The hand-off to `receive`, pauses, and released records that wait.

    kind: as in the registry, the metric label `transport`. `_wake` is set when the loop that fetches
    should look again: room, pause, a settle.
    """

    kind: ClassVar[str]

    def __init__(
        self, options: SourceOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._metrics = metrics or NoMetrics()
        self._hand_off = HandOff(options.max_receive)
        self._redelivery = Redelivery(
            options.release_backoff_ms / 1000, options.release_backoff_max_ms / 1000
        )
        self._wake = asyncio.Event()

    async def receive(self) -> list[Delivery]:
        """See `actors.ports.Source`."""
        return await self._hand_off.take()

    def pause(self) -> None:
        """See `actors.ports.Source`."""
        self._hand_off.pause()

    def resume(self) -> None:
        """See `actors.ports.Source`."""
        self._hand_off.resume()
        self._wake.set()

    def withdraw_with(self, withdraw: Withdraw) -> None:
        """See `actors.ports.Source`. Here nobody else takes them while they are held."""

    def is_withdrawn(self, delivery: HeldDelivery) -> bool:
        """See `delivery.Owner`."""
        return False

    def holds(self, delivery: HeldDelivery) -> bool:
        """See `delivery.Owner`. Here nobody else takes them while they are held."""
        return True

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        """See `actors.ports.Source`. Here nobody else would get them while this process lives."""

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        """See `actors.ports.Source`. Nothing was noted."""

    async def _woken(self, within_s: float | None) -> None:
        """Until `_wake` is set, at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._wake.wait()

    def _status(self, fault: str, held: int, waiting: int = 0) -> SourceStatus:
        """held: records handed out, buffered or released; waiting: read and not yet buffered."""
        buffered = len(self._hand_off)
        return SourceStatus(
            not fault,
            fault,
            in_flight=max(0, held - buffered - len(self._redelivery)),
            buffered=buffered + waiting,
        )


class LocalSource(SourceBase, ABC):
    """A source whose records are in nobody's hands but this process's, by number."""

    def __init__(
        self, options: SourceOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._held: dict[int, HeldDelivery] = {}
        self._closed = False

    @abstractmethod
    def _give_up(self, deliveries: list[HeldDelivery]) -> None:
        """They will not be handed out here again."""

    def _hold(self, deliveries: list[HeldDelivery], *, fresh: bool = True) -> None:
        """In our hands, and ready to be received."""
        self._held.update((number(delivery), delivery) for delivery in deliveries)
        if fresh and deliveries:
            self._metrics.count("source_records_total", len(deliveries), transport=self.kind)
        self._hand_off.put(deliveries)

    def _take(self, deliveries: Iterable[HeldDelivery]) -> list[int]:
        """Out of our hands; the numbers of those that were in them."""
        numbers = map(number, deliveries)
        return [n for n in numbers if self._held.pop(n, None) is not None]

    def _redeliver(self) -> list[HeldDelivery]:
        """Hand out again what was released and has waited."""
        now = self._clock.monotonic()
        again = [released.again(now) for released in self._redelivery.pop_due(now)]
        self._hold(again, fresh=False)
        return again

    def _until_due_s(self) -> float | None:
        """Seconds until a released record is due; None: none waits."""
        due = self._redelivery.next_due()
        return None if due is None else max(0.0, due - self._clock.monotonic())

    def stop_intake(self) -> None:
        """See `actors.ports.Source`."""
        self._give_up([*self._hand_off.close(), *self._redelivery.clear()])
        self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        """See `delivery.Owner`."""
        if number(delivery) not in self._held:
            return
        self._metrics.count("source_released_total", transport=self.kind)
        if self._hand_off.closed:
            self._give_up([delivery])
        else:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._wake.set()


class BrokerSource(SourceBase, ABC):
    """A source over a broker: loops that run until it is closed.

    `_tick` is set when housekeeping should look again.
    """

    def __init__(
        self, options: SourceOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._tick = asyncio.Event()
        self._closing = asyncio.Event()
        self._run_ended = asyncio.Event()
        self._run_ended.set()

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises `ConnectionError`."""

    @abstractmethod
    async def aclose(self) -> None:
        """See `actors.ports.Source`."""

    @abstractmethod
    def _loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What runs beside each other: polling, housekeeping."""

    async def run(self) -> None:
        """See `actors.ports.Source`."""
        self._run_ended.clear()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in self._loops()]
                await self._closing.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._run_ended.set()

    async def _end_loops(self, bound_s: float) -> None:
        """Let `run` return."""
        self._closing.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._run_ended.wait()


S = TypeVar("S", bound=BrokerSource)


async def opened(source: S) -> S:
    """It, connected. Raises `ConnectionError`; nothing stays open then."""
    try:
        await source.open()
    except BaseException:
        await source.aclose()
        raise
    return source


def number(delivery: HeldDelivery) -> int:
    """The token of a `LocalSource`'s delivery."""
    assert isinstance(delivery.token, int)
    return delivery.token

"""The in-process transport: the reference for what a transport must do, and the CLI's one-off path.

Who calls it: `embedstream embed|rerank|classify` without `--via`, unit and integration tests.
What must stay true: at-least-once like the others. A record leaves the broker only when it is
settled; closing a source, or `crash`, puts its unsettled records back with `attempt` + 1; outcomes
of deliveries from before that are ignored.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from actors.ports import (
    Clock,
    Deadline,
    Delivery,
    Metrics,
    NoMetrics,
    PublishError,
    RecordTooLargeForBroker,
    SourceStatus,
    SystemClock,
)
from pipeline.transports import names
from pipeline.transports.intake import HandOff, HeldDelivery, Redelivery, UncountedAttempts
from pipeline.transports.options import InprocOptions, name_error


@dataclass(frozen=True, slots=True)
class InprocReply:
    """One published record."""

    key: str
    body: bytes
    headers: Mapping[str, bytes]


@dataclass(slots=True)
class InprocFaults:
    """Named points where a test breaks the broker. All counters run down to zero.

    fail_publishes      the next N publishes raise `PublishError(retryable=True)`
    drop_publishes      the next N publishes report success and lose the record
    before_publish      awaited before each publish (delay, gate, raise)
    duplicate_records   the next N records are handed out twice
    lose_settles        the next N settles never reach the broker (a crash before the commit)
    """

    fail_publishes: int = 0
    drop_publishes: int = 0
    before_publish: Callable[[str, bytes], Awaitable[None]] | None = None
    duplicate_records: int = 0
    lose_settles: int = 0


@dataclass(slots=True)
class _Record:
    serial: int
    body: bytes | None
    headers: Mapping[str, bytes]
    key: str | None
    default_id: str
    reply_box: str
    done: asyncio.Future[list[InprocReply]] | None = None
    replies: list[InprocReply] = field(default_factory=list)
    attempts: int = 0


class InprocBroker:
    """A queue of requests and a box of replies inside this process and event loop."""

    def __init__(self, options: InprocOptions | None = None) -> None:
        self.options = options or InprocOptions()
        self.faults = InprocFaults()
        self.dead_letters: deque[InprocReply] = deque(maxlen=self.options.max_kept_replies)
        self._queued: deque[_Record] = deque()
        self._held: dict[int, _Record] = {}
        self._boxes: dict[str, _Record] = {}
        self._kept: OrderedDict[str, list[InprocReply]] = OrderedDict()
        self._kept_count = 0
        self._serial = 0
        self._settled_count = 0
        self.arrival_listeners: set[asyncio.Event] = set()
        self._room = asyncio.Event()

    async def submit(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        key: str | None = None,
    ) -> list[InprocReply]:
        """Send one request and wait until the service has settled it.

        Returns its replies, in the order published: several when a reply was split into parts,
        none when the record was dead-lettered or skipped without a reply. Waits while the queue is
        full. Cancelling stops the waiting only; the request is worked on all the same.
        """
        record = await self._add(body, headers, key, wait_for_reply=True)
        assert record.done is not None
        return await record.done

    async def put(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        key: str | None = None,
    ) -> str:
        """Send one request without waiting for its reply; returns its default request id."""
        record = await self._add(body, headers, key, wait_for_reply=False)
        return record.default_id

    def replies(self, destination: str) -> list[InprocReply]:
        """Take out the replies that no `submit` waited for."""
        taken = self._kept.pop(destination, [])
        self._kept_count -= len(taken)
        return taken

    @property
    def unsettled(self) -> int:
        """Records queued or in flight."""
        return len(self._queued) + len(self._held)

    @property
    def settled(self) -> int:
        """Records settled so far."""
        return self._settled_count

    def crash(self) -> None:
        """As if the consuming process died: everything unsettled is handed out again."""
        self.requeue(list(self._held))

    def redelivered(self, serial: int, attempt: int) -> None:
        """A source hands a held record out once more."""
        if serial in self._held:
            self._held[serial].attempts = attempt

    async def _add(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None,
        key: str | None,
        *,
        wait_for_reply: bool,
    ) -> _Record:
        while len(self._queued) >= self.options.max_queued:
            self._room.clear()
            await self._room.wait()
        self._serial += 1
        default_id = key or uuid.uuid4().hex
        given = {name.lower(): value for name, value in (headers or {}).items()}
        box = names.INPROC_PREFIX + default_id
        done: asyncio.Future[list[InprocReply]] | None = None
        if wait_for_reply:
            box = f"{names.INPROC_PREFIX}{default_id}.{self._serial}"
            given["reply-to"] = box.encode()
            done = asyncio.get_running_loop().create_future()
        record = _Record(self._serial, body, given, key, default_id, box, done)
        if wait_for_reply:
            self._boxes[box] = record
        self._queued.append(record)
        self._announce()
        return record

    def _announce(self) -> None:
        for listener in self.arrival_listeners:
            listener.set()

    def take(self, count: int) -> list[_Record]:
        """Up to `count` records, oldest first, now held by the caller."""
        taken: list[_Record] = []
        while self._queued and len(taken) < count:
            record = self._queued.popleft()
            record.attempts += 1
            self._held[record.serial] = record
            taken.append(record)
            if self.faults.duplicate_records > 0:
                self.faults.duplicate_records -= 1
                taken.append(record)
        if taken:
            self._room.set()
        return taken

    def settle(self, serial: int) -> None:
        if self.faults.lose_settles > 0:
            self.faults.lose_settles -= 1
            return
        record = self._held.pop(serial, None)
        if record is None:
            return
        self._settled_count += 1
        self._boxes.pop(record.reply_box, None)
        if record.done is not None and not record.done.done():
            record.done.set_result(record.replies)

    def requeue(self, serials: list[int], *, untouched: bool = False) -> None:
        """Put held records back at the front, oldest first; `untouched` ones were never received."""
        back = [self._held.pop(serial) for serial in sorted(serials) if serial in self._held]
        for record in back:
            record.attempts -= untouched
        self._queued.extendleft(reversed(back))
        if back:
            self._announce()

    def publish(self, destination: str, reply: InprocReply) -> None:
        if destination == f"{names.INPROC_PREFIX}{names.DEAD_LETTERS}":
            self.dead_letters.append(reply)
            return
        waiting = self._boxes.get(destination)
        if waiting is not None:
            waiting.replies.append(reply)
            return
        self._kept.setdefault(destination, []).append(reply)
        self._kept_count += 1
        while self._kept_count > self.options.max_kept_replies:
            _, oldest = self._kept.popitem(last=False)
            self._kept_count -= len(oldest)


_brokers: weakref.WeakValueDictionary[str, InprocBroker] = weakref.WeakValueDictionary()


def broker_for(options: InprocOptions) -> InprocBroker:
    """The broker of that name in this process; made on first use, gone when nobody holds it."""
    broker = _brokers.get(options.name)
    if broker is None:
        broker = _brokers[options.name] = InprocBroker(options)
    return broker


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


class InprocSink:
    """`actors.ports.Sink` over an `InprocBroker`. Destinations are `inproc:NAME`."""

    dead_letter_destination = f"{names.INPROC_PREFIX}{names.DEAD_LETTERS}"

    def __init__(self, broker: InprocBroker) -> None:
        self._broker = broker
        self.max_record_bytes = broker.options.max_record_bytes

    def default_destination(self, request_id: str) -> str:
        return f"{names.INPROC_PREFIX}{request_id}"

    def check_destination(self, destination: str) -> str | None:
        if not destination.startswith(names.INPROC_PREFIX):
            return f"a reply destination in this process starts with {names.INPROC_PREFIX!r}"
        if destination == self.dead_letter_destination:
            return "dead letters are no reply destination"
        return name_error(destination.removeprefix(names.INPROC_PREFIX), "reply_to")

    async def publish(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        faults = self._broker.faults
        if faults.before_publish is not None:
            await faults.before_publish(destination, body)
        if faults.fail_publishes > 0:
            faults.fail_publishes -= 1
            raise PublishError("injected publish failure", retryable=True)
        size = len(body) + sum(len(name) + len(value) for name, value in headers.items())
        if self.max_record_bytes is not None and size > self.max_record_bytes:
            raise RecordTooLargeForBroker(
                f"a record of {size} bytes exceeds max_record_bytes ({self.max_record_bytes})",
                limit_bytes=self.max_record_bytes,
                given_bytes=size,
            )
        if faults.drop_publishes > 0:
            faults.drop_publishes -= 1
            return
        self._broker.publish(destination, InprocReply(key, body, dict(headers)))

    async def aclose(self) -> None:
        """Nothing to close."""

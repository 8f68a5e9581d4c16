"""Records of a topic once more: partitions of one's own choice, no group, nothing committed.

Who calls it: the registry, for `embedstream replay`; ingress receives from it.
What must stay true: the group of the service is neither joined nor moved; the source is exhausted when
every record of the span is settled, so a released one can come again; `Stretch.next` never passes
an unsettled record, so a replay that is cut short goes on from there and leaves nothing out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, RecordTooLargeError

from actors.backoff import Backoff
from actors.ports import Clock, Deadline, Metrics, SourceStatus
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.kafka.admin import admin_of, words
from pipeline.transports.kafka.consumer import (
    end_offset,
    poll,
    position_now,
    start_consumer,
    stop_consumer,
)
from pipeline.transports.kafka.deliveries import delivery_of, place_of, unreadable_record
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.watermark import PartitionWatermark
from pipeline.transports.source import SourceBase
from pipeline.transports.span import Point, Span, Stretch

log = structlog.get_logger(__name__)

_POLL_MS = 100
_MAX_FETCH_BYTES = 2**30
_EPOCH = 1


class _Part:
    """One partition of the span."""

    def __init__(self, begin: int, end: int, n_gone: int, window: int) -> None:
        self.begin, self.end, self.n_gone = begin, end, n_gone
        self.mark = PartitionWatermark(_EPOCH, window)
        self.mark.begin_at(begin)
        self.position = begin
        self.n_settled = 0

    @property
    def next(self) -> int:
        assert self.mark.committable is not None
        return min(self.mark.committable, self.end)


class ReplaySource(SourceBase):
    """`actors.ports.Source` over a span."""

    kind = "kafka"

    def __init__(
        self,
        options: KafkaOptions,
        span: Span,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self._span = span
        self._parts: dict[TopicPartition, _Part] = {}
        self._fetch_bytes = options.max_partition_fetch_bytes
        self._consumer: AIOKafkaConsumer | None = None
        self._fault = "not open"
        self._closing = False

    async def open(self) -> None:
        """Connect and look the span up. Raises `ConnectionError`, and `ValueError` for a span that
        is not there."""
        options, topic = self._options, self._span.topic
        try:
            async with asyncio.timeout(options.open_timeout_s):
                async with admin_of(options) as admin:
                    found = await admin.describe_topics()
                numbers = [
                    part["partition"]
                    for one in found
                    if one["topic"] == topic
                    for part in one["partitions"]
                ]
                if not numbers:
                    raise ConnectionError(
                        f"topic {topic} does not exist at {options.bootstrap}, or this client may not see "
                        "it: name another with --topic, or give it DESCRIBE and READ"
                    )
                missing = sorted(set(self._span.partitions) - set(numbers))
                if missing:
                    raise ValueError(
                        f"topic {topic} has partitions 0 to {max(numbers)}, and no {missing[0]}"
                    )
                self._consumer = await start_consumer(options, self._fetch_bytes, alone=True)
                chosen = sorted(self._span.partitions or numbers)
                await self._look_up([TopicPartition(topic, number) for number in chosen])
        except (KafkaError, TimeoutError) as error:
            raise ConnectionError(
                f"topic {topic} at {options.bootstrap} cannot be read ({words(error)}): check the rights "
                "of this client, or raise open_timeout_s"
            ) from None
        self._fault = ""

    async def _look_up(self, places: Sequence[TopicPartition]) -> None:
        consumer = self._consumer
        assert consumer is not None
        consumer.assign(places)
        first = await consumer.beginning_offsets(places)
        last = await consumer.end_offsets(places)
        await self._check_ends(consumer, last)
        begins = await self._offsets(consumer, self._span.begin, first, last)
        ends = await self._offsets(consumer, self._span.end, first, last)
        for place in places:
            begin, end = begins[place], min(ends[place], last[place])
            if isinstance(self._span.begin, int) and begin > last[place]:
                raise ValueError(
                    f"--from {begin} lies behind the end of partition {place.partition}, {last[place]}"
                )
            n_gone = max(0, min(first[place], end) - begin)
            begin = min(begin + n_gone, end)
            window = self._options.max_in_flight_per_partition
            self._parts[place] = _Part(begin, end, n_gone, window)
            consumer.seek(place, begin)

    async def _check_ends(
        self, consumer: AIOKafkaConsumer, told: dict[TopicPartition, int]
    ) -> None:
        """Raises `ConnectionError` for a broker whose told ends lie before records that it hands out (the
        packaged one counts batches): a replay would leave those records out, and say that all is done."""
        for place, end in told.items():
            consumer.seek(place, end)
        waiting = list(told)
        while waiting:
            await poll(consumer, *waiting, timeout_ms=_POLL_MS)
            waiting = [p for p in waiting if end_offset(consumer, p, self._options) is None]
        seen = {place: end_offset(consumer, place, self._options) or 0 for place in told}
        beyond = [place for place, end in told.items() if seen[place] > end]
        if not beyond:
            return
        again = await consumer.end_offsets(beyond)  # records may have come meanwhile
        if any(again[place] < seen[place] for place in beyond):
            raise ConnectionError(
                f"the broker at {self._options.bootstrap} tells ends of its partitions that lie before their "
                "last records, as the packaged one does: replay needs an Apache Kafka"
            )

    async def _offsets(
        self,
        consumer: AIOKafkaConsumer,
        point: Point,
        first: dict[TopicPartition, int],
        last: dict[TopicPartition, int],
    ) -> dict[TopicPartition, int]:
        if point == "start":
            return first
        if point == "end":
            return last
        if isinstance(point, datetime):
            when_ms = int(point.timestamp() * 1000)
            found = await consumer.offsets_for_times(dict.fromkeys(first, when_ms))
            return {p: last[p] if found[p] is None else found[p].offset for p in first}
        return dict.fromkeys(first, point)

    async def run(self) -> None:
        """See `actors.ports.Source`. Raises `KafkaError` when the log is cut under the replay."""
        backoff = Backoff(0.2, 5.0)
        while not self._closing:
            self._wake.clear()
            self._redeliver()
            try:
                consumer = self._consumer or await self._connect()
                await self._step(consumer)
            except OffsetOutOfRangeError:
                raise  # retention was faster: to go on elsewhere would leave records out silently
            except RecordTooLargeError as error:
                if self._fetch_bytes < _MAX_FETCH_BYTES:
                    self._fetch_bytes = min(_MAX_FETCH_BYTES, self._fetch_bytes * 2)
                    await self._disconnect()
                else:
                    place, offset = error.args[1:3]
                    reason = "the batch says a length that no fetch can hold"
                    self._take(place, [unreadable_record(place, offset, reason)])
            except (KafkaError, TimeoutError) as error:
                self._fault = words(error)
                log.warning("kafka_replay_interrupted", error=self._fault)
                await self._disconnect()
                await self._woken(backoff.next_s())
            else:
                backoff.reset()
                self._fault = ""

    async def _step(self, consumer: AIOKafkaConsumer) -> None:
        """One poll, or a wait."""
        count, ready = self._room()
        if ready:
            fetched = await poll(consumer, *ready, timeout_ms=_POLL_MS, max_records=count)
            for place, records in fetched.items():
                self._take(place, records)
        for place, part in self._parts.items():
            if place in ready:
                part.position = position_now(consumer, place) or part.position
                if part.position >= part.end:
                    consumer.pause(place)
            part.mark.follow(min(part.position, part.end))
        if all(part.next >= part.end for part in self._parts.values()):
            self._hand_off.end()
        if not ready:
            due = self._redelivery.next_due()
            await self._woken(None if due is None else max(0.0, due - self._clock.monotonic()))

    def _room(self) -> tuple[int, list[TopicPartition]]:
        """How many records may be taken, and of which partitions."""
        options, marks = self._options, [part.mark for part in self._parts.values()]
        room = options.max_in_flight - sum(mark.in_flight for mark in marks)
        full = sum(mark.held_bytes for mark in marks) >= options.max_in_flight_bytes
        if self._hand_off.paused or self._hand_off.closed or full or room <= 0:
            return 0, []
        unread = [place for place, part in self._parts.items() if part.position < part.end]
        count = min(options.max_receive, max(1, options.max_in_flight_per_partition // 4), room)
        return count, [place for place in unread if self._parts[place].mark.room >= count]

    def _take(self, place: TopicPartition, records: Sequence[ConsumerRecord]) -> None:
        part, now = self._parts[place], self._clock.monotonic()
        deliveries = []
        for record in records:
            if part.mark.last_handed_out < record.offset < part.end:
                part.mark.hand_out(record.offset)
                delivery = delivery_of(self, place, record, part.mark, now)
                part.mark.held_bytes += delivery.size_bytes
                deliveries.append(delivery)
        self._metrics.count("source_records_total", len(deliveries), transport=self.kind)
        self._hand_off.put(deliveries)

    def _redeliver(self) -> None:
        now = self._clock.monotonic()
        self._hand_off.put([one.again(now) for one in self._redelivery.pop_due(now)])

    async def _connect(self) -> AIOKafkaConsumer:
        """A new consumer, where the last one stood."""
        consumer = await start_consumer(self._options, self._fetch_bytes, alone=True)
        self._consumer = consumer
        consumer.assign(list(self._parts))
        for place, part in self._parts.items():
            consumer.seek(place, max(part.position, part.mark.last_handed_out + 1))
        return consumer

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, self._options.close_timeout_s)

    def stretches(self) -> list[Stretch]:
        """See `span.Replaying`."""
        return [
            Stretch(
                place.topic,
                place.partition,
                part.begin,
                part.end,
                part.next,
                part.n_settled,
                part.n_gone,
            )
            for place, part in self._parts.items()
        ]

    def on_settle(self, delivery: HeldDelivery) -> None:
        """See `delivery.Owner`."""
        place, offset = place_of(delivery)
        part = self._parts[place]
        if part.mark.settle(offset):
            part.n_settled += 1
            part.mark.held_bytes -= delivery.size_bytes
            self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        """See `delivery.Owner`."""
        self._metrics.count("source_released_total", transport=self.kind)
        if not self._hand_off.closed:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._wake.set()

    def stop_intake(self) -> None:
        """See `actors.ports.Source`."""
        self._hand_off.close()
        self._redelivery.clear()
        self._wake.set()

    async def flush(self, deadline: Deadline) -> None:
        """See `actors.ports.Source`. Nothing is committed."""

    async def aclose(self) -> None:
        """See `actors.ports.Source`."""
        self.stop_intake()
        self._closing = True
        self._wake.set()
        await self._disconnect()
        self._fault = "closed"

    def status(self) -> SourceStatus:
        """See `actors.ports.Source`."""
        return self._status(self._fault, sum(part.mark.in_flight for part in self._parts.values()))


async def open_replay(
    options: KafkaOptions, span: Span, *, clock: Clock, metrics: Metrics
) -> ReplaySource:
    """A connected source of the span. Raises `ConnectionError` and `ValueError`; nothing stays open then."""
    source = ReplaySource(options, span, clock=clock, metrics=metrics)
    try:
        await source.open()
    except BaseException:
        await source.aclose()
        raise
    return source

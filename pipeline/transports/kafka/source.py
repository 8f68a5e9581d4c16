"""Requests from Kafka topics: explicit offsets, a commit watermark, polling that never stops.

Who calls it: the registry; ingress receives from it.
What must stay true: auto-commit is off and only offsets below the lowest unsettled record are ever
committed; polling goes on while work runs, while paused and while draining, so the group never
evicts us for being busy; settles from before a rebalance are ignored; nothing of aiokafka's
commit-up-to semantics is visible outside.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec
import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import (
    ConsumerStoppedError,
    IllegalStateError,
    KafkaError,
    RecordTooLargeError,
)

from actors.backoff import Backoff
from actors.ports import Clock, Deadline, Metrics, SourceStatus
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.kafka.client_gaps import UnreadableBatch
from pipeline.transports.kafka.cluster import ClusterFacts, survey, words
from pipeline.transports.kafka.consumer import (
    broker_answers,
    end_offset,
    poll,
    position_now,
    records_wait,
    start_consumer,
    stop_consumer,
)
from pipeline.transports.kafka.deliveries import delivery_of, partition_fields, place_of
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.watermark import Watermarks
from pipeline.transports.source import BrokerSource

log = structlog.get_logger(__name__)

# Asking for a partition that is nobody's returns nothing, yet counts as a poll: fetched records of
# partitions without room stay buffered in the client instead of being fetched again after a pause.
_NOBODY = TopicPartition("embedstream.nobody", 0)
_POLL_MS = 100
_IDLE_POLL_S = 0.2
_PROBE_S = 3.0
_COMMIT_TIMEOUT_S = 5.0
_RETRY_FIRST_S = 0.2
_RETRY_LONGEST_S = 5.0
_MAX_FETCH_BYTES = 2**30


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Forwards rebalances of one consumer; those of a replaced consumer are ignored."""

    def __init__(self, source: KafkaSource, consumer: AIOKafkaConsumer) -> None:
        self._source = source
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        if self._source.consumer is self._consumer:
            await self._source.on_revoked(set(revoked))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        if self._source.consumer is self._consumer:
            self._source.on_assigned(set(assigned))


class KafkaSource(BrokerSource):
    """`actors.ports.Source` over one aiokafka consumer, replaced when it breaks."""

    kind = "kafka"

    def __init__(
        self,
        options: KafkaOptions,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self._marks: Watermarks[TopicPartition] = Watermarks(options.max_in_flight_per_partition)
        self._bytes: dict[TopicPartition, int] = {}
        self._fetch_bytes = options.max_partition_fetch_bytes
        self._committing = asyncio.Lock()
        self._draining: set[TopicPartition] = set()
        self._lost: dict[TopicPartition, int] = {}  # records in flight that will not settle here
        self._undecided: set[TopicPartition] = set()  # whose start is not known yet: not polled
        self._progress = asyncio.Event()  # a settle or release: a drain looks again
        self._alive = False
        self._fault = "not open"
        self._last_record_at = 0.0
        self.consumer: AIOKafkaConsumer | None = None
        self.facts: ClusterFacts | None = None

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Survey the cluster and connect; the group is joined when `run` starts."""
        if self.consumer is not None:
            return
        self.facts = await survey(self._options)
        try:
            self.consumer = await start_consumer(self._options, self._fetch_bytes)
        except (KafkaError, TimeoutError) as error:
            raise ConnectionError(
                f"no Kafka consumer for {self._options.bootstrap} ({words(error)}): "
                "check that the broker is up, or raise open_timeout_s"
            ) from None
        self._alive, self._fault = True, ""

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._poll_forever(), self._keep_house()

    def stop_intake(self) -> None:
        self._lose([*self._hand_off.close(), *self._redelivery.clear()])
        self._wake.set()

    async def flush(self, deadline: Deadline) -> None:
        while (before := self._marks.to_commit()) and not deadline.expired:
            done = await self._commit(min(deadline.remaining_s(), _COMMIT_TIMEOUT_S))
            if not done or self._marks.to_commit() == before:  # not assigned to us now
                pause_s = min(_RETRY_FIRST_S, deadline.remaining_s())
                await asyncio.sleep(pause_s)
        if left := self._marks.to_commit():
            log.warning("kafka_flush_incomplete", partitions=len(left))

    async def aclose(self) -> None:
        self.stop_intake()
        self._closing.set()
        self._progress.set()
        await self._end_loops(self._options.close_timeout_s)
        consumer = self.consumer
        if consumer is not None:
            await self._commit(min(_COMMIT_TIMEOUT_S, self._options.close_timeout_s))
            self.consumer = None
            await stop_consumer(consumer, self._options.close_timeout_s)
        self._alive, self._fault = False, "closed"

    def status(self) -> SourceStatus:
        detail = self._fault
        if not detail and not self._alive:
            detail = f"Kafka at {self._options.bootstrap} does not answer"
        if not detail and not self._marks.partitions:
            detail = "no partition assigned yet"
        buffered = len(self._hand_off)
        in_flight = self._marks.in_flight() - buffered - len(self._redelivery)
        in_flight -= sum(self._lost.values())
        return SourceStatus(
            self._alive and not self._fault, detail, in_flight=max(0, in_flight), buffered=buffered
        )

    # --- outcomes -------------------------------------------------------------------------------

    def on_settle(self, delivery: HeldDelivery) -> None:
        partition, offset = place_of(delivery)
        if self._marks.settle(partition, delivery.epoch, offset):
            self._bytes[partition] -= delivery.size_bytes
            self._wake.set()
            self._progress.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        partition, offset = place_of(delivery)
        if not self._marks.holds(partition, delivery.epoch, offset):
            return
        self._metrics.count("source_released_total", transport="kafka")
        if partition in self._draining or self._hand_off.closed:
            self._lose([delivery])
        else:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._tick.set()
        self._progress.set()

    # --- polling --------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while not self._closing.is_set():
            try:
                if self.consumer is None:
                    self.consumer = await start_consumer(self._options, self._fetch_bytes)
                consumer = self.consumer
                if not consumer.subscription():
                    consumer.subscribe(
                        topics=list(self._options.topics), listener=_Listener(self, consumer)
                    )
                await self._poll_once(consumer)
            except RecordTooLargeError as error:
                if self._fetch_bytes < _MAX_FETCH_BYTES:
                    self._fetch_bytes = min(_MAX_FETCH_BYTES, self._fetch_bytes * 2)
                    await self._replace(
                        f"a record exceeds the fetch size, now {self._fetch_bytes} bytes"
                    )
                else:  # no broker takes one that large: its length is damaged
                    self._hand_out_unreadable(*error.args[1:3])
            except ConsumerStoppedError:
                continue  # replaced or closed by the other task
            except (KafkaError, TimeoutError) as error:
                await self._replace(words(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._closing.wait()
            else:
                backoff.reset()
                self._fault = ""

    async def _poll_once(self, consumer: AIOKafkaConsumer) -> None:
        self._wake.clear()
        count = self._chunk()
        ready = [
            partition
            for partition in (self._marks.partitions if count else ())
            if self._marks[partition].room >= count and partition not in self._undecided
        ]
        if not ready:
            await poll(consumer, _NOBODY, timeout_ms=0)
            idle_s = min(_IDLE_POLL_S, self._options.max_poll_interval_ms / 4000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._wake.wait()
            return
        fetched = await poll(consumer, *ready, timeout_ms=_POLL_MS, max_records=count)
        if self.consumer is not consumer:
            return  # replaced meanwhile: the new one reads these records again
        for partition, records in fetched.items():
            self._hand_out(partition, records)

    def _chunk(self) -> int:
        """Records that one poll may take; 0 while nothing may be taken."""
        options = self._options
        if self._hand_off.paused or self._hand_off.closed or self._draining:
            return 0
        if sum(self._bytes.values()) >= options.max_in_flight_bytes:
            return 0
        room = max(0, options.max_in_flight - self._marks.in_flight())
        # A quarter of the window: a partition takes part again once that much of it is free.
        return min(options.max_receive, max(1, options.max_in_flight_per_partition // 4), room)

    def _hand_out(self, partition: TopicPartition, records: list[ConsumerRecord]) -> None:
        now = self._clock.monotonic()
        self._last_record_at = now
        if partition not in self._marks:  # fetched before the listener was told
            self.on_assigned({partition})
        deliveries = []
        for record in records:
            mark = self._marks[partition]
            if record.offset <= mark.last_handed_out:
                log.warning(
                    "kafka_log_restarted", **partition_fields(partition), offset=record.offset
                )
                self._forget({partition})
                self._marks.assign([partition])
                self._bytes[partition] = 0
                mark = self._marks[partition]
            mark.hand_out(record.offset)
            delivery = delivery_of(self, partition, record, mark.epoch, now)
            if delivery.damage is not None:
                self._metrics.count("source_unreadable_batches_total", transport="kafka")
                log.error("kafka_batch_unreadable", reason=delivery.damage, **delivery.origin)
            self._bytes[partition] += delivery.size_bytes
            deliveries.append(delivery)
        self._metrics.count("source_records_total", len(records), transport="kafka")
        self._hand_off.put(deliveries)
        if self._hand_off.closed:  # they came while intake was being stopped
            self._lose(deliveries)

    def _hand_out_unreadable(self, partition: TopicPartition, offset: int) -> None:
        """aiokafka has stepped over the offset; what stands there is longer than any fetch."""
        value = UnreadableBatch(b"", offset, "the batch says a length that no fetch can hold")
        record = ConsumerRecord(
            partition.topic, partition.partition, offset, -1, -1, None, value, None, -1, 0, ()
        )  # fmt: skip
        self._hand_out(partition, [record])

    # --- rebalances -----------------------------------------------------------------------------

    def on_assigned(self, partitions: set[TopicPartition]) -> None:
        """Called by the listener once per rebalance, after `on_revoked` forgot the old ones."""
        fresh = {partition for partition in partitions if partition not in self._marks}
        self._marks.assign(fresh)
        self._bytes.update(dict.fromkeys(fresh, 0))
        if self.facts is not None:
            self._undecided.update(p for p in fresh if self.facts.appeared_since(*p))
            self._tick.set()
        self._last_record_at = self._clock.monotonic()
        self._metrics.gauge("source_partitions", len(self._marks.partitions), transport="kafka")
        log.info("kafka_assigned", partitions=len(partitions), group=self._options.group)
        self._wake.set()

    async def on_revoked(self, partitions: set[TopicPartition]) -> None:
        """Called by the listener before the group moves on: finish, commit, give up the rest."""
        ours = {partition for partition in partitions if partition in self._marks}
        if not ours:
            return
        consumer = self.consumer
        self._draining = ours
        try:
            self._lose(self._hand_off.discard(lambda held: place_of(held)[0] in ours))
            self._lose(self._redelivery.discard(lambda held: place_of(held)[0] in ours))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.drain_budget_s):
                    while self._unfinished(ours) > 0 and not self._closing.is_set():
                        self._progress.clear()
                        await self._progress.wait()
            unfinished = self._unfinished(ours)
            await self._commit(_COMMIT_TIMEOUT_S)
        finally:
            self._draining = set()
            if self.consumer is consumer:
                self._forget(ours)
        if unfinished > 0:
            log.warning("kafka_revoked_in_flight", records=unfinished, partitions=len(ours))
            self._metrics.count("source_dropped_total", unfinished, transport="kafka")

    def _unfinished(self, partitions: set[TopicPartition]) -> int:
        """Records received and not settled, of partitions that are being revoked."""
        lost = sum(self._lost.get(partition, 0) for partition in partitions)
        return self._marks.in_flight(partitions) - lost

    def _lose(self, deliveries: Iterable[HeldDelivery]) -> None:
        """They stay unsettled: whoever has the partition next gets them."""
        for delivery in deliveries:
            partition, offset = place_of(delivery)
            if self._marks.holds(partition, delivery.epoch, offset):
                self._lost[partition] = self._lost.get(partition, 0) + 1

    def _forget(self, partitions: set[TopicPartition]) -> None:
        self._hand_off.discard(lambda held: place_of(held)[0] in partitions)
        self._redelivery.discard(lambda held: place_of(held)[0] in partitions)
        self._marks.revoke(partitions)
        for partition in partitions:
            self._bytes.pop(partition, None)
            self._lost.pop(partition, None)
            self._undecided.discard(partition)

    # --- housekeeping ---------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        next_commit = next_probe = self._clock.monotonic()
        while True:
            self._tick.clear()
            now = self._clock.monotonic()
            self._redeliver(now)
            if self._undecided:
                await self._decide_starts()
            if now >= next_commit:
                self._follow_positions()
                await self._commit(_COMMIT_TIMEOUT_S)
                next_commit = self._clock.monotonic() + self._options.commit_interval_ms / 1000
            if now >= next_probe:
                await self._probe(now)
                next_probe = self._clock.monotonic() + _PROBE_S
            due = min(next_commit, next_probe, self._redelivery.next_due() or next_probe)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                    await self._tick.wait()

    def _redeliver(self, now: float) -> None:
        for released in self._redelivery.pop_due(now):
            partition, offset = place_of(released)
            if self._marks.holds(partition, released.epoch, offset):
                self._hand_off.put([released.again(now)])

    async def _decide_starts(self) -> None:
        """Under `latest`, a partition that appeared while the group lived is read from its start."""
        consumer = self.consumer
        for partition in sorted(self._undecided):
            try:
                if consumer is not None and partition in consumer.assignment():
                    async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                        if await consumer.committed(partition) is None:
                            await consumer.seek_to_beginning(partition)
                            log.info("kafka_new_partition", **partition_fields(partition))
            except (KafkaError, TimeoutError, IllegalStateError):
                return  # asked again at the next tick
            self._undecided.discard(partition)
        self._wake.set()

    def _follow_positions(self) -> None:
        """Where nothing is unsettled, the commit follows the position: past aborted and control
        records, and from where an idle group began."""
        consumer = self.consumer
        for partition in self._marks.partitions:
            if consumer is not None and partition not in self._undecided:
                position = position_now(consumer, partition)
                if position is not None:
                    self._marks[partition].follow(position)

    async def _commit(self, bound_s: float) -> bool:
        """Commit what has moved. False when it did not happen; a later call repeats it."""
        async with self._committing:
            consumer = self.consumer
            if consumer is None:
                return False
            owned = consumer.assignment()
            offsets = {p: o for p, o in self._marks.to_commit().items() if p in owned}
            if not offsets:
                return True
            epochs = self._marks.epochs(offsets)
            try:
                async with asyncio.timeout(bound_s):
                    await consumer.commit({p: (offset, "") for p, offset in offsets.items()})
            except (KafkaError, TimeoutError) as error:
                self._metrics.count("source_commit_failures_total", transport="kafka")
                for partition, offset in offsets.items():
                    log.warning(
                        "kafka_commit_failed",
                        **partition_fields(partition),
                        offset=offset,
                        error=type(error).__name__,
                    )
                return False
            self._marks.mark_committed(offsets, epochs)
            return True

    async def _probe(self, now: float) -> None:
        """Is the broker there, and does the consumer still receive what waits?"""
        consumer = self.consumer
        alive = consumer is not None and await broker_answers(consumer)
        if alive != self._alive:
            log.warning("kafka_connection", connected=alive, bootstrap=self._options.bootstrap)
        self._metrics.gauge("source_connected", float(alive), transport="kafka")
        self._alive = alive
        self._report()
        idle_s = now - self._last_record_at
        if consumer is None or not alive or idle_s < self._options.watchdog_s or not self._chunk():
            return
        owned = [p for p in self._marks.partitions if p in consumer.assignment()]
        if await records_wait(consumer, owned):
            await self._replace(f"nothing received for {idle_s:.0f} s although records wait")
        self._last_record_at = self._clock.monotonic()

    def _report(self) -> None:
        self._follow_positions()
        for partition in self._marks.partitions:
            oldest = self._marks[partition].oldest_unsettled
            labels = {"topic": partition.topic, "partition": str(partition.partition)}
            if oldest is not None:
                self._metrics.gauge("source_oldest_unsettled_offset", oldest, **labels)
            consumer = self.consumer
            if consumer is not None and partition in consumer.assignment():
                end = end_offset(consumer, partition, self._options)
                done = self._marks[partition].committable
                if end is not None and done is not None:
                    self._metrics.gauge("source_lag_records", max(0, end - done), **labels)

    # --- the consumer object --------------------------------------------------------------------

    async def _replace(self, why: str) -> None:
        """Give the consumer up; the poll loop makes a new one. Work in flight will come again."""
        log.warning("kafka_consumer_replaced", why=why, in_flight=self._marks.in_flight())
        self._metrics.count("source_reconnects_total", transport="kafka")
        self._fault = why
        consumer = self.consumer
        if consumer is not None:
            await self._commit(1.0)
            if self.consumer is not consumer:
                return  # the other task was faster
            self.consumer = None
            self._forget(set(self._marks.partitions))
            self._progress.set()
            await stop_consumer(consumer, self._options.close_timeout_s)


async def open_source(options: KafkaOptions, *, clock: Clock, metrics: Metrics) -> KafkaSource:
    """A connected source. Raises `ConnectionError`; nothing stays open then."""
    source = KafkaSource(options, clock=clock, metrics=metrics)
    try:
        await source.open()
    except BaseException:
        await source.aclose()
        raise
    return source


async def reach(options: KafkaOptions) -> tuple[str, ...]:
    """Whether the cluster can be used; creates nothing. Raises `ConnectionError`."""
    return (await survey(msgspec.structs.replace(options, auto_create=False))).notices

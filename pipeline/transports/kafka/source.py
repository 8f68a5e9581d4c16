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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import ConsumerStoppedError, KafkaError, RecordTooLargeError

from actors.backoff import Backoff
from actors.ports import Clock, Deadline, Delivery, Metrics, SourceStatus, Withdraw
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.kafka.admin import words
from pipeline.transports.kafka.assignment import Assignment
from pipeline.transports.kafka.cluster import ClusterFacts, survey
from pipeline.transports.kafka.consumer import (
    Listener,
    broker_answers,
    is_member,
    poll,
    records_wait,
    start_consumer,
    step_back,
    stop_consumer,
    subscribe,
)
from pipeline.transports.kafka.deliveries import place_of, unreadable_record
from pipeline.transports.kafka.fencing import Fenced, has_namesake
from pipeline.transports.kafka.offsets import COMMIT_TIMEOUT_S, Offsets
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.window import Window
from pipeline.transports.source import BrokerSource, opened

log = structlog.get_logger(__name__)

# Asking for a partition that is nobody's returns nothing, yet counts as a poll: fetched records of
# partitions without room stay buffered in the client instead of being fetched again after a pause.
_NOBODY = TopicPartition("embedstream.nobody", 0)
_POLL_MS = 100
_IDLE_POLL_S = 0.2
_PROBE_S = 3.0
_RETRY_FIRST_S = 0.2
_RETRY_LONGEST_S = 5.0
_MAX_FETCH_BYTES = 2**30


class KafkaSource(BrokerSource):
    """`actors.ports.Source` over one aiokafka consumer, replaced when it breaks."""

    kind = "kafka"

    def __init__(
        self, options: KafkaOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self._assignment = Assignment(options, self._hand_off, self._redelivery, self._metrics)
        self._marks = self._assignment.marks
        self._fetch_bytes = options.max_partition_fetch_bytes
        self.offsets = Offsets(options, self._marks, self._metrics)
        self._window = Window(options, self._clock.monotonic())
        self._withdraw: Withdraw = lambda unwanted: 0
        self._sink_fault: Callable[[], str | None] = lambda: None
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

    def watch(self, sink_fault: Callable[[], str | None]) -> None:
        """Take nothing while replies cannot be written: it would be computed again and again."""
        self._sink_fault = sink_fault

    def withdraw_with(self, withdraw: Withdraw) -> None:
        """See `actors.ports.Source`."""
        self._withdraw = withdraw

    def is_withdrawn(self, delivery: HeldDelivery) -> bool:
        """Its partition is being revoked, or has been."""
        return not self.holds(delivery) or place_of(delivery)[0] in self._assignment.draining

    def holds(self, delivery: HeldDelivery) -> bool:
        """Its partition is ours since it was handed out."""
        return self._assignment.holds(delivery)

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        """See `actors.ports.Source`: the commit remembers it before the step begins."""
        self.offsets.note_attempts(deliveries, +1)
        await self._commit(COMMIT_TIMEOUT_S)

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        """See `actors.ports.Source`; the next commit says so."""
        self.offsets.note_attempts(deliveries, -1)

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._poll_forever(), self._keep_house()

    def stop_intake(self) -> None:
        self._assignment.lose([*self._hand_off.close(), *self._redelivery.clear()])
        self._wake.set()

    async def flush(self, deadline: Deadline) -> None:
        while (before := self._marks.to_commit()) and not deadline.expired:
            done = await self._commit(min(deadline.remaining_s(), COMMIT_TIMEOUT_S))
            if not done or self._marks.to_commit() == before:  # not assigned to us now
                pause_s = min(_RETRY_FIRST_S, deadline.remaining_s())
                await asyncio.sleep(pause_s)
        if left := self._marks.to_commit():
            log.warning("kafka_flush_incomplete", partitions=len(left))

    async def aclose(self) -> None:
        self.stop_intake()
        self._closing.set()
        self._assignment.progress()
        await self._end_loops(self._options.close_timeout_s)
        consumer = self.consumer
        if consumer is not None:
            bound_s = min(COMMIT_TIMEOUT_S, self._options.close_timeout_s)
            await self.offsets.commit(consumer, bound_s, clean=self._marks.partitions)
            self.consumer = None
            await stop_consumer(consumer, self._options.close_timeout_s)
        self._alive, self._fault = False, "closed"

    def status(self) -> SourceStatus:
        detail = self._fault or self._sink_fault() or ""
        able = self._alive and not detail
        if not (detail or self._alive):
            detail = f"Kafka at {self._options.bootstrap} does not answer"
        if not (detail or self._marks.partitions):
            detail = "no partition assigned yet"
        buffered = len(self._hand_off)
        in_flight = self._marks.in_flight() - buffered - len(self._redelivery)
        in_flight -= self._marks.lost()
        return SourceStatus(able, detail, in_flight=max(0, in_flight), buffered=buffered)

    # --- outcomes -------------------------------------------------------------------------------

    def on_settle(self, delivery: HeldDelivery) -> None:
        if self._assignment.settle(delivery):
            self._window.settled()
            self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        if not self._assignment.holds(delivery):
            return
        self._metrics.count("source_released_total", transport="kafka")
        if self.is_withdrawn(delivery) or self._hand_off.closed:
            self._assignment.lose([delivery])
        else:
            if self._sink_fault() is not None:
                delivery.attempt -= 1  # it waits for the operator: that is nobody's attempt
            self._redelivery.add(delivery, self._clock.monotonic())
        self._tick.set()
        self._assignment.progress()

    # --- polling --------------------------------------------------------------------------------

    async def _poll_forever(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while not self._closing.is_set():
            try:
                if self.consumer is None:
                    self.consumer = await start_consumer(self._options, self._fetch_bytes)
                consumer = self.consumer
                if has_namesake(consumer):
                    raise Fenced(self._options.group, self._options.group_instance_id)
                subscribe(consumer, self._options, Listener(self, consumer))
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
        ready = self._assignment.with_room(count) if count else []
        ready = [partition for partition in ready if partition not in self.offsets.unknown]
        if not ready:
            await poll(consumer, _NOBODY, timeout_ms=0)
            await self._woken(min(_IDLE_POLL_S, self._options.max_poll_interval_ms / 4000))
            return
        fetched = await poll(consumer, *ready, timeout_ms=_POLL_MS, max_records=count)
        if self.consumer is not consumer:
            return  # replaced meanwhile: the new one reads these records again
        spans = {
            partition: (records[0].offset, records[-1].offset)
            for partition, records in fetched.items()
            if records and partition in self._marks
        }
        epochs = self._marks.epochs(spans)
        self.offsets.between.update(spans)
        try:
            reserved = await self.offsets.reserve(consumer, spans)
            for partition, epoch in epochs.items():
                if partition not in self._marks or self._marks[partition].epoch != epoch:
                    continue  # revoked meanwhile: others read these records
                if reserved:
                    self._hand_out(partition, fetched[partition])
                else:
                    step_back(consumer, partition, spans[partition][0])
        finally:
            self.offsets.between.clear()

    def _chunk(self) -> int:
        """Records that one poll may take; 0 while nothing may be taken."""
        options = self._options
        if self._hand_off.paused or self._hand_off.closed or self._assignment.draining:
            return 0
        full = self._marks.held_bytes() >= options.max_in_flight_bytes
        if full or self._sink_fault() is not None:
            return 0
        room = max(0, self._window.size - self._marks.in_flight())
        # A quarter of the window: a partition takes part again once that much of it is free.
        return min(options.max_receive, max(1, options.max_in_flight_per_partition // 4), room)

    def _hand_out(self, partition: TopicPartition, records: list[ConsumerRecord]) -> None:
        self._last_record_at = now = self._clock.monotonic()
        deliveries = self._assignment.take(self, partition, records, now)
        self._hand_off.put(deliveries)
        if self._hand_off.closed:  # they came while intake was being stopped
            self._assignment.lose(deliveries)

    def _hand_out_unreadable(self, partition: TopicPartition, offset: int) -> None:
        """aiokafka has stepped over the offset; what stands there is longer than any fetch."""
        reason = "the batch says a length that no fetch can hold"
        record = unreadable_record(partition, offset, reason)
        self._hand_out(partition, [record])

    # --- rebalances -----------------------------------------------------------------------------

    def on_assigned(self, partitions: set[TopicPartition]) -> None:
        """Called by the listener once per rebalance, after `on_revoked` forgot the old ones."""
        fresh = {partition for partition in partitions if partition not in self._marks}
        self._marks.assign(fresh)
        self.offsets.unknown.update(fresh)
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
        assignment = self._assignment
        try:
            # Only what has begun is finished here; the rest is others' work now, not done twice.
            withdrawn = assignment.begin_drain(ours, self, self._withdraw)
            log.info("kafka_revoked", partitions=len(ours), withdrawn=withdrawn)
            # Put out of the group, nothing can be committed: others have begun with it already.
            member = consumer is None or is_member(consumer)
            unfinished = await assignment.drained(self._closing, wait=member)
            if consumer is not None:
                await self.offsets.commit(consumer, COMMIT_TIMEOUT_S, clean=ours)
        finally:
            assignment.draining = set()
            if self.consumer is consumer:
                self._forget(ours)
        if unfinished > 0:
            log.warning("kafka_revoked_in_flight", records=unfinished, partitions=len(ours))
            self._metrics.count("source_dropped_total", unfinished, transport="kafka")

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        self._assignment.forget(partitions)
        self.offsets.unknown.difference_update(partitions)

    # --- housekeeping ---------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        next_commit = next_probe = self._clock.monotonic()
        while True:
            self._tick.clear()
            now = self._clock.monotonic()
            self._redeliver(now)
            consumer, known = self.consumer, True
            if self.offsets.unknown and consumer is not None:
                known = await self.offsets.recall(consumer, self.facts)
                self._wake.set()
            if now >= next_commit:
                self._window.tick(now, busy=self._marks.in_flight() > 0)
                if consumer is not None:
                    self.offsets.follow(consumer)
                await self._commit(COMMIT_TIMEOUT_S)
                next_commit = self._clock.monotonic() + self._options.commit_interval_ms / 1000
            if now >= next_probe:
                await self._probe(now)
                next_probe = self._clock.monotonic() + _PROBE_S
            due = min(next_commit, next_probe, self._redelivery.next_due() or next_probe)
            due = due if known else min(due, now + _RETRY_FIRST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                    await self._tick.wait()

    def _redeliver(self, now: float) -> None:
        for released in self._redelivery.pop_due(now):
            if self._assignment.holds(released):
                self._hand_off.put([released.again(now)])

    async def _commit(self, bound_s: float) -> bool:
        """Commit what has moved. False when it did not happen; a later call repeats it."""
        consumer = self.consumer
        return consumer is not None and await self.offsets.commit(consumer, bound_s)

    async def _probe(self, now: float) -> None:
        """Is the broker there, and does the consumer still receive what waits?"""
        consumer = self.consumer
        alive = consumer is not None and await broker_answers(consumer)
        if alive != self._alive:
            log.warning("kafka_connection", connected=alive, bootstrap=self._options.bootstrap)
        self._metrics.gauge("source_connected", float(alive), transport="kafka")
        self._alive = alive
        self.offsets.report(consumer)
        idle_s = now - self._last_record_at
        if consumer is None or not alive or idle_s < self._options.watchdog_s or not self._chunk():
            return
        owned = [p for p in self._marks.partitions if p in consumer.assignment()]
        if await records_wait(consumer, owned):
            await self._replace(f"nothing received for {idle_s:.0f} s although records wait")
        self._last_record_at = self._clock.monotonic()

    # --- the consumer object --------------------------------------------------------------------

    async def _replace(self, why: str) -> None:
        """Give the consumer up; the poll loop makes a new one. Work in flight will come again."""
        log.warning("kafka_consumer_replaced", why=why, in_flight=self._marks.in_flight())
        self._metrics.count("source_reconnects_total", transport="kafka")
        self._fault = why
        consumer = self.consumer
        if consumer is not None:
            await self.offsets.commit(consumer, 1.0, clean=self._marks.partitions)
            if self.consumer is not consumer:
                return  # the other task was faster
            self.consumer = None
            self._forget(self._marks.partitions)
            self._assignment.progress()
            await stop_consumer(consumer, self._options.close_timeout_s)


async def open_source(options: KafkaOptions, *, clock: Clock, metrics: Metrics) -> KafkaSource:
    """A connected source. Raises `ConnectionError`; nothing stays open then."""
    return await opened(KafkaSource(options, clock=clock, metrics=metrics))

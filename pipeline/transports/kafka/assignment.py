"""The partitions that are ours, the records of them in our hands, and what happens when they go.

Who calls it: `source.KafkaSource`.
What must stay true: a revoke takes at most a fifth of the poll interval; what has begun is finished
in it, what only waited is others' work at once; a record that is given up stays unsettled, so that
whoever has the partition next gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import structlog
from aiokafka import ConsumerRecord, TopicPartition

from actors.ports import Delivery, Metrics, Withdraw
from pipeline.transports.delivery import HandOff, HeldDelivery, Owner, Redelivery
from pipeline.transports.kafka.deliveries import delivery_of, partition_fields, place_of
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.watermark import PartitionWatermark, Watermarks

_DRAIN_SHARE = 0.2
"""Of the poll interval may a revoke take, at most."""

log = structlog.get_logger(__name__)


class Assignment:
    """Watermarks of the partitions that are ours; `draining`: those being revoked now."""

    def __init__(
        self,
        options: KafkaOptions,
        hand_off: HandOff,
        redelivery: Redelivery,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._hand_off = hand_off
        self._redelivery = redelivery
        self._budget_s = min(
            options.drain_budget_s, _DRAIN_SHARE * options.max_poll_interval_ms / 1000
        )
        self._progress = asyncio.Event()
        self.marks: Watermarks[TopicPartition] = Watermarks(options.max_in_flight_per_partition)
        self.draining: set[TopicPartition] = set()

    def progress(self) -> None:
        """A settle, a release or an end: a drain looks again."""
        self._progress.set()

    def holds(self, delivery: HeldDelivery) -> bool:
        """Is it still in flight, under the assignment that it came with?"""
        partition, offset = place_of(delivery)
        return self.marks.holds(partition, delivery.epoch, offset)

    def with_room(self, count: int) -> list[TopicPartition]:
        """Partitions of which `count` more records may be handed out."""
        return [part for part in self.marks.partitions if self.marks[part].room >= count]

    def take(
        self,
        owner: Owner,
        partition: TopicPartition,
        records: Sequence[ConsumerRecord],
        now: float,
    ) -> list[HeldDelivery]:
        """Fetched records as deliveries, in flight from here on; without what was finished before."""
        deliveries = []
        for record in records:
            mark = self._mark_of(partition, record.offset)
            mark.hand_out(record.offset)
            if record.offset in mark.known.done:  # by us or by another
                mark.settle(record.offset)
                self._metrics.count("source_skipped_done_total", transport="kafka")
                continue
            delivery = delivery_of(owner, partition, record, mark, now)
            if delivery.damage is not None:
                self._metrics.count("source_unreadable_batches_total", transport="kafka")
                log.error("kafka_batch_unreadable", reason=delivery.damage, **delivery.origin)
            mark.held_bytes += delivery.size_bytes
            deliveries.append(delivery)
        self._metrics.count("source_records_total", len(records), transport="kafka")
        return deliveries

    def _mark_of(self, partition: TopicPartition, offset: int) -> PartitionWatermark:
        """Where `offset` is handed out; a log that begins again gets a new epoch."""
        if offset <= self.marks[partition].last_handed_out:
            log.warning("kafka_log_restarted", **partition_fields(partition), offset=offset)
            self.forget([partition])
            self.marks.assign([partition])
        return self.marks[partition]

    def settle(self, delivery: HeldDelivery) -> bool:
        """False when it changes nothing."""
        partition, offset = place_of(delivery)
        settled = self.marks.settle(partition, delivery.epoch, offset)
        if settled:
            self.marks[partition].held_bytes -= delivery.size_bytes
            self.progress()
        return settled

    def lose(self, deliveries: Iterable[HeldDelivery]) -> None:
        """They will not settle here."""
        for delivery in deliveries:
            if self.holds(delivery):
                self.marks[place_of(delivery)[0]].lost += 1

    def begin_drain(self, partitions: set[TopicPartition], owner: Owner, withdraw: Withdraw) -> int:
        """Give up what only waits; returns how many records of it were queued in the service."""
        self.draining = partitions
        self.lose(self._hand_off.discard(lambda held: place_of(held)[0] in partitions))
        self.lose(self._redelivery.discard(lambda held: place_of(held)[0] in partitions))

        def is_of(delivery: Delivery) -> bool:
            return (
                isinstance(delivery, HeldDelivery)
                and delivery.is_of(owner)
                and place_of(delivery)[0] in partitions
            )

        return withdraw(is_of)

    async def drained(self, closing: asyncio.Event, *, wait: bool) -> int:
        """Let what has begun finish within the budget; returns how many records did not settle."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._budget_s):
                while wait and self._unfinished() > 0 and not closing.is_set():
                    self._progress.clear()
                    await self._progress.wait()
        return self._unfinished()

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """They are no longer ours."""
        gone = set(partitions)
        self._hand_off.discard(lambda held: place_of(held)[0] in gone)
        self._redelivery.discard(lambda held: place_of(held)[0] in gone)
        self.marks.revoke(gone)

    def _unfinished(self) -> int:
        return self.marks.in_flight(self.draining) - self.marks.lost(self.draining)

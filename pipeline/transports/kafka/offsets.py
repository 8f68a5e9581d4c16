"""Committed offsets of the partitions that are ours: read at the start, written with a memory.

Who calls it: `source.KafkaSource` alone.
What must stay true: a record is handed out only after the broker knows that it may have been, so that
whoever comes after our death treats it with care; commits are explicit, one at a time, and never
pass unfinished work; one that fails is repeated by a later call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from actors.ports import Delivery, Metrics
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.kafka.cluster import ClusterFacts
from pipeline.transports.kafka.consumer import (
    commit_as_member,
    committed_now,
    end_offset,
    is_member,
    position_now,
)
from pipeline.transports.kafka.deliveries import partition_fields, place_of
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.progress import parse
from pipeline.transports.kafka.watermark import Watermarks

log = structlog.get_logger(__name__)

COMMIT_TIMEOUT_S = 5.0
_RESERVE_WINDOWS = 4
"""Windows that one commit reserves: fewer commits while reading fast, more records that the next
owner treats with care after a death."""


class Settled(NamedTuple):
    """Commits as they are once some deliveries have been settled; epochs and versions as of then."""

    commits: dict[TopicPartition, OffsetAndMetadata]
    epochs: dict[TopicPartition, int]
    versions: dict[TopicPartition, int]


class Offsets:
    """Commits of one source's partitions.

    unknown  partitions whose start is not known yet: they are not polled
    between  partitions whose fetched records are not handed out yet: their position is no progress
    """

    def __init__(
        self, options: KafkaOptions, marks: Watermarks[TopicPartition], metrics: Metrics
    ) -> None:
        self._options = options
        self._marks = marks
        self._metrics = metrics
        self._committing = asyncio.Lock()
        self.unknown: set[TopicPartition] = set()
        self.between: set[TopicPartition] = set()

    async def recall(self, consumer: AIOKafkaConsumer, facts: ClusterFacts | None) -> bool:
        """Learn where the partitions in `unknown` begin. False when the broker did not say."""
        wanted = [p for p in self.unknown if p in consumer.assignment() and p in self._marks]
        epochs = self._marks.epochs(wanted)
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                committed = await committed_now(consumer, wanted)
                for partition in wanted:
                    if partition not in self._marks:
                        continue  # revoked meanwhile
                    mark = self._marks[partition]
                    if mark.epoch != epochs[partition]:
                        continue
                    found = committed.get(partition)
                    if found is not None:
                        mark.recall(found.offset, parse(found.offset, found.metadata))
                    elif facts is not None and facts.appeared_since(*partition):
                        # Nobody chose to skip what a partition holds that came after the group.
                        await consumer.seek_to_beginning(partition)
                        log.info("kafka_new_partition", **partition_fields(partition))
                    self.unknown.discard(partition)
        except (KafkaError, TimeoutError, IllegalStateError):
            return False
        return True

    def follow(self, consumer: AIOKafkaConsumer) -> None:
        """Where nothing is unsettled, the commit follows the position: past aborted and control
        records, and from where an idle group began."""
        for partition in self._marks.partitions:
            if partition not in self.unknown and partition not in self.between:
                position = position_now(consumer, partition)
                if position is not None:
                    self._marks[partition].follow(position)

    async def reserve(
        self, consumer: AIOKafkaConsumer, spans: dict[TopicPartition, tuple[int, int]]
    ) -> bool:
        """Make durable that offsets of these spans (first, last) may be handed out."""
        if not spans.keys() <= consumer.assignment():
            return False
        short = False
        for partition, (first, last) in spans.items():
            mark = self._marks[partition]
            mark.begin_at(first)
            if last >= mark.reserved:
                mark.reserve(last + 1 + _RESERVE_WINDOWS * mark.window)
                short = True
        return not short or await self.commit(consumer, COMMIT_TIMEOUT_S)

    async def commit(
        self, consumer: AIOKafkaConsumer, bound_s: float, *, clean: Iterable[TopicPartition] = ()
    ) -> bool:
        """Commit what has moved. `clean`: partitions that we hand over without having died."""
        try:
            async with asyncio.timeout(bound_s):
                await self._committing.acquire()
        except TimeoutError:  # a transaction that does not end
            return False
        try:
            clean = set(clean)
            owned = consumer.assignment() | clean
            offsets = {p: o for p, o in self._marks.to_commit().items() if p in owned}
            offsets |= {
                p: o
                for p in clean
                if p in owned and p in self._marks
                if (o := self._marks[p].committable) is not None
            }
            if not offsets:
                return True
            if not is_member(consumer):
                return False
            epochs = self._marks.epochs(offsets)
            versions = {p: self._marks[p].version for p in offsets}
            records = {p: (o, self._marks[p].memory(clean=p in clean)) for p, o in offsets.items()}
            try:
                async with asyncio.timeout(bound_s):
                    await commit_as_member(consumer, records)
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
            self._marks.mark_committed(offsets, epochs, versions)
            return True
        finally:
            self._committing.release()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nothing else is committed meanwhile: it would stand over the offsets of a transaction."""
        async with self._committing:
            yield

    def with_settled(self, deliveries: Iterable[HeldDelivery], tag: str) -> Settled:
        """What a transaction commits that makes these durable; all of them are in flight."""
        offsets: dict[TopicPartition, list[int]] = {}
        for delivery in deliveries:
            partition, offset = place_of(delivery)
            offsets.setdefault(partition, []).append(offset)
        later = {p: self._marks[p].with_settled(found) for p, found in offsets.items()}
        return Settled(
            {
                p: OffsetAndMetadata(mark.committable, mark.memory(clean=False, tag=tag))
                for p, mark in later.items()
                if mark.committable is not None
            },
            self._marks.epochs(later),
            {p: mark.version for p, mark in later.items()},
        )

    def note_committed(self, settled: Settled) -> None:
        """The transaction is through, and its deliveries have been settled."""
        offsets = {partition: commit.offset for partition, commit in settled.commits.items()}
        self._marks.mark_committed(offsets, settled.epochs, settled.versions)

    def note_attempts(self, deliveries: Sequence[Delivery], more: int) -> None:
        """A step with these records begins (+1) or came back (-1)."""
        for delivery in deliveries:
            assert isinstance(delivery, HeldDelivery)
            partition, offset = place_of(delivery)
            if self._marks.holds(partition, delivery.epoch, offset):
                self._marks[partition].note_attempt(offset, more)

    def report(self, consumer: AIOKafkaConsumer | None) -> None:
        """Gauges of what is behind and what holds it up."""
        if consumer is not None:
            self.follow(consumer)
        for partition in self._marks.partitions:
            mark = self._marks[partition]
            labels = {"topic": partition.topic, "partition": str(partition.partition)}
            if mark.oldest_unsettled is not None:
                self._metrics.gauge(
                    "source_oldest_unsettled_offset", mark.oldest_unsettled, **labels
                )
            if consumer is not None and partition in consumer.assignment():
                end = end_offset(consumer, partition, self._options)
                if end is not None and mark.committable is not None:
                    lag = max(0, end - mark.committable)
                    self._metrics.gauge("source_lag_records", lag, **labels)

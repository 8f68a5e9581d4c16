"""The aiokafka consumer object: made, asked, and stopped in bounded time.

Who calls it: `kafka.KafkaSource` alone.
What must stay true: auto-commit is off; stopping returns within its bound even when the broker is
gone or a rebalance is pending (aiokafka's own `stop` does not).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from pipeline.transports.kafka import client_gaps as kafka_records
from pipeline.transports.kafka.admin import closed_in_time
from pipeline.transports.kafka.fencing import read_stable_offsets, watch_for_namesake
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.security import client_settings

log = structlog.get_logger(__name__)

_REJOIN_SLACK_MS = 2_000
_ASK_TIMEOUT_S = 3.0
_STUCK_POLL_S = 1.0
_CUT_TIMEOUT_S = 1.0


class Member(Protocol):
    """Whose consumer it is."""

    consumer: AIOKafkaConsumer | None

    async def on_revoked(self, partitions: set[TopicPartition]) -> None: ...
    def on_assigned(self, partitions: set[TopicPartition]) -> None: ...


class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Forwards rebalances of one consumer; those of a replaced consumer are ignored."""

    def __init__(self, member: Member, consumer: AIOKafkaConsumer) -> None:
        self._member = member
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        if self._member.consumer is self._consumer:
            await self._member.on_revoked(set(revoked))

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        if self._member.consumer is self._consumer:
            self._member.on_assigned(set(assigned))


async def start_consumer(
    options: KafkaOptions, fetch_bytes: int, *, alone: bool = False
) -> AIOKafkaConsumer:
    """A connected consumer without a subscription. Raises `KafkaError` or `TimeoutError`.

    alone: without a group, and never elsewhere than where it was sent.
    """
    kafka_records.install()
    consumer = AIOKafkaConsumer(
        **client_settings(options),
        group_id=None if alone else options.group,
        group_instance_id=None if alone else options.group_instance_id,
        enable_auto_commit=False,
        auto_offset_reset="none" if alone else options.auto_offset_reset,
        isolation_level=options.isolation_level,
        session_timeout_ms=options.session_timeout_ms,
        heartbeat_interval_ms=options.heartbeat_interval_ms,
        max_poll_interval_ms=options.max_poll_interval_ms,
        # Members may take the whole drain before they rejoin.
        rebalance_timeout_ms=max(
            options.session_timeout_ms, int(options.drain_budget_s * 1000) + _REJOIN_SLACK_MS
        ),
        fetch_max_wait_ms=options.fetch_max_wait_ms,
        fetch_max_bytes=max(options.fetch_max_bytes, fetch_bytes),
        max_partition_fetch_bytes=fetch_bytes,
    )
    try:
        async with asyncio.timeout(options.open_timeout_s):
            await consumer.start()
    except BaseException:
        await stop_consumer(consumer, options.close_timeout_s)
        raise
    if alone:
        return consumer
    read_stable_offsets(consumer)
    if options.group_instance_id is not None:
        watch_for_namesake(consumer, options.session_timeout_ms / 1000)
    return consumer


def subscribe(consumer: AIOKafkaConsumer, options: KafkaOptions, listener: Listener) -> None:
    """Join the group, once; nothing when that was done before."""
    state, client = consumer._subscription, consumer._client
    if state.subscription is not None or state.subscribed_pattern is not None:
        return
    if options.pattern is None:
        consumer.subscribe(topics=list(options.topics), listener=listener)
        return
    # It asks for all topics. Whenever aiokafka looks for the leader of one, it would go on to ask for
    # that one only, and take all others for deleted.
    client.add_topic = lambda topic: client.force_metadata_update()
    consumer.subscribe(pattern=options.whole_pattern, listener=listener)


async def commit_as_member(
    consumer: AIOKafkaConsumer, commits: dict[TopicPartition, tuple[int, str]]
) -> None:
    """`consumer.commit`, also of what is being revoked because a pattern matches another topic now.

    aiokafka's own takes its partitions for nobody's from the moment that it sees the topic.
    """
    offsets = {place: OffsetAndMetadata(*commit) for place, commit in commits.items()}
    await consumer._coordinator.commit_offsets(None, offsets)


async def poll(
    consumer: AIOKafkaConsumer,
    *partitions: TopicPartition,
    timeout_ms: int,
    max_records: int | None = None,
) -> dict[TopicPartition, list[ConsumerRecord]]:
    """`getmany`, but back after `_STUCK_POLL_S` when a rebalance keeps it waiting. Loses nothing."""
    subscription = consumer._subscription
    try:
        async with asyncio.timeout(timeout_ms / 1000 + _STUCK_POLL_S):
            return dict(
                await consumer.getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records)
            )
    except TimeoutError:
        return {}
    finally:
        # A cancelled getmany counts as polling for ever, which would hide a poll loop that stopped.
        if subscription._fetch_count > 0:
            subscription._fetch_count = 0
            subscription._last_fetch_ended = time.monotonic()


def position_now(consumer: AIOKafkaConsumer, partition: TopicPartition) -> int | None:
    """Offset of the next record that a poll returns; None while it is not known."""
    subscription = consumer._subscription.subscription
    assignment = None if subscription is None else subscription.assignment
    if assignment is None or not assignment.active or partition not in assignment.tps:
        return None
    state = assignment.state_value(partition)
    return int(state.position) if state.has_valid_position else None


async def committed_now(
    consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """The group's commits with their metadata, which aiokafka's own `committed` leaves out."""
    found = await consumer._coordinator.fetch_committed_offsets(list(partitions))
    return {partition: commit for partition, commit in found.items() if commit.offset >= 0}


def is_member(consumer: AIOKafkaConsumer) -> bool:
    """False after the group has put us out: brokers take the commit of a stranger while a group is
    empty, and ours would be an old one."""
    return consumer._coordinator is not None and bool(consumer._coordinator.generation >= 0)


def step_back(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> None:
    """Read again from `offset`; nothing when the partition is no longer ours."""
    if partition in consumer.assignment():
        consumer.seek(partition, offset)


def end_offset(
    consumer: AIOKafkaConsumer, partition: TopicPartition, options: KafkaOptions
) -> int | None:
    """Behind the last record that may be read now, as of the last fetch."""
    end: int | None = consumer.highwater(partition)
    if options.isolation_level == "read_committed":
        stable: int | None = consumer.last_stable_offset(partition)
        end = stable if stable is not None and stable >= 0 else end
    return end


async def broker_answers(consumer: AIOKafkaConsumer) -> bool:
    """True when a metadata request was answered. aiokafka hides lost connections otherwise."""
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return bool(await asyncio.shield(consumer._client.force_metadata_update()))
    except (KafkaError, TimeoutError):
        return False


async def records_wait(consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]) -> bool:
    """True when a partition holds records beyond our position, or when nobody can tell."""
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            ends = await consumer.end_offsets(partitions)
            for partition in partitions:
                if await consumer.position(partition) < ends[partition]:
                    return True
    except (KafkaError, TimeoutError):
        return True
    return False


async def stop_consumer(consumer: AIOKafkaConsumer, bound_s: float) -> None:
    """Leave the group and disconnect; after `bound_s` cut tasks and connections instead."""
    if await closed_in_time(consumer.stop(), bound_s):
        return
    log.warning("kafka_consumer_cut", after_s=bound_s)
    if consumer._coordinator is not None:
        for name in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task"):
            task = getattr(consumer._coordinator, name, None)
            if task is not None:
                task.cancel()
    for part in (consumer._fetcher, consumer._client):
        if part is not None:
            await closed_in_time(part.close(), _CUT_TIMEOUT_S)

"""Flushing a Kafka source without a broker."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition

from actors.ports import Deadline
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.source import KafkaSource
from pipeline.transports.registry import parse_url


class NothingAssigned:
    """A consumer between two assignments."""

    def assignment(self) -> set[TopicPartition]:
        return set()


async def test_flush_of_a_partition_that_is_not_assigned_now_leaves_the_loop_alive() -> None:
    """G02: settles that cannot be committed are waited for, not spun on."""
    options = parse_url("kafka://localhost:9092/t?group=g")
    assert isinstance(options, KafkaOptions)
    source, partition = KafkaSource(options), TopicPartition("t", 0)
    source.on_assigned({partition})
    mark = source._marks[partition]
    mark.hand_out(0)
    assert mark.settle(0)
    consumer: Any = NothingAssigned()
    source.consumer = consumer
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        await asyncio.sleep(0)
        await source.flush(Deadline(0.3))
        ticking.cancel()
    assert ticks > 10, "the event loop stood still"

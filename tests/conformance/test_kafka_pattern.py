"""Kafka only: request topics by pattern, those that appear later, and what is never read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.reach import reach
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.test_kafka_group import assigned, source_of
from tests.conformance.transport_suite import WAIT_S, collect, flushed, nothing_comes, running
from tests.support.killable import CountingMetrics
from tests.support.servers import ServerInfo, unique

pytestmark = pytest.mark.kafka


class Topics:
    """Topics that begin alike, replies and dead letters among them, and a pattern that matches all."""

    def __init__(self, harness: KafkaHarness) -> None:
        self.harness = harness
        self.prefix = unique("embedstream.pattern")
        self.pattern = re.escape(self.prefix) + r"\..*"
        self.replies, self.dead = f"{self.prefix}.replies", f"{self.prefix}.dead"

    async def make(self, name: str, partitions: int = 1) -> str:
        await self.harness.create_topic(f"{self.prefix}.{name}", partitions)
        return f"{self.prefix}.{name}"

    def options(self, **more: Any) -> KafkaOptions:
        given = {
            "topics": (),
            "pattern": self.pattern,
            "reply_topic": self.replies,
            "dead_letter_topic": self.dead,
            "metadata_max_age_ms": 300,
        }
        return self.harness.options(**given | more)

    async def send(self, topic: str, *bodies: bytes) -> None:
        producer = await self.harness.producer()
        async with asyncio.timeout(WAIT_S):
            while not await producer.partitions_for(topic):
                await producer.client.force_metadata_update()
        for body in bodies:
            await producer.send_and_wait(topic, body, partition=0)

    async def committed(self, topic: str) -> int | None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.harness.server.address,
            group_id=self.harness.group,
            enable_auto_commit=False,
        )
        place = TopicPartition(topic, 0)
        async with consumer:
            consumer.assign([place])
            found: int | None = await consumer.committed(place)
            return found


@pytest.fixture
async def topics(kafka_server: ServerInfo) -> AsyncIterator[Topics]:
    harness = KafkaHarness(kafka_server)
    yield Topics(harness)
    await harness.aclose()


async def test_all_that_match_are_read_and_answers_never(topics: Topics) -> None:
    """The whole name must match; replies and dead letters match, too, and are no requests."""
    a, b = await topics.make("a"), await topics.make("b", 3)
    await topics.harness.create_topic(f"x.{topics.prefix}.c", 1)
    await topics.send(f"x.{topics.prefix}.c", b"of others")
    await topics.send(a, b"1")
    await topics.send(b, b"2")
    async with running(topics.options()) as transport:
        await transport.sink.publish(topics.replies, "k", b"reply", {})
        await transport.sink.publish(topics.dead, "k", b"letter", {})
        assert {one.body for one in await collect(transport.source, 2)} == {b"1", b"2"}
        assert await nothing_comes(source_of(transport))
        assert len(source_of(transport)._marks.partitions) == 4
        for name in (a, f"{topics.prefix}.that-may-appear"):
            refusal = transport.sink.check_destination(name)
            assert refusal is not None and "requests are read" in refusal
        assert transport.sink.check_destination("embedstream.elsewhere") is None
        await flushed(transport.source)
        assert await topics.committed(a) == 1


async def test_a_topic_that_appears_is_read_from_its_start_and_repeats_nothing(
    topics: Topics,
) -> None:
    """K12, K38: under `latest` what a new topic holds before it is seen is read; the rebalance that
    brings it commits what was done, though aiokafka takes the partitions away first."""
    a = await topics.make("a")
    await topics.send(a, b"before the group")
    metrics = CountingMetrics()
    # Nothing but the rebalance itself commits.
    options = topics.options(auto_offset_reset="latest", commit_interval_ms=600_000)
    async with running(options, metrics) as transport:
        source = source_of(transport)
        await assigned(source, 1)
        async with asyncio.timeout(WAIT_S):
            while source.offsets.unknown or not source.consumer:
                await asyncio.sleep(0.01)
        await source.consumer.position(TopicPartition(a, 0))
        await topics.send(a, b"1", b"2")
        assert [one.body for one in await collect(source, 2)] == [b"1", b"2"]
        b = await topics.make("b")
        await topics.send(b, b"3", b"4")
        assert [one.body for one in await collect(source, 2)] == [b"3", b"4"]
        assert await topics.committed(a) == 3
        assert await nothing_comes(source)
        assert metrics.counts["source_records_total"] == 4
    # And one that appears while nobody runs.
    c = await topics.make("c")
    await topics.send(c, b"5")
    async with running(options) as transport:
        assert [one.body for one in await collect(transport.source, 1)] == [b"5"]
        assert await nothing_comes(source_of(transport))


async def test_what_is_in_a_forward_when_a_topic_appears_is_finished(topics: Topics) -> None:
    """E01: the rebalance waits for what has begun, commits it, and nothing comes twice."""
    a = await topics.make("a")
    await topics.send(a, *(b"%d" % i for i in range(5)))
    async with running(topics.options(drain_budget_s=30)) as transport:
        source = source_of(transport)
        held = await collect(source, 5, settle=False)
        b = await topics.make("b")
        await topics.send(b, b"new")
        async with asyncio.timeout(WAIT_S):
            while not source._assignment.draining:
                await asyncio.sleep(0.01)
        for delivery in held:
            delivery.settle()
        assert [one.body for one in await collect(source, 1)] == [b"new"]
        assert await topics.committed(a) == 5
        assert await nothing_comes(source)


@pytest.mark.real_kafka
async def test_a_topic_that_goes_takes_no_other_with_it(topics: Topics) -> None:
    """aiokafka would go on to ask for the one that is gone only, and forget the others."""
    a, b = await topics.make("a"), await topics.make("b")
    async with running(topics.options()) as transport:
        source = source_of(transport)
        await assigned(source, 2)
        await topics.send(a, b"1")
        assert [one.body for one in await collect(source, 1)] == [b"1"]
        admin = AIOKafkaAdminClient(bootstrap_servers=topics.harness.server.address)
        await admin.start()
        await admin.delete_topics([a])
        await admin.close()
        assert source.consumer is not None
        await source.consumer._client.add_topic(a)  # as it does when it looks for the leader
        await topics.send(b, b"2")
        seen: set[bytes | None] = set()  # the rebalance may come while it is in our hands
        async with asyncio.timeout(WAIT_S):
            while b"2" not in seen or len(source._marks.partitions) != 1:
                seen |= {one.body for one in await _settled(source)}
        await topics.make("c")
        await assigned(source, 2)
        await topics.send(f"{topics.prefix}.c", b"3")
        async with asyncio.timeout(WAIT_S):
            while b"3" not in seen:
                seen |= {one.body for one in await _settled(source)}


async def _settled(source: Any) -> list[Any]:
    """What comes within a moment."""
    try:
        async with asyncio.timeout(0.2):
            got = await source.receive()
    except TimeoutError:
        return []
    for delivery in got:
        delivery.settle()
    return list(got)


async def test_check_says_what_matches_now(topics: Topics) -> None:
    """A pattern that matches nothing yet is used as soon as something does, and said."""
    for name in (topics.replies, topics.dead):
        await topics.harness.create_topic(name, 1)
    (note,) = [one for one in await reach(topics.options()) if "pattern" in one]
    assert "no topic" in note and "metadata_max_age_ms (300)" in note
    async with running(topics.options()) as transport:
        a = await topics.make("a")
        await topics.send(a, b"1")
        assert [one.body for one in await collect(transport.source, 1)] == [b"1"]
    (note,) = [one for one in await reach(topics.options()) if "pattern" in one]
    assert note.endswith(f"matches now: {a}")


async def test_members_share_what_appears(topics: Topics) -> None:
    """Two members of one group: each partition of a new topic is one member's."""
    await topics.make("a", 2)
    async with running(topics.options()) as first, running(topics.options()) as second:
        sources = source_of(first), source_of(second)
        for source in sources:
            await assigned(source, 1)
        await topics.make("b", 4)
        async with asyncio.timeout(WAIT_S):
            while sum(len(one._marks.partitions) for one in sources) != 6:
                await asyncio.sleep(0.02)
        held = [set(one._marks.partitions) for one in sources]
        assert not held[0] & held[1]

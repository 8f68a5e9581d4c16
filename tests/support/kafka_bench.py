"""One test's topics on a Kafka broker, a producer, and everything that was answered.

Who calls it: fault and integration tests over Kafka.
What must stay true: ids are unique in a test, so that every one can be reconciled: answered, dead-lettered,
lost or answered twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.settings.load import Settings
from schemas.codec import decode_reply
from schemas.results import Reply
from tests.support.documents import route_settings
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.servers import unique

SESSION = "session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=20"


class Bench:
    """Topics of one test, a producer, and every reply read from the beginning."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.topic, self.replies = unique("embedstream.in"), unique("embedstream.out")
        self.dead_letters, self.group = unique("embedstream.dead"), unique("group")
        self.more = ""
        """More options of the source."""

    @property
    def source(self) -> str:
        return (
            f"kafka://{self.address}/{self.topic}?group={self.group}&reply_topic={self.replies}"
            f"&dead_letter_topic={self.dead_letters}&{SESSION}{self.more}"
        )

    def config(self, route: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Of a service process; `route`: more of its one route."""
        one = {"name": "k", "source": self.source, "lane": "bulk", **(route or {})}
        return {"routes": [one], **more}

    async def create(self, partitions: int, **configs: str) -> None:
        """The three topics; `configs` are of the reply topic."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        await admin.start()
        try:
            await admin.create_topics(
                [
                    NewTopic(self.replies, partitions, 1, topic_configs=configs),
                    NewTopic(self.topic, partitions, 1),
                    NewTopic(self.dead_letters, partitions, 1),
                ]
            )
        finally:
            await admin.close()

    async def produce(self, records: dict[str, Any], *, key: str | None = None) -> None:
        """Records by request id, each keyed by its id or all by `key`, in their order."""
        async with AIOKafkaProducer(bootstrap_servers=self.address, linger_ms=5) as producer:
            futures = [
                await producer.send(
                    self.topic,
                    msgpack.packb({"id": request_id, **record}),
                    key=(key or request_id).encode(),
                )
                for request_id, record in records.items()
            ]
            await asyncio.gather(*futures)

    async def produce_raw(self, bodies: Mapping[str, bytes | None]) -> None:
        """Bodies by record key."""
        async with AIOKafkaProducer(bootstrap_servers=self.address) as producer:
            for key, body in bodies.items():
                await producer.send_and_wait(self.topic, body, key=key.encode())

    @asynccontextmanager
    async def reading(self, topic: str, partitions: int) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.address,
            fetch_max_wait_ms=20,
            isolation_level="read_committed",
        )
        await consumer.start()
        try:
            parts = [TopicPartition(topic, number) for number in range(partitions)]
            consumer.assign(parts)
            await consumer.seek_to_beginning(*parts)
            yield consumer
        finally:
            await consumer.stop()


async def collect(
    consumer: AIOKafkaConsumer, wanted: set[str], seen: Counter[str], kept: dict[str, Reply]
) -> None:
    """Read until every wanted id has a reply; duplicates must say the same."""
    while not wanted <= set(seen):
        for records in (await consumer.getmany(timeout_ms=500)).values():
            for record in records:
                reply = decode_reply(record.value, dict(record.headers))
                if not isinstance(reply, Reply):  # an unreadable record's sender is told as well
                    assert reply.id not in wanted, reply
                    continue
                seen[reply.id] += 1
                first = kept.setdefault(reply.id, reply)
                assert first.items == reply.items, "answered twice, differently"


def check_vectors(kept: dict[str, Reply], records: dict[str, Any]) -> None:
    for request_id, record in records.items():
        vector = np.frombuffer(kept[request_id].items[0].embedding or b"", "<f4")
        np.testing.assert_array_equal(vector, fake_vector(fake_ids(record["input"])))


def requests(n: int) -> dict[str, Any]:
    return {f"r{i}": {"input": f"text number{i} of{i % 7}"} for i in range(n)}


async def collect_some(
    consumer: AIOKafkaConsumer, seen: Counter[str], kept: dict[str, Reply]
) -> None:
    for records in (await consumer.getmany(timeout_ms=200)).values():
        for record in records:
            reply = decode_reply(record.value, dict(record.headers))
            assert isinstance(reply, Reply)
            seen[reply.id] += 1
            kept.setdefault(reply.id, reply)


async def note_letters(consumer: AIOKafkaConsumer, found: set[str]) -> None:
    """Ids of the dead letters that came."""
    for records in (await consumer.getmany(timeout_ms=200)).values():
        found |= {record.key.decode() for record in records}


async def collect_replies(consumer: AIOKafkaConsumer, wanted: set[str], seen: Counter[str]) -> None:
    while not wanted <= set(seen):
        await collect_some_ids(consumer, seen)


async def collect_some_ids(consumer: AIOKafkaConsumer, seen: Counter[str]) -> None:
    for records in (await consumer.getmany(timeout_ms=200)).values():
        for record in records:
            seen[record.key.decode()] += 1


@asynccontextmanager
async def running(
    bench: Bench, route: dict[str, Any] | None = None, runner: FakeRunner | None = None
) -> AsyncIterator[App]:
    """The service in this process, with a fake model; stopped with a drain."""
    routes = tuple(map(route_settings, bench.config(route)["routes"]))
    app = App(Settings(routes=routes), runner_factories={"fake": lambda: runner or FakeRunner()})
    stop = StopSignal(10.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(stop))
        await app.ready.wait()
        try:
            yield app
        finally:
            stop.request("test over")

"""A plain aiokafka client beside the transport: produces requests, reads replies and commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from pipeline.transports.kafka.options import KafkaOptions
from tests.support.servers import ServerInfo, unique

FAST_GROUP = {"session_timeout_ms": 2000, "heartbeat_interval_ms": 200}
"""The packaged broker lets a group's first member wait for half of its session time-out."""


class KafkaHarness:
    """Unique topics and group on a shared broker. Close with `aclose`."""

    tombstones = True
    headers = True

    def __init__(self, server: ServerInfo, partitions: int = 3) -> None:
        self.server = server
        self.partitions = partitions
        self.topic = unique("embedstream.requests")
        self.reply_topic = unique("embedstream.replies")
        self.dead_letters = unique("embedstream.dead-letters")
        self.group = unique("group")
        self.bad_destinations = [
            self.topic,
            "other.topic",
            "embedstream.a b",
            "embedstream.a\n",
            "embedstream." + "x" * 250,
            "list:embedstream.x",
            "..",
            "",
        ]
        self._producer: AIOKafkaProducer | None = None

    def options(self, **overrides: Any) -> KafkaOptions:
        settings: dict[str, Any] = {
            "bootstrap": self.server.address,
            "topics": (self.topic,),
            "group": self.group,
            "reply_topic": self.reply_topic,
            "dead_letter_topic": self.dead_letters,
            "partitions": self.partitions,
            "drain_budget_s": 2.0,
            "fetch_max_wait_ms": 10,
            "commit_interval_ms": 50,
            "release_backoff_ms": 5,
            **FAST_GROUP,
            **overrides,
        }
        per_partition = settings.get("max_in_flight_per_partition", 1024)
        settings["max_in_flight_per_partition"] = min(
            per_partition, settings.get("max_in_flight", 4096)
        )
        return KafkaOptions(**settings)

    async def create_topic(self, topic: str, partitions: int, **configs: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.server.address)
        try:
            await admin.start()
            answer = await admin.create_topics(
                [NewTopic(topic, partitions, 1, topic_configs=configs)]
            )
            assert all(code in (0, 36) for _, code, *_ in answer.topic_errors), answer
        finally:
            await admin.close()

    async def producer(self) -> AIOKafkaProducer:
        if self._producer is None:
            await self.create_topic(self.topic, self.partitions)
            self._producer = AIOKafkaProducer(
                bootstrap_servers=self.server.address, acks="all", max_request_size=32 << 20
            )
            await self._producer.start()
        return self._producer

    async def produce(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        key: str | None = None,
        partition: int | None = None,
    ) -> None:
        producer = await self.producer()
        await producer.send_and_wait(
            self.topic,
            body,
            key=None if key is None else key.encode(),
            headers=list((headers or {}).items()),
            partition=partition,
        )

    def reply_destination(self) -> str:
        return unique("embedstream.replies")

    async def replies(self, destination: str, done: Callable[[list[bytes]], bool]) -> list[bytes]:
        return [one.value for one in await self._read(destination, lambda r: done(_values(r)))]

    async def reply_records(self, destination: str, count: int) -> list[ConsumerRecord]:
        """Whole records, once there are `count`."""
        return await self._read(destination, lambda found: len(found) >= count)

    async def _read(
        self, destination: str, done: Callable[[list[ConsumerRecord]], bool]
    ) -> list[ConsumerRecord]:
        consumer = AIOKafkaConsumer(
            destination,
            bootstrap_servers=self.server.address,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=10,
            max_partition_fetch_bytes=32 << 20,
        )
        found: list[ConsumerRecord] = []
        try:
            await consumer.start()
            while not done(found):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    found += records
        finally:
            await consumer.stop()
        return found

    async def committed(self) -> dict[int, int]:
        """Partition -> committed offset of the group; partitions without a commit are left out."""
        partitions = [TopicPartition(self.topic, p) for p in range(self.partitions)]
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.server.address, group_id=self.group, enable_auto_commit=False
        )
        try:
            await consumer.start()
            consumer.assign(partitions)
            found = {p.partition: await consumer.committed(p) for p in partitions}
            return {p: offset for p, offset in found.items() if offset is not None}
        finally:
            await consumer.stop()

    async def unsettled(self) -> int:
        committed = await self.committed()
        left = 0
        consumer = AIOKafkaConsumer(bootstrap_servers=self.server.address, fetch_max_wait_ms=10)
        try:
            await consumer.start()
            for partition in range(self.partitions):
                place = TopicPartition(self.topic, partition)
                left += (await consumer.end_offsets([place]))[place] - committed.get(partition, 0)
        finally:
            await consumer.stop()
        return max(0, left)

    async def aclose(self) -> None:
        if self._producer is not None:
            await self._producer.stop()


def _values(records: list[ConsumerRecord]) -> list[bytes]:
    return [one.value for one in records]

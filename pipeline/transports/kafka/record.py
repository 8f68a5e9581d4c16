"""A record on its way to a topic, and the partition that it belongs to.

Who calls it: `kafka/sink.py` and `kafka/transactions.py`.
What must stay true: records of one order key meet in one partition, where Kafka's own partitioner puts that key.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import DefaultPartitioner


class KafkaRecord:
    """What is published. `order_key`: unless empty it says which partition, instead of the key."""

    __slots__ = ("body", "headers", "key", "order_key")

    def __init__(
        self, key: bytes, body: bytes, headers: Mapping[str, bytes], order_key: bytes
    ) -> None:
        self.key = key
        self.body = body
        self.headers = list(headers.items())
        self.order_key = order_key

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)

    async def partition(self, producer: AIOKafkaProducer, topic: str) -> int | None:
        """None: the client's own choice, by the key."""
        if not self.order_key:
            return None
        return await partition_of(producer, topic, self.order_key)


async def partition_of(producer: AIOKafkaProducer, topic: str, key: bytes) -> int:
    """Where Kafka's own partitioner puts this key."""
    partitions = sorted(await producer.partitions_for(topic))
    return int(DefaultPartitioner()(key, partitions, partitions))

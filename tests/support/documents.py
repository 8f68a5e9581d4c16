"""Topics of documents for tests of indexing: produce, index, read back, and what must be there.

Who calls it: integration and fault tests of indexing.
What must stay true: what must be there is computed from the records alone, by other code than the
service's: the last record of each key, cut by words, embedded by the fake model's rule.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from actors.ports import NoMetrics
from pipeline.app import App
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.indexing.records import chunk_id
from pipeline.indexing.sinks.base import CollectionStatus
from pipeline.indexing.sinks.registry import open_collection
from pipeline.lifecycle import StopSignal
from pipeline.settings.load import RouteSettings, Settings
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_ids, fake_vector
from tests.support.servers import unique

SESSION = "session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=20"
CHUNK_WORDS = 8
DOCUMENT = {"id": "key", "text": "{title}\n\n{body?}", "metadata": ["lang"]}
CHUNK = {"max_tokens": CHUNK_WORDS, "by": "tokens"}

Record = tuple[str, dict[str, Any] | None]
Rows = dict[str, tuple[str, int, str, str, bytes]]


class Topic:
    """A topic of documents on one broker, and its dead letters."""

    def __init__(self, address: str, partitions: int = 3) -> None:
        self.address = address
        self.partitions = partitions
        self.name, self.dead_letters = unique("documents"), unique("documents.dead")
        self.group = unique("indexer")

    def source(self, group: str) -> str:
        """As a route's source."""
        return (
            f"kafka://{self.address}/{self.name}?group={group}"
            f"&dead_letter_topic={self.dead_letters}&{SESSION}"
        )

    def route(self, collection: str, group: str | None = None, **more: Any) -> dict[str, Any]:
        """As a `RouteSettings` in plain values; `group`: another than the topic's own."""
        return {
            "name": "docs",
            "source": self.source(group or self.group),
            "destination": collection,
            "document": DOCUMENT,
            "chunk": CHUNK,
            **more,
        }

    async def create(self) -> None:
        """Both topics."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        await admin.start()
        try:
            await admin.create_topics(
                [NewTopic(name, self.partitions, 1) for name in (self.name, self.dead_letters)]
            )
        finally:
            await admin.close()

    async def produce(self, records: Sequence[tuple[str, dict[str, Any] | bytes | None]]) -> None:
        """In order; None is a tombstone, bytes go as they are."""
        async with AIOKafkaProducer(bootstrap_servers=self.address, linger_ms=5) as producer:
            futures = []
            for key, value in records:
                body = json.dumps(value).encode() if isinstance(value, dict) else value
                futures.append(await producer.send(self.name, body, key=key.encode()))
            await asyncio.gather(*futures)

    async def read_dead_letters(self, n: int) -> list[Any]:
        """The first n of them."""
        return await self.read(self.dead_letters, n)

    async def read(self, topic: str, n: int) -> list[Any]:
        """The first n records of a topic beside it."""
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=self.address, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            return [await consumer.getone() for _ in range(n)]
        finally:
            await consumer.stop()

    async def committed_at_least(self, n: int, group: str) -> None:
        """Until the group has committed n records, over all partitions."""
        places = [TopicPartition(self.name, p) for p in range(self.partitions)]
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.address, group_id=group, enable_auto_commit=False
        )
        await consumer.start()
        try:
            async with asyncio.timeout(50):
                while sum([await consumer.committed(p) or 0 for p in places]) < n:
                    await asyncio.sleep(0.02)
        finally:
            await consumer.stop()


def words_of(document: Mapping[str, Any]) -> list[str]:
    """What the template of `DOCUMENT` makes of a document."""
    return f"{document['title']} {document.get('body', '')}".split()


def expected_rows(records: Sequence[Record]) -> Rows:
    """The rows that the last record of each key leaves."""
    last: dict[str, dict[str, Any] | None] = dict(records)
    rows: Rows = {}
    for key, document in last.items():
        if document is None:
            continue
        words = words_of(document)
        metadata = json.dumps({"lang": document["lang"]} if "lang" in document else {})
        for ordinal, start in enumerate(range(0, len(words), CHUNK_WORDS)):
            chunk = words[start : start + CHUNK_WORDS]
            vector = fake_vector(fake_ids(" ".join(chunk)))
            rows[chunk_id(key, ordinal)] = (
                key,
                ordinal,
                " ".join(chunk),
                metadata,
                vector.tobytes(),
            )
    return rows


async def stored_rows(url: str) -> Rows:
    """Everything in a collection, white space of texts made plain."""
    collection = open_collection(url)
    await collection.open_as_is()
    try:
        return {
            row.chunk_id: (
                row.document_id,
                row.ordinal,
                " ".join(row.text.split()),
                json.dumps(dict(row.metadata)),
                np.asarray(row.vector, np.float32).tobytes(),
            )
            async for row in collection.rows()
        }
    finally:
        await collection.aclose()


async def status_of(url: str) -> CollectionStatus:
    """As `index status` asks."""
    collection = open_collection(url)
    await collection.open_as_is()
    try:
        return await collection.status()
    finally:
        await collection.aclose()


def route_settings(route: Mapping[str, Any]) -> RouteSettings:
    """Plain values -> the record."""
    tables = {"document": DocumentOptions, "chunk": ChunkOptions}
    return RouteSettings(
        **{name: tables[name](**v) if name in tables else v for name, v in route.items()}
    )


@asynccontextmanager
async def indexing(
    *routes: Mapping[str, Any],
    runner: FakeRunner | None = None,
    metrics: RecordingMetrics | None = None,
) -> AsyncIterator[App]:
    """A service with these routes, stopped after the block; its drain settles what was taken."""
    used = runner or FakeRunner()
    app = App(
        Settings(routes=tuple(map(route_settings, routes))),
        metrics=metrics or NoMetrics(),
        runner_factories={"fake": lambda: used},
    )
    stop = StopSignal(20.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(stop))
        ready = group.create_task(app.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            yield app
        finally:
            stop.request("the test is over")


async def until_committed(topic: Topic, n: int, group: str | None = None) -> None:
    """Until the group, the topic's own by default, has committed n records."""
    await topic.committed_at_least(n, group or topic.group)

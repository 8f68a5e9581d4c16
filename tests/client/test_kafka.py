"""The client over Kafka: the packaged broker, and a real Apache Kafka where there is one."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pytest

from embedstream_client import AsyncClient, Client, NoReply, Unreachable
from embedstream_client.errors import RecordTooLarge
from pipeline.observe.metrics import PrometheusMetrics
from tests.support.client import embed_reply, held, service, until, waiting_for
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.servers import ServerInfo, kafka_ladder, unique

pytestmark = pytest.mark.kafka
TIMING = "session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=15"


@pytest.fixture(scope="module")
def kafka_info() -> Iterator[ServerInfo]:
    yield from kafka_ladder(packaged=True)


@pytest.fixture
def topics() -> tuple[str, str]:
    return unique("requests"), unique("embedstream.replies")


@pytest.fixture
def url(kafka_info: ServerInfo, topics: tuple[str, str]) -> str:
    return f"kafka://{kafka_info.address}/{topics[0]}?reply_topic={topics[1]}"


@pytest.fixture
def source(url: str, topics: tuple[str, str]) -> str:
    return f"{url}&group={topics[0]}&{TIMING}&partitions=3"


def expected(text: str) -> np.ndarray:
    return fake_vector(fake_ids(text))


async def test_calls_over_kafka(url: str, source: str) -> None:
    """D11: two clients read one reply topic; each passes over the other's replies."""
    async with (
        service(source),
        AsyncClient.from_url(url) as client,
        AsyncClient.from_url(url) as other,
    ):
        await client.ping()

        async def ask(one: AsyncClient, text: str) -> None:
            np.testing.assert_array_equal((await one.embed(text)).vector, expected(text))

        await asyncio.gather(
            *(ask(one, f"text {n}") for n in range(100) for one in (client, other))
        )
        assert client._open().calls.n_unknown > 0
        ranking = await client.rerank("q", ["a", "b c"])
        assert ranking.best.score == max(expected("q a")[0], expected("q b c")[0])
        found = [e async for e in client.embed_many((f"t {i}" for i in range(100)), batch_items=9)]
        for number, embedding in enumerate(found):
            np.testing.assert_array_equal(embedding.vector, expected(f"t {number}"))


async def test_the_blocking_client_over_kafka(url: str, source: str) -> None:
    async with service(source):
        with Client.from_url(url) as client:
            embedded = await asyncio.to_thread(client.embed, ["a", "b c"])
            np.testing.assert_array_equal(embedded[1].vector, expected("b c"))


async def test_a_cancelled_call_is_withdrawn_over_kafka(url: str, source: str) -> None:
    go = threading.Event()
    metrics = PrometheusMetrics()
    runner = partial(FakeRunner, before_forward=waiting_for(go), max_batch_tokens=2)
    async with (
        service(source, runner=runner, metrics=metrics) as app,
        AsyncClient.from_url(url) as client,
        asyncio.TaskGroup() as group,
    ):
        kept = [group.create_task(client.embed(f"kept {i}")) for i in range(3)]
        await until(lambda: held(app) == 3)
        gone = group.create_task(client.embed(["gone a", "gone b"]))
        await until(lambda: held(app) == 4)
        gone.cancel()
        await until(lambda: cancelled(metrics) == 1)
        go.set()
        for task in kept:
            await task


def cancelled(metrics: PrometheusMetrics) -> float:
    return sum(
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith("cancel_records_total")
        and sample.labels.get("outcome") == "cancelled"
    )


async def test_what_kafka_does_not_take_is_a_typed_error(url: str, source: str) -> None:
    async with service(source), AsyncClient.from_url(url) as client:
        with pytest.raises(RecordTooLarge) as caught:
            await client.embed(["x" * 300_000] * 4)
        assert caught.value.limit == 1024 * 1024 and (caught.value.given or 0) > 1_200_000


async def test_silence_over_kafka_says_what_to_look_at(
    url: str, topics: tuple[str, str], kafka_info: ServerInfo
) -> None:
    async with AsyncClient.from_url(url, timeout=20) as client:
        await client.ping()
        with pytest.raises(NoReply, match=f"a service reads {topics[0]}"):
            await client.embed("x", timeout=0.5)


async def test_a_cluster_out_of_reach_is_unreachable() -> None:
    async with AsyncClient.from_url("kafka://127.0.0.1:1", timeout=0.5) as client:
        with pytest.raises(NoReply, match="cannot be used"):
            await client.embed("x")
        with pytest.raises(Unreachable):
            await client.ping()


async def test_calls_in_flight_survive_a_new_connection(
    url: str, topics: tuple[str, str], kafka_info: ServerInfo
) -> None:
    """The reader ends by a fault; the link opens anew and sends what waits again, under the same id."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    requests = AIOKafkaConsumer(
        topics[0], bootstrap_servers=kafka_info.address, auto_offset_reset="earliest"
    )
    replies = AIOKafkaProducer(bootstrap_servers=kafka_info.address)
    async with requests, replies, AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        await client.ping()
        asking = group.create_task(client.embed("x"))
        first = await requests.getone()
        link = client._open().link
        assert link.consumer is not None  # type: ignore[attr-defined]
        await link.consumer.stop()  # type: ignore[attr-defined]
        second = await requests.getone()
        assert second.key == first.key and second.value == first.value
        record = msgspec.msgpack.encode({"id": first.key.decode(), **embed_reply([(0, 5.0)])})
        await replies.send_and_wait(topics[1], record, key=first.key)
        assert (await asking).vector.tobytes() == struct.pack("<f", 5.0)

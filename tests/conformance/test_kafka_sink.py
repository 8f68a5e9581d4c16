"""Kafka only: reply topics that are missing, forbidden or small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import MessageSizeTooLargeError

from actors.ports import PublishError, RecordTooLargeForBroker
from pipeline.local.kafka import ApacheKafka
from pipeline.transports.kafka.cluster import survey
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.sink import KafkaSink
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.transport_suite import WAIT_S, collect, nothing_comes, running
from tests.support.servers import ServerInfo, new_apache, start_now, unique

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka]


@pytest.fixture(scope="module")
def strict_apache() -> Iterator[ApacheKafka]:
    """A broker that makes no topic by itself."""
    server = new_apache(**{"auto.create.topics.enable": "false"})
    start_now(server)
    yield server
    server.close()


@pytest.fixture
async def harness(strict_apache: ApacheKafka) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(ServerInfo(strict_apache.address, "apache", strict_apache))
    yield harness
    await harness.aclose()


def sink_of(transport: Any) -> KafkaSink:
    assert isinstance(transport.sink, KafkaSink)
    return transport.sink


async def set_limit(harness: KafkaHarness, topic: str, max_bytes: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=harness.server.address)
    await admin.start()
    try:
        await admin.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": str(max_bytes)})]
        )
    finally:
        await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=harness.server.address) as producer:
        while True:  # the broker answers before it obeys
            try:
                await producer.send_and_wait(topic, b"p" * (max_bytes + 1000), key=b"probe")
            except MessageSizeTooLargeError:
                return


async def publish_all(sink: KafkaSink, topic: str, bodies: list[bytes]) -> list[Exception | None]:
    """As egress does: what may pass later is tried again."""

    async def one(number: int, body: bytes) -> Exception | None:
        for _ in range(20):
            try:
                await sink.publish(topic, f"k{number}", body, {})
            except PublishError as error:
                if not error.retryable:
                    return error
            else:
                return None
        return AssertionError("never passed")

    async with asyncio.timeout(WAIT_S):
        return list(await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies))))


async def test_small_replies_pass_beside_a_large_one_that_is_refused(
    harness: KafkaHarness,
) -> None:
    """K45: the topic's limit is lowered while we run: only what is too large alone is refused, and
    the refusal names the new limit."""
    async with running(harness.options(linger_ms=20, partitions=1)) as transport:
        sink = sink_of(transport)
        await sink.publish(harness.reply_topic, "first", b"x", {})
        await set_limit(harness, harness.reply_topic, 20_000)
        bodies = [b"s" * 3000 + b"%d" % i for i in range(40)]
        bodies[17] = b"L" * 60_000
        outcomes = await publish_all(sink, harness.reply_topic, bodies)
        refused = [i for i, outcome in enumerate(outcomes) if outcome is not None]
        assert refused == [17]
        error = outcomes[17]
        assert isinstance(error, RecordTooLargeForBroker)
        assert error.limit_bytes is not None
        assert error.limit_bytes < 20_000
        small = {body for i, body in enumerate(bodies) if i != 17}
        read = await harness.replies(harness.reply_topic, lambda found: small <= set(found))
        assert bodies[17] not in read


async def test_unknown_destinations_cost_only_their_sender(harness: KafkaHarness) -> None:
    """K42: hundreds of missing reply topics: each is refused for good, the client asks for none of
    them ever again, and good replies go on."""
    async with running(harness.options()) as transport:
        sink = sink_of(transport)
        looks = 0
        look = sink._topics._look

        async def counted(client: Any, topics: list[str]) -> Any:
            nonlocal looks
            looks += 1
            return await look(client, topics)

        sink._topics._look = counted  # type: ignore[method-assign]

        async def refused(number: int) -> None:
            with pytest.raises(PublishError) as caught:
                await sink.publish(f"embedstream.nope{number % 150}", "k", b"x", {})
            assert not caught.value.retryable
            assert "does not exist" in str(caught.value)

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for number in range(300):
                group.create_task(refused(number))
                group.create_task(sink.publish(harness.reply_topic, "k", b"%d" % number, {}))
        assert looks < 12
        producer = sink._producer
        assert producer is not None
        assert not any("nope" in topic for topic in producer.client._topics)
        assert sink.fault() is None


async def test_a_reply_topic_that_cannot_be_written_is_the_routes_health(
    harness: KafkaHarness,
) -> None:
    """K41: not ready, nothing is taken and nothing is given up; it goes on when the topic is there."""
    await harness.produce(b"before", partition=0)
    async with running(harness.options(auto_create=False)) as transport:
        (held,) = await collect(transport.source, 1, settle=False)
        for _ in range(3):
            with pytest.raises(PublishError) as caught:
                await transport.sink.publish(harness.reply_topic, "k", b"x", {})
            assert caught.value.retryable, "it only waits for the operator"
        status = transport.source.status()
        assert not status.connected
        assert harness.reply_topic in status.detail
        await asyncio.sleep(0.3)  # the poll that was under way is over
        await harness.produce(b"after", partition=0)
        assert await nothing_comes(transport.source)
        await harness.create_topic(harness.reply_topic, 1)
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await transport.sink.publish(harness.reply_topic, "k", b"x", {})
                    break
                except PublishError:
                    await asyncio.sleep(0.2)
        held.settle()
        assert transport.source.status().connected
        assert [one.body for one in await collect(transport.source, 1)] == [b"after"]


async def test_a_reply_to_with_a_smaller_limit_gets_its_own(harness: KafkaHarness) -> None:
    """K45: a topic that a request names: its limit is read when it refuses, others keep theirs."""
    small = unique("embedstream.small")
    await harness.create_topic(small, 1, **{"max.message.bytes": "5000"})
    async with running(harness.options()) as transport:
        outcomes = await publish_all(sink_of(transport), small, [b"x" * 9000, b"a", b"b"])
        assert isinstance(outcomes[0], RecordTooLargeForBroker)
        assert outcomes[1:] == [None, None]
        assert await publish_all(sink_of(transport), harness.reply_topic, [b"x" * 9000]) == [None]


async def notices(options: KafkaOptions, count: int) -> tuple[str, ...]:
    """Once there are so many: a broker tells what a new topic takes a moment after it has made it."""
    async with asyncio.timeout(WAIT_S):
        while len(found := (await survey(options)).notices) != count:
            await asyncio.sleep(0.1)
    return found


async def test_limits_that_would_cut_dead_letters_are_told_at_the_start(
    kafka_server: ServerInfo,
) -> None:
    """A request topic that takes more than the dead letters' topic, or than our producer."""
    if not kafka_server.real_kafka:
        pytest.skip("the packaged broker tells no limits")
    harness = KafkaHarness(kafka_server)
    assert (await survey(harness.options())).notices == ()
    await harness.create_topic(harness.topic + "b", 1, **{"max.message.bytes": "4000000"})
    wide = harness.options(topics=(harness.topic + "b",))
    [notice] = await notices(wide, count=1)
    assert "4000000" in notice and "max_request_size (1048576)" in notice
    assert f"max.message.bytes of {harness.dead_letters}" in notice
    dead = harness.dead_letters + "b"
    await harness.create_topic(dead, 1, **{"max.message.bytes": "4000000"})
    fits = harness.options(topics=wide.topics, dead_letter_topic=dead, max_request_size=4_000_000)
    assert await notices(fits, count=0) == ()

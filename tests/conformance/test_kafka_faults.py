"""Kafka only: brokers that die, restart empty, lie about their address, or miss topics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from actors.ports import NoMetrics, PublishError, RecordTooLargeForBroker, SystemClock
from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.server import LocalServerError, free_port
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.reach import reach
from pipeline.transports.registry import open_transport
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.test_kafka_group import assigned, source_of
from tests.conformance.transport_suite import WAIT_S, collect, flushed, running
from tests.support.killable import CountingMetrics, Proxy
from tests.support.servers import ServerInfo, new_apache, start_now, unique

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def strict_apache() -> Iterator[ApacheKafka]:
    """A broker of this module's own that makes no topic by itself."""
    server = new_apache(**{"auto.create.topics.enable": "false"})
    start_now(server)
    yield server
    server.close()


@pytest.fixture
async def own(strict_apache: ApacheKafka) -> AsyncIterator[KafkaHarness]:
    """On that broker, which runs again after a test that killed it."""
    await strict_apache.start()
    harness = KafkaHarness(ServerInfo(strict_apache.address, "apache", strict_apache))
    yield harness
    await strict_apache.start()
    await harness.aclose()


@pytest.fixture
async def harness(kafka_server: ServerInfo) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.aclose()


async def connected(source: Any, wanted: bool) -> None:
    async with asyncio.timeout(30):
        while source.status().connected is not wanted:
            await asyncio.sleep(0.02)


@pytest.mark.real_kafka
async def test_broker_killed_and_restarted_while_working(
    own: KafkaHarness, strict_apache: ApacheKafka
) -> None:
    """E11: SIGKILL while replies are published: retried until acknowledged, none lost; the source
    says that it is not connected, comes back by itself, and resumes at the last safe offset."""
    for i in range(20):
        await own.produce(b"%d" % i, partition=i % 3)
    async with running(own.options(request_timeout_ms=2000)) as transport:
        held = await collect(transport.source, 20, settle=False)
        for delivery in held[:5]:
            delivery.settle()
        await flushed(transport.source)

        async def reply(number: int) -> None:
            while True:
                try:
                    await transport.sink.publish(own.reply_topic, f"r{number}", b"%d" % number, {})
                    return
                except PublishError as error:
                    assert error.retryable, error

        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            await reply(0)
            strict_apache.kill()
            replying = [group.create_task(reply(i)) for i in range(1, 50)]
            await connected(transport.source, False)
            detail = transport.source.status().detail
            assert "does not answer" in detail or "no acknowledgement" in detail
            assert not any(task.done() for task in replying)
            await strict_apache.restart()
        await connected(transport.source, True)
        wanted = {b"%d" % i for i in range(50)}
        arrived = await own.replies(own.reply_topic, lambda found: wanted <= set(found))
        assert set(arrived) == wanted
        for delivery in held[5:]:
            delivery.settle()
        await own.produce(b"after", partition=0)
        seen = {d.body for d in await collect(transport.source, 1)}
        while b"after" not in seen:
            seen |= {d.body for d in await collect(transport.source, 1)}
        await flushed(transport.source)
        assert await own.unsettled() == 0


@pytest.mark.real_kafka
async def test_stop_is_bounded_when_the_broker_is_gone(
    own: KafkaHarness, strict_apache: ApacheKafka
) -> None:
    """G02: brokers gone: closing source and sink returns within its settings."""
    await own.produce(b"a", partition=0)
    options = own.options(close_timeout_s=1.0)
    transport = await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        (delivery,) = await collect(transport.source, 1)
        strict_apache.kill()
        publishing = group.create_task(own_publish(transport, own.reply_topic))
        await asyncio.sleep(0)
        delivery.settle()
        async with asyncio.timeout(10):
            await transport.source.aclose()
            await transport.sink.aclose()
            await publishing


async def own_publish(transport: Any, topic: str) -> None:
    with pytest.raises(PublishError):
        await transport.sink.publish(topic, "r", b"x", {})


async def test_stop_is_bounded_while_a_rebalance_is_pending(harness: KafkaHarness) -> None:
    """G02: stop during a rebalance that another member holds up by draining."""
    await harness.produce(b"a", partition=0)
    async with running(harness.options(drain_budget_s=10)) as slow:
        (held,) = await collect(slow.source, 1, settle=False)
        async with running(harness.options(drain_budget_s=10, close_timeout_s=0.5)) as joining:
            async with asyncio.timeout(WAIT_S):
                while not source_of(slow)._assignment.draining:
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                await joining.source.aclose()
        held.settle()


@pytest.mark.real_kafka
async def test_missing_topics(own: KafkaHarness) -> None:
    """E15: one of two topics is missing: the other flows, the missing one is consumed once it
    exists, and the missing reply topic is named at the start."""
    late = own.topic + ".late"
    await own.produce(b"first")
    options = own.options(
        topics=(own.topic, late),
        auto_create=False,
        metadata_max_age_ms=300,
        request_timeout_ms=5000,
    )
    async with running(options) as transport:
        source = source_of(transport)
        assert source.facts is not None
        notices = "\n".join(source.facts.notices)
        assert late in notices
        assert f"reply topic {own.reply_topic}" in notices
        assert "auto_create" in notices
        assert [d.body for d in await collect(source, 1)] == [b"first"]
        with pytest.raises(PublishError) as caught:
            await transport.sink.publish(own.reply_topic, "r", b"x", {})
        assert caught.value.retryable, "it waits for the operator"
        assert own.reply_topic in str(caught.value)
        await own.create_topic(late, 2)
        await own.create_topic(own.reply_topic, 1)
        await assigned(source, 5)
        producer = await own.producer()
        await producer.send_and_wait(late, b"late")
        assert [d.body for d in await collect(source, 1)] == [b"late"]
        async with asyncio.timeout(WAIT_S):
            while True:  # that it was missing is remembered for a few seconds
                try:
                    await transport.sink.publish(own.reply_topic, "r", b"x", {})
                    break
                except PublishError:
                    await asyncio.sleep(0.2)


@pytest.mark.real_kafka
async def test_start_creates_what_is_missing(own: KafkaHarness) -> None:
    """E15: with auto_create, request, reply and dead-letter topics exist after the start."""
    async with running(own.options()) as transport:
        await own.produce(b"a")
        await collect(transport.source, 1)
        await transport.sink.publish(own.reply_topic, "r", b"x", {})
        await transport.sink.publish(transport.sink.dead_letter_destination, "r", b"x", {})
        facts = source_of(transport).facts
        assert facts is not None
        assert facts.idempotent
        assert facts.notices == ()


@pytest.mark.real_kafka
async def test_record_above_the_fetch_size_is_handed_out(own: KafkaHarness) -> None:
    """E12: a record larger than every fetch setting is read, not a stuck partition."""
    await own.create_topic(own.topic, own.partitions, **{"max.message.bytes": str(16 << 20)})
    await own.produce(b"x" * (6 << 20), partition=0)
    await own.produce(b"next", partition=0)
    options = own.options(max_partition_fetch_bytes=1 << 20, fetch_max_bytes=1 << 20)
    async with running(options) as transport:
        got = await collect(transport.source, 2)
        assert [len(d.body or b"") for d in got] == [6 << 20, 4]


@pytest.mark.real_kafka
async def test_topic_limit_sets_the_reply_limit(own: KafkaHarness) -> None:
    """E12: max_record_bytes follows max.message.bytes of the reply topic; what fits passes."""
    await own.create_topic(own.reply_topic, 1, **{"max.message.bytes": "20000"})
    async with running(own.options()) as transport:
        limit = transport.sink.max_record_bytes
        assert limit is not None
        assert limit < 20_000
        body = b"x" * (limit - 10)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(
                *(transport.sink.publish(own.reply_topic, "k" * 256, body, {}) for _ in range(20))
            )


@pytest.mark.real_kafka
async def test_record_that_the_broker_refuses_stops_no_other(own: KafkaHarness) -> None:
    """E10, E12: a topic of a smaller limit than ours: the broker refuses; what follows passes."""
    small = unique("embedstream.small")
    await own.create_topic(small, 1, **{"max.message.bytes": "20000"})
    async with running(own.options()) as transport:
        for i in range(3):
            with pytest.raises(RecordTooLargeForBroker) as caught:
                await transport.sink.publish(small, "r", b"x" * 50_000, {})
            assert caught.value.given_bytes == 50_000
            for _ in range(3):
                try:
                    await transport.sink.publish(small, "r", b"%d" % i, {})
                    break
                except PublishError as error:
                    assert error.retryable
            else:
                pytest.fail("no publish passed after one that was refused")
        wanted = {b"0", b"1", b"2"}
        assert set(await own.replies(small, lambda found: wanted <= set(found))) == wanted


@pytest.fixture(scope="module")
def guarded_apache() -> Iterator[ApacheKafka]:
    """A broker with a second listener that asks for a login, and rights that are given one by one."""
    port, login_port = free_port(), free_port()
    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    server = new_apache(
        port=port,
        **{
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{login_port}",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{jaas} user_alice="s3cret";',
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "allow.everyone.if.no.acl.found": "false",
        },
    )
    controller = f"CONTROLLER://127.0.0.1:{server.controller_port}"
    server.properties["listeners"] = (
        f"PLAINTEXT://127.0.0.1:{port},{controller},SASL_PLAINTEXT://127.0.0.1:{login_port}"
    )
    start_now(server)
    yield server
    server.close()


def login_address(server: ApacheKafka) -> str:
    return server.properties["listeners"].rsplit("//", 1)[1]


def allow(server: ApacheKafka, *rights: tuple[ResourceType, str, AclOperation]) -> None:
    """Give alice rights on names that begin so."""
    admin = AdminClient({"bootstrap.servers": server.address})
    made = admin.create_acls(
        [
            AclBinding(
                kind, name, ResourcePatternType.PREFIXED, "User:alice", "*", operation,
                AclPermissionType.ALLOW,
            )
            for kind, name, operation in rights
        ]
    )  # fmt: skip
    for future in made.values():
        future.result(20)


ALICE = {
    "security_protocol": "SASL_PLAINTEXT",
    "sasl_username": "alice",
    "sasl_password": "s3cret",
}


@pytest.mark.real_kafka
async def test_login_and_minimal_rights(guarded_apache: ApacheKafka, tmp_path: Path) -> None:
    """K49: the password from a file works; a right that is missing is named, by `check` and before
    anything is taken; the rights that docs/delivery.md lists are enough for both."""
    address = login_address(guarded_apache)
    plain = KafkaHarness(ServerInfo(guarded_apache.address, "apache", guarded_apache))
    await plain.produce(b"a")
    for topic in (plain.reply_topic, plain.dead_letters):
        await plain.create_topic(topic, 1)
    harness = KafkaHarness(ServerInfo(address, "apache", guarded_apache))
    names = ("topic", "reply_topic", "dead_letters", "group")
    for name in names:
        setattr(harness, name, getattr(plain, name))
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    login = {**ALICE, "sasl_password_file": str(password), "auto_create": False}
    del login["sasl_password"]
    with pytest.raises(ConnectionError) as caught:
        await reach(harness.options(**login))
    for right in (f"READ on the topic {harness.topic}", f"READ on the group {harness.group}"):
        assert right in str(caught.value)
    for topic in (harness.reply_topic, harness.dead_letters):
        assert f"WRITE on the topic {topic}" in str(caught.value)
    await asyncio.to_thread(
        allow,
        guarded_apache,
        (ResourceType.TOPIC, harness.topic, AclOperation.READ),
        (ResourceType.TOPIC, harness.reply_topic, AclOperation.WRITE),
        (ResourceType.TOPIC, harness.dead_letters, AclOperation.WRITE),
    )
    with pytest.raises(ConnectionError) as caught:
        await open_transport(harness.options(**login), clock=SystemClock(), metrics=NoMetrics())
    assert "GroupAuthorizationFailed" in str(caught.value)
    assert f"READ on the group {harness.group}" in str(caught.value)
    await asyncio.to_thread(
        allow, guarded_apache, (ResourceType.GROUP, harness.group, AclOperation.READ)
    )
    assert await reach(harness.options(**login)) == ()
    async with running(harness.options(**login)) as transport:
        assert [d.body for d in await collect(transport.source, 1)] == [b"a"]
        await transport.sink.publish(harness.reply_topic, "k", b"r", {})
        await transport.sink.publish(transport.sink.dead_letter_destination, "k", b"r", {})
        await flushed(transport.source)
        with pytest.raises(PublishError) as refused:
            await transport.sink.publish("embedstream.of-others", "k", b"r", {})
        assert not refused.value.retryable
    await plain.aclose()


@pytest.mark.real_kafka
async def test_wrong_password(guarded_apache: ApacheKafka, tmp_path: Path) -> None:
    """It is named as the cause, without being shown; so is a password file that cannot be read."""
    address = login_address(guarded_apache)
    harness = KafkaHarness(ServerInfo(address, "apache", guarded_apache))
    for wrong in ({**ALICE, "sasl_password": "guess"}, {}):
        with pytest.raises(ConnectionError) as caught:
            options = harness.options(**wrong, request_timeout_ms=2000, open_timeout_s=6)
            await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
        message = str(caught.value)
        assert address in message
        assert "guess" not in message
        if wrong:
            assert "SaslAuthenticationFailed" in message
            assert "password" in message
    missing = {**ALICE, "sasl_password_file": str(tmp_path / "none")}
    del missing["sasl_password"]
    with pytest.raises(ConnectionError, match="sasl_password_file"):
        await open_transport(harness.options(**missing), clock=SystemClock(), metrics=NoMetrics())


class _Misadvertised(PackagedKafka):
    """Tells its clients an address where nobody listens."""

    wrong_port = 0

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        command, environment = super()._command()
        parts = list(command)
        parts[parts.index("--advertised-listener-url") + 1] = f"tcp://127.0.0.1:{self.wrong_port}"
        return parts, environment


async def test_unreachable_advertised_address_is_named() -> None:
    """G09: bootstrap answers, the advertised listener does not: the message names both."""
    try:
        server = _Misadvertised()
    except LocalServerError as error:
        pytest.skip(str(error))
    server.wrong_port = free_port()
    await server.start()
    try:
        options = KafkaOptions(bootstrap=server.address, open_timeout_s=5)
        with pytest.raises(ConnectionError) as caught:
            await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
    finally:
        await server.stop()
    message = str(caught.value)
    assert server.address in message
    assert f"127.0.0.1:{server.wrong_port}" in message
    assert "advertised.listeners" in message


async def test_unreachable_bootstrap_is_named() -> None:
    """G09: nothing listens at the bootstrap address: one line with address and remedy."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError) as caught:
        await open_transport(
            KafkaOptions(bootstrap=address, open_timeout_s=5),
            clock=SystemClock(),
            metrics=NoMetrics(),
        )
    message = str(caught.value)
    assert address in message
    assert "\n" not in message
    assert "check that the broker runs" in message


async def test_connection_cut_again_and_again() -> None:
    """E17: connections to the broker cut five times: every record still comes."""
    port = free_port()
    try:
        server = _Misadvertised(port=port)
    except LocalServerError as error:
        pytest.skip(str(error))
    async with Proxy("127.0.0.1", port) as proxy:
        server.wrong_port = proxy.port
        await server.start()
        behind = KafkaHarness(ServerInfo(f"127.0.0.1:{proxy.port}", "packaged", server))
        try:
            async with running(behind.options()) as transport:
                await assigned(source_of(transport), 3)
                for i in range(5):
                    proxy.cut()
                    await behind.produce(b"%d" % i)
                    seen: set[bytes | None] = set()
                    while b"%d" % i not in seen:
                        seen |= {d.body for d in await collect(transport.source, 1)}
                await connected(transport.source, True)
        finally:
            await behind.aclose()
            await server.stop()


async def test_broker_restarted_empty() -> None:
    """The in-memory packaged broker loses its log: offsets start again, new records still come."""
    try:
        server = PackagedKafka()
    except LocalServerError as error:
        pytest.skip(str(error))
    await server.start()
    harness = KafkaHarness(ServerInfo(server.address, "packaged", server))
    metrics = CountingMetrics()
    try:
        async with running(harness.options(watchdog_s=2), metrics) as transport:
            for i in range(5):
                await harness.produce(b"%d" % i, partition=0)
            await collect(transport.source, 5)
            await flushed(transport.source)
            await harness.aclose()
            await server.restart()
            again = KafkaHarness(ServerInfo(server.address, "packaged", server))
            again.topic = harness.topic
            await again.produce(b"new", partition=0)
            async with asyncio.timeout(40):
                assert [d.body for d in await collect(transport.source, 1)] == [b"new"]
            await again.aclose()
    finally:
        await server.stop()

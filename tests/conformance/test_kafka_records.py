"""Kafka only: what other clients, transactions and disks put into a partition."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from actors.ports import Delivery
from pipeline.local.kafka import ApacheKafka
from pipeline.transports.kafka.source import KafkaSource
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.transport_suite import WAIT_S, collect, flushed, nothing_comes, running
from tests.support.killable import CountingMetrics
from tests.support.servers import ServerInfo, apache_home
from tests.unit.pipeline.transports.kafka.test_client_gaps import CRC_AT, CRC_FROM, sealed

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka]


@pytest.fixture
async def harness(kafka_server: ServerInfo) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.aclose()


@asynccontextmanager
async def producing(harness: KafkaHarness, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
    await harness.create_topic(harness.topic, harness.partitions)
    async with AIOKafkaProducer(bootstrap_servers=harness.server.address, **options) as producer:
        yield producer


def bodies(deliveries: list[Delivery]) -> list[bytes | None]:
    return [one.body for one in deliveries]


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
async def test_every_codec_is_consumed_and_written(
    harness: KafkaHarness, codec: str | None
) -> None:
    """K01: after the plain install."""
    async with producing(harness, compression_type=codec) as producer:
        for i in range(10):
            await producer.send_and_wait(harness.topic, b"x" * 500 + b"%d" % i, partition=0)
    async with running(harness.options(compression=codec or "none")) as transport:
        assert len(await collect(transport.source, 10)) == 10
        for i in range(3):
            await transport.sink.publish(harness.reply_topic, "k", b"%d" % i * 500, {})
    read = await harness.replies(harness.reply_topic, lambda found: len(found) == 3)
    assert sorted(read) == [b"%d" % i * 500 for i in range(3)]


async def test_keys_are_kept_byte_for_byte(harness: KafkaHarness) -> None:
    """K03: two keys that are no text give two ids, and each reply carries its request's key."""
    keys = [(n).to_bytes(8, "big") for n in (200, 201)]
    async with producing(harness) as producer:
        for key in keys:
            await producer.send_and_wait(harness.topic, b"x", key=key, partition=0)
    async with running(harness.options()) as transport:
        got = await collect(transport.source, 2)
        assert len({one.default_id for one in got}) == 2
        for one in got:
            await transport.sink.publish(harness.reply_topic, one.default_id, b"r", {})
    records = await harness.reply_records(harness.reply_topic, 2)
    assert sorted(record.key for record in records) == keys


async def test_aborted_and_open_transactions_are_not_handed_out(harness: KafkaHarness) -> None:
    """K02: read_committed is the default, and the lag reaches 0 behind control records."""
    metrics = CountingMetrics()
    topic = harness.topic
    async with (
        producing(harness, transactional_id=harness.group + ".a") as producer,
        producing(harness, transactional_id=harness.group + ".b") as other,
    ):
        async with producer.transaction():
            await producer.send(topic, b"committed", partition=0)
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction():
                await producer.send_and_wait(topic, b"aborted", partition=0)
                raise ZeroDivisionError
        async with running(harness.options(), metrics) as transport:
            assert bodies(await collect(transport.source, 1)) == [b"committed"]
            source = transport.source
            assert isinstance(source, KafkaSource)

            def lag() -> float | None:
                source.offsets.report(source.consumer)
                return metrics.gauges.get("source_lag_records")

            await until(lambda: lag() == 0)
            await flushed(source)
            async with asyncio.timeout(WAIT_S):
                while (await harness.committed()).get(0) != 4:  # two records, two markers
                    await asyncio.sleep(0.05)
            async with other.transaction():
                await other.send_and_wait(topic, b"open", partition=0)
                assert await nothing_comes(source)
            assert bodies(await collect(source, 1)) == [b"open"]
    async with running(
        harness.options(isolation_level="read_uncommitted", group=harness.group + ".all")
    ) as transport:
        got = bodies(await collect(transport.source, 3))
        assert got == [b"committed", b"aborted", b"open"]


async def test_a_partition_that_appears_later_is_read_from_its_start(
    harness: KafkaHarness,
) -> None:
    """K12: under `latest`, records written to a new partition before it is seen are not lost."""
    async with producing(harness) as producer:
        await producer.send_and_wait(harness.topic, b"before the group", partition=0)
        options = harness.options(auto_offset_reset="latest", metadata_max_age_ms=300)
        async with running(options) as transport:
            await until(lambda: len(transport.source._marks.partitions) == 3)  # type: ignore[attr-defined]
            async with asyncio.timeout(WAIT_S):
                while len(await harness.committed()) < 3:
                    await asyncio.sleep(0.05)
            admin = AIOKafkaAdminClient(bootstrap_servers=harness.server.address)
            await admin.start()
            await admin.create_partitions({harness.topic: NewPartitions(5)})
            await admin.close()
            await producer.client.force_metadata_update()
            async with asyncio.timeout(WAIT_S):
                while len(await producer.partitions_for(harness.topic)) < 5:
                    await producer.client.force_metadata_update()
            for i in range(20):
                await producer.send_and_wait(harness.topic, b"%d" % i, partition=i % 5)
            # The rebalance that brings the partitions may come while some are in flight: those repeat.
            seen: set[int] = set()
            async with asyncio.timeout(WAIT_S):
                while len(seen) < 20:
                    got = await transport.source.receive()
                    seen |= {int(body or b"") for body in bodies(got)}
                    for delivery in got:
                        delivery.settle()
            assert seen == set(range(20))


async def test_latest_survives_a_restart_of_an_idle_group(harness: KafkaHarness) -> None:
    """K38: a group that has only waited remembers where it began."""
    async with producing(harness) as producer:
        await producer.send_and_wait(harness.topic, b"before the group", partition=0)
        async with running(harness.options(auto_offset_reset="latest")):
            async with asyncio.timeout(WAIT_S):
                while len(await harness.committed()) < 3:
                    await asyncio.sleep(0.05)
        for i in range(6):
            await producer.send_and_wait(harness.topic, b"%d" % i, partition=i % 3)
        async with running(harness.options(auto_offset_reset="latest")) as transport:
            got = bodies(await collect(transport.source, 6))
            assert sorted(int(body or b"") for body in got) == list(range(6))


def damage(log: Path) -> list[bytes]:
    """Every second batch of a segment broken in another way; returns the values that must survive."""
    data, at, number, kept = bytearray(log.read_bytes()), 0, 0, []
    while at < len(data):
        end = at + 12 + struct.unpack_from(">i", data, at + 8)[0]
        raw = data[at:end]
        if number % 2 == 0:
            kept.append(b"%d" % number)
        elif number % 8 == 1:
            raw[-1] ^= 0xFF  # checksum
        elif number % 8 == 3:
            raw[CRC_FROM + 1] |= 4
            raw[:] = sealed(raw)  # said to be zstd, and is not
        elif number % 8 == 5:
            raw[CRC_FROM + 1] |= 7
            raw[:] = sealed(raw)  # a codec that nobody has
        else:
            raw[61] ^= 2
            raw[:] = sealed(raw)  # a record that says another length than it has
        data[at:end] = raw
        at, number = end, number + 1
    assert CRC_AT < CRC_FROM
    log.write_bytes(data)
    return kept


async def test_batches_damaged_on_the_brokers_disk_cost_only_themselves(tmp_path: Path) -> None:
    """K01: everything else of the partition goes on; each bad one is handed out as damaged, once,
    with its offsets, and nothing comes again after a restart."""
    home = apache_home()
    if home is None:
        pytest.skip("needs the data folder of a local Apache Kafka: set KAFKA_HOME")
    server = ApacheKafka(home, data_dir=tmp_path / "kafka")
    await server.start()
    metrics = CountingMetrics()
    try:
        harness = KafkaHarness(ServerInfo(server.address, "apache", server), partitions=1)
        for i in range(17):
            await harness.produce(b"%d" % i, partition=0)
        await harness.aclose()
        await server.stop()
        (log,) = server.data_dir.rglob(f"{harness.topic}-0/*.log")
        kept = damage(log)
        await server.start()
        async with running(harness.options(), metrics) as transport:
            got = await collect(transport.source, 17)
            assert [one.body for one in got if one.damage is None] == kept
            bad = [one for one in got if one.damage is not None]
            assert [one.origin["offset"] for one in bad] == list(range(1, 17, 2))
            assert all(one.origin["last_offset"] == one.origin["offset"] for one in bad)
            assert metrics.counts["source_unreadable_batches_total"] == 8
            assert "source_reconnects_total" not in metrics.counts
            await flushed(transport.source)
            assert await harness.committed() == {0: 17}
    finally:
        server.close()

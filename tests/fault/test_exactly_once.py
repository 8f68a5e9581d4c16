"""`delivery = "exactly_once"` on a real Kafka: who reads committed records sees each reply once."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError

from tests.support.kafka_bench import Bench, collect_some_ids, requests, running
from tests.support.processes import service_process
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(90)]

EXACTLY_ONCE = {"delivery": "exactly_once"}
TIMING = "&transaction_timeout_ms=2000&transaction_interval_ms=50"


@pytest.fixture
def bench(kafka_server: ServerInfo) -> Bench:
    if not kafka_server.real_kafka:
        pytest.skip("the packaged broker has no transactions")
    bench = Bench(kafka_server.address)
    bench.more = TIMING
    return bench


async def test_kill_nine_twice_and_each_reply_is_seen_once(bench: Bench, tmp_path: Path) -> None:
    """E05: 300 requests, two SIGKILLs in mid-work; what an open transaction held is never seen."""
    await bench.create(3)
    records = requests(300)
    seen: Counter[str] = Counter()
    config = bench.config(EXACTLY_ONCE, forward_s=0.02)
    await bench.produce(records)
    async with bench.reading(bench.replies, 3) as consumer:
        for life, enough in enumerate((60, 160)):
            with service_process(config, tmp_path, f"life{life}") as service:
                while len(seen) < enough:
                    await collect_some_ids(consumer, seen)
                service.kill()
        with service_process(config, tmp_path, "last") as service:
            while len(seen) < len(records):
                await collect_some_ids(consumer, seen)
            service.signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait) == 0, service.log()
        await collect_some_ids(consumer, seen)
    assert seen == Counter(dict.fromkeys(records, 1))


async def test_a_zombie_publishes_nothing_that_its_successor_answers(
    bench: Bench, tmp_path: Path
) -> None:
    """E06: stopped beyond its session with results in hand; when it goes on, the group refuses what it
    wants to commit, and it joins again."""
    await bench.create(2)
    records = requests(200)
    seen: Counter[str] = Counter()
    config = bench.config(EXACTLY_ONCE, forward_s=0.02)
    await bench.produce(records)
    async with bench.reading(bench.replies, 2) as consumer:
        with service_process(config, tmp_path, "zombie") as zombie:
            while len(seen) < 40:
                await collect_some_ids(consumer, seen)
            zombie.signal(signal.SIGSTOP)
            with service_process(config, tmp_path, "successor"):
                while len(seen) < 150:
                    await collect_some_ids(consumer, seen)
                zombie.signal(signal.SIGCONT)
                while len(seen) < len(records):
                    await collect_some_ids(consumer, seen)
                more = {f"more{i}": {"input": f"text {i}"} for i in range(100)}
                await bench.produce(more)
                while len(seen) < len(records) + len(more):
                    await collect_some_ids(consumer, seen)
            zombie.signal(signal.SIGTERM)
            assert await asyncio.to_thread(zombie.wait) == 0, zombie.log()
        await collect_some_ids(consumer, seen)
    assert seen == Counter(dict.fromkeys([*records, *more], 1))


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
async def test_who_is_truly_fenced_ends(bench: Bench, tmp_path: Path, delivery: str) -> None:
    """Two processes under one group_instance_id: the newer one has the work, the older one exits with 4,
    instead of putting each other out of the group for ever."""
    bench.more += "&group_instance_id=one"
    await bench.create(2)
    seen: Counter[str] = Counter()
    records = {f"r{i}": {"input": "text"} for i in range(400)}
    config = bench.config({"delivery": delivery}, forward_s=0.02)
    async with bench.reading(bench.replies, 2) as consumer:
        with service_process(config, tmp_path, "first") as first:
            await bench.produce(records)
            while len(seen) < 20:
                await collect_some_ids(consumer, seen)
            with service_process(config, tmp_path, "second"):
                assert await asyncio.to_thread(first.wait) == 4, first.log()
                assert "give each process a name of its own" in first.log()
                while len(seen) < len(records):
                    await collect_some_ids(consumer, seen)
    if delivery == "exactly_once":
        assert seen == Counter(dict.fromkeys(records, 1))


@pytest.mark.parametrize("committed", [True, False])
async def test_a_transaction_whose_end_nobody_confirmed_is_looked_up(
    bench: Bench, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's own offsets say whether it came through: never published again, never lost."""
    await bench.create(1)
    commit, faults = AIOKafkaProducer.commit_transaction, [True] * (1 if committed else 2)

    async def in_doubt(producer: AIOKafkaProducer) -> None:
        if not faults:
            return await commit(producer)
        faults.pop()
        if committed:
            await commit(producer)
        raise KafkaConnectionError("the answer was lost")

    monkeypatch.setattr(AIOKafkaProducer, "commit_transaction", in_doubt)
    seen: Counter[str] = Counter()
    records = requests(40)
    async with bench.reading(bench.replies, 1) as consumer:
        async with running(bench, EXACTLY_ONCE):
            await bench.produce(records)
            while len(seen) < len(records):
                await collect_some_ids(consumer, seen)
        await collect_some_ids(consumer, seen)
    assert not faults
    assert seen == Counter(dict.fromkeys(records, 1))


async def test_dead_letters_and_split_replies_are_in_the_transaction_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted transaction leaves neither the letter nor half a reply; a reply topic that takes less than
    the client was told costs one transaction, once."""
    await bench.create(1, **{"max.message.bytes": "4000"})
    send_offsets, faults = AIOKafkaProducer.send_offsets_to_transaction, [True]

    async def fails_once(producer: AIOKafkaProducer, offsets: Any, group: str) -> None:
        if faults:
            faults.pop()
            raise KafkaConnectionError("cut off")
        await send_offsets(producer, offsets, group)

    monkeypatch.setattr(AIOKafkaProducer, "send_offsets_to_transaction", fails_once)
    seen: Counter[str] = Counter()
    letters: Counter[str] = Counter()
    async with (
        bench.reading(bench.replies, 1) as replies,
        bench.reading(bench.dead_letters, 1) as dead,
    ):
        async with running(bench, EXACTLY_ONCE):
            await bench.produce_raw({"unreadable": b"\xc1"})
            await bench.produce({"long": {"input": [f"text {i}" for i in range(200)]}})
            while seen["long"] < 3 or not letters:
                await collect_some_ids(replies, seen)
                await collect_some_ids(dead, letters)
        await collect_some_ids(replies, seen)
        await collect_some_ids(dead, letters)
    assert not faults and letters == Counter(unreadable=1) and seen["unreadable"] == 1
    print(seen)


async def test_versions_of_one_key_are_in_order_and_share_transactions(bench: Bench) -> None:
    await bench.create(3)
    versions = {f"v{i:03}": {"input": "word " * (1 + i * 7 % 40)} for i in range(200)}
    found: list[str] = []
    async with (
        bench.reading(bench.replies, 3) as consumer,
        running(bench, EXACTLY_ONCE | {"order": "key"}),
    ):
        await bench.produce(versions, key="document")
        while len(found) < len(versions):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                found += [record.key.decode() for record in records]
    assert found == list(versions)

"""SIGKILL and SIGTERM of a real service process on a real Kafka broker."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest
from aiokafka import ConsumerRecord

from schemas.results import Reply
from tests.support.kafka_bench import (
    Bench,
    check_vectors,
    collect,
    collect_replies,
    collect_some,
    collect_some_ids,
    note_letters,
    requests,
)
from tests.support.processes import ServiceProcess, service_process
from tests.support.servers import ServerInfo, apache_home, new_apache

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


async def test_kill_nine_with_a_thousand_in_flight_loses_nothing(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """E05, E09, E10: SIGKILL in mid-work; a second process answers the rest; 0 lost; duplicates agree."""
    bench = Bench(kafka_server.address)
    await bench.create(4)
    records = requests(1000)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    config = bench.config(forward_s=0.02)
    async with bench.reading(bench.replies, 4) as consumer:
        with service_process(config, tmp_path, "first") as first:
            await bench.produce(records)
            while len(seen) < 100:  # it is working, far from done
                await collect_some(consumer, seen, kept)
            first.kill()
        answered_before = len(seen)
        with service_process(config, tmp_path, "second"):
            await collect(consumer, set(records), seen, kept)
    assert answered_before < 1000
    check_vectors(kept, records)
    duplicates = sum(count - 1 for count in seen.values())
    print(
        f"kafka {kafka_server.kind}: lost 0, duplicates {duplicates}, before the kill {answered_before}"
    )
    assert duplicates < 1000


async def test_sigterm_drains_and_commits_everything(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """G01: SIGTERM with batches in flight: finish, publish, commit, exit 0; nothing comes again."""
    bench = Bench(kafka_server.address)
    await bench.create(2)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    first, second = requests(300), {f"s{i}": {"input": f"later text{i}"} for i in range(20)}
    async with bench.reading(bench.replies, 2) as consumer:
        with service_process(bench.config(forward_s=0.01), tmp_path, "first") as service:
            await bench.produce(first)
            while len(seen) < 20:
                await collect_some(consumer, seen, kept)
            service.signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait) == 0, service.log()
        with service_process(bench.config(), tmp_path, "second"):
            await bench.produce(second)
            await collect(consumer, set(first) | set(second), seen, kept)
    assert set(seen.values()) == {1}, "a drained service leaves nothing to be done twice"


async def test_a_drain_beyond_its_budget_exits_three_and_loses_nothing(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """G01: beyond the grace: exit status 3, the rest is answered by the next process."""
    bench = Bench(kafka_server.address)
    await bench.create(2)
    records = requests(60)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    slow = bench.config(forward_s=0.4, max_batch_tokens=8, drain_budget_s=0.5)
    async with bench.reading(bench.replies, 2) as consumer:
        with service_process(slow, tmp_path, "first") as service:
            await bench.produce(records)
            while not seen:
                await collect_some(consumer, seen, kept)
            service.signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait) == 3, service.log()
        with service_process(bench.config(), tmp_path, "second"):
            await collect(consumer, set(records), seen, kept)
    check_vectors(kept, records)


async def test_a_second_signal_exits_at_once(kafka_server: ServerInfo, tmp_path: Path) -> None:
    """G01: the second signal forces; the exit status says so."""
    bench = Bench(kafka_server.address)
    await bench.create(1)
    seen: Counter[str] = Counter()
    slow = bench.config(forward_s=1.0, max_batch_tokens=4, drain_budget_s=60)
    async with bench.reading(bench.replies, 1) as consumer:
        with service_process(slow, tmp_path) as service:
            await bench.produce(requests(40))
            while not seen:
                await collect_some(consumer, seen, {})
            service.signal(signal.SIGTERM)
            while "draining" not in service.log():
                await asyncio.sleep(0.01)
            service.signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait) == 128 + signal.SIGTERM, service.log()


async def test_poison_records_are_dead_lettered_and_the_partition_moves_on(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """E13, E14, D08: garbage, truncated msgpack, JSON array, pickle, empty, tombstone; then a good one."""
    bench = Bench(kafka_server.address)
    await bench.create(1)
    bad = [b"\xff\x00", b"\x82\xa2id", b"[1,2]", b"\x80\x04\x95K\x01.", b""]
    seen: Counter[str] = Counter()
    letters: list[ConsumerRecord] = []
    async with (
        bench.reading(bench.replies, 1) as replies,
        bench.reading(bench.dead_letters, 1) as dead,
    ):
        with service_process(bench.config(), tmp_path):
            await bench.produce_raw({f"bad{n}": body for n, body in enumerate(bad)})
            await bench.produce_raw({"tombstone": None})
            await bench.produce({"good": {"input": "still alive"}})
            await collect(replies, {"good"}, seen, {})
            while len(letters) < len(bad):
                for records in (await dead.getmany(timeout_ms=500)).values():
                    letters += records
    assert sorted(letter.value for letter in letters) == sorted(bad)
    headers = dict(letters[0].headers)
    assert headers["embedstream-kind"] == b"unprocessable"
    assert bench.topic.encode() in headers["embedstream-origin"]


async def test_a_forward_longer_than_poll_interval_and_session_is_done_once(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """E03, E04, J03: the model runs off the loop, polling and heartbeats go on: no rebalance, one reply."""
    bench = Bench(kafka_server.address)
    await bench.create(1)
    source = bench.source + "&max_poll_interval_ms=1500&drain_budget_s=1"
    config = {
        "routes": [{"name": "k", "source": source, "lane": "bulk"}],
        "forward_s": 4.5,  # three poll intervals, two sessions
        "max_batch_tokens": 512,
        "drain_budget_s": 1.4,
    }
    seen: Counter[str] = Counter()
    async with bench.reading(bench.replies, 1) as consumer:
        with service_process(config, tmp_path) as service:
            await bench.produce(requests(5))
            await collect(consumer, set(requests(5)), seen, {})
            assert service.log().count("kafka_assigned") == 1, service.log()
            assert "kafka_revoked" not in service.log()
    assert set(seen.values()) == {1}


@pytest.mark.real_kafka
async def test_broker_killed_while_replies_wait_loses_nothing(tmp_path: Path) -> None:
    """E11, G02: the broker dies with replies unpublished and comes back: every request answered."""
    if apache_home() is None:
        pytest.skip("a broker that keeps its data across SIGKILL needs KAFKA_HOME (Apache Kafka)")
    server = new_apache()
    await server.start()
    try:
        bench = Bench(server.address)
        await bench.create(2)
        seen: Counter[str] = Counter()
        records = requests(200)
        config = bench.config(forward_s=0.05)
        with service_process(config, tmp_path):
            async with bench.reading(bench.replies, 2) as consumer:
                await bench.produce(records)
                while len(seen) < 10:
                    await collect_some(consumer, seen, {})
            server.kill()
            await server.restart()
            async with bench.reading(bench.replies, 2) as consumer:
                seen.clear()
                await collect(consumer, set(records), seen, {})
    finally:
        server.close()


@pytest.mark.real_kafka
async def test_a_record_that_kills_the_process_is_given_up_and_its_neighbours_are_answered(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """E07, K39: the poison ends in a dead letter after its attempts; all beside it are answered.
    The count stands in the commit's metadata, so that it survives each death."""
    if not kafka_server.real_kafka:
        pytest.skip("the packaged broker keeps no commit metadata")
    bench = Bench(kafka_server.address)
    await bench.create(1)
    good = requests(32)
    everything = {**dict(list(good.items())[:16]), "poison": {"input": "poison"}, **good}
    config = bench.config(poison="poison", forward_s=0.002, max_batch_tokens=512)
    await bench.produce(everything)
    seen: Counter[str] = Counter()
    letters: set[str] = set()
    async with (
        bench.reading(bench.replies, 1) as replies,
        bench.reading(bench.dead_letters, 1) as dead,
    ):
        lives = 0
        while "poison" not in letters:
            lives += 1
            assert lives <= 8, "the poison is never given up"
            service = ServiceProcess(config, tmp_path, f"life{lives}")
            try:
                while service.process.poll() is None and "poison" not in letters:
                    await note_letters(dead, letters)
            finally:
                service.close()
        with service_process(config, tmp_path, "last"):
            await collect_replies(replies, set(good), seen)
    assert letters == {"poison"}
    print(f"given up after {lives} lives; duplicates {sum(seen.values()) - len(seen)}")


@pytest.mark.real_kafka
async def test_scale_out_under_a_backlog_repeats_no_more_than_what_was_in_a_forward(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """K48: 5,000 queued, two joins and one SIGTERM: what nobody has begun is handed over at once."""
    bench = Bench(kafka_server.address)
    await bench.create(6)
    records = requests(5000)
    seen: Counter[str] = Counter()
    config = bench.config(forward_s=0.005)
    await bench.produce(records)
    async with bench.reading(bench.replies, 6) as consumer:
        with service_process(config, tmp_path, "first") as first:
            while len(seen) < 200:
                await collect_some_ids(consumer, seen)
            with (
                service_process(config, tmp_path, "second"),
                service_process(config, tmp_path, "third"),
            ):
                while len(seen) < 1500:
                    await collect_some_ids(consumer, seen)
                first.signal(signal.SIGTERM)
                assert await asyncio.to_thread(first.wait) == 0, first.log()
                await collect_replies(consumer, set(records), seen)
    duplicates = sum(seen.values()) - len(seen)
    print(f"kafka: 5000 queued, two joins, one SIGTERM: lost 0, duplicates {duplicates}")
    # 64 tokens a batch, four a text: 16 requests in each of two batches, at each of three rebalances
    assert duplicates <= 3 * 2 * 16

"""Kafka only: rebalances, polling while work runs, windows, commits that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.errors import CommitFailedError, OutOfOrderSequenceNumber

from actors.ports import Deadline, Delivery, PublishError, RecordTooLargeForBroker
from pipeline.transports.kafka.sink import KafkaSink
from pipeline.transports.kafka.source import KafkaSource
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.transport_suite import QUIET_S, WAIT_S, collect, flushed, running
from tests.support.killable import CountingMetrics, consumer_process
from tests.support.servers import ServerInfo

pytestmark = pytest.mark.kafka


@pytest.fixture
async def harness(kafka_server: ServerInfo) -> AsyncIterator[KafkaHarness]:
    harness = KafkaHarness(kafka_server)
    yield harness
    await harness.aclose()


def source_of(transport: Any) -> KafkaSource:
    assert isinstance(transport.source, KafkaSource)
    return transport.source


async def assigned(source: KafkaSource, at_least: int) -> None:
    """Which member gets how many is decided by their random ids."""
    async with asyncio.timeout(WAIT_S):
        while len(source._marks.partitions) < at_least:
            await asyncio.sleep(0.01)


async def test_second_member_joins_while_work_is_in_flight(harness: KafkaHarness) -> None:
    """E01, E02, J04: the revoke waits for work in flight, commits it, and nothing comes twice."""
    for i in range(30):
        await harness.produce(b"%d" % i, partition=i % 3)
    async with running(harness.options(drain_budget_s=15)) as first:
        held = await collect(first.source, 30, settle=False)
        async with running(harness.options(drain_budget_s=15)) as second:
            async with asyncio.timeout(WAIT_S):
                while not source_of(first)._assignment.draining:
                    await asyncio.sleep(0.01)
            for delivery in held:
                delivery.settle()
            await assigned(source_of(second), 1)
            assert sum(harness_committed(await harness.committed())) == 30
            for i in range(30, 60):
                await harness.produce(b"%d" % i, partition=i % 3)
            seen: list[Delivery] = []
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:

                async def drink(source: Any) -> None:
                    while len(seen) < 30:
                        for delivery in await source.receive():
                            seen.append(delivery)
                            delivery.settle()
                    for task in tasks:
                        task.cancel()

                tasks = [group.create_task(drink(t.source)) for t in (first, second)]
            assert sorted(int(d.body or b"") for d in seen) == list(range(30, 60))


def harness_committed(committed: dict[int, int]) -> list[int]:
    return list(committed.values())


@pytest.mark.real_kafka
async def test_a_static_member_comes_back_without_a_rebalance(harness: KafkaHarness) -> None:
    """Static membership: the other member keeps its partitions, in the same epoch."""
    await harness.producer()
    timing = {"session_timeout_ms": 10_000, "heartbeat_interval_ms": 500}
    async with running(harness.options(group_instance_id="a", **timing)) as first:
        async with running(harness.options(group_instance_id="b", **timing)) as second:
            await assigned(source_of(second), 1)
            await assigned(source_of(first), 1)
            held = set(source_of(second)._marks.partitions)
        marks = source_of(first)._marks
        epochs = marks.epochs(marks.partitions)
        async with running(harness.options(group_instance_id="b", **timing)) as again:
            await assigned(source_of(again), 1)
            assert set(source_of(again)._marks.partitions) == held
            for i in range(6):
                await harness.produce(b"%d" % i, partition=i % 3)
            seen = await collect(first.source, 2 * len(epochs))
            seen += await collect(again.source, 2 * len(held))
            assert len(seen) == 6
            assert marks.epochs(marks.partitions) == epochs, "a rebalance happened"


async def test_drain_budget_over_gives_up_and_ignores_late_settles(harness: KafkaHarness) -> None:
    """E01, J04: what cannot finish in the budget goes to the others; the late outcome is ignored."""
    await harness.producer()
    metrics = CountingMetrics()
    async with running(harness.options(drain_budget_s=0.3), metrics) as first:
        await assigned(source_of(first), 3)
        for i in range(9):
            await harness.produce(b"%d" % i, partition=i % 3)
        held = await collect(first.source, 9, settle=False)
        held[0].settle()
        async with running(harness.options(drain_budget_s=0.3)) as second:
            await metrics.reached("source_dropped_total", 8)
            await assigned(source_of(second), 1)
            committed = await harness.committed()
            for delivery in held:
                delivery.settle()
                delivery.release("late")
            await flushed(first.source)
            assert await harness.committed() == committed
            both: set[bytes | None] = set()
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:

                async def drink(source: Any) -> None:
                    while len(both | {held[0].body}) < 9:
                        for delivery in await source.receive():
                            both.add(delivery.body)
                            delivery.settle()
                    for task in tasks:
                        task.cancel()

                tasks = [group.create_task(drink(t.source)) for t in (first, second)]
            assert both | {held[0].body} == {b"%d" % i for i in range(9)}


async def test_work_longer_than_the_poll_interval_is_done_once(harness: KafkaHarness) -> None:
    """E03, E04, J03: polling goes on while work runs and while paused; no eviction, one delivery."""
    await harness.produce(b"long", partition=0)
    options = harness.options(max_poll_interval_ms=1000, drain_budget_s=0.5)
    async with running(options) as transport:
        source = source_of(transport)
        (delivery,) = await collect(source, 1, settle=False)
        epochs = source._marks.epochs(source._marks.partitions)
        source.pause()
        await asyncio.sleep(3.0)  # the work itself: three poll intervals
        delivery.settle()
        source.resume()
        await flushed(source)
        assert source._marks.epochs(source._marks.partitions) == epochs, "a rebalance happened"
        assert (await harness.committed())[0] == 1
        await harness.produce(b"next", partition=0)
        (delivery,) = await collect(source, 1)
        assert delivery.body == b"next"


async def test_draining_member_does_not_block_the_group(harness: KafkaHarness) -> None:
    """G03: a member that has stopped intake and still holds work keeps polling; others join."""
    for i in range(3):
        await harness.produce(b"%d" % i, partition=0)
    async with running(harness.options(drain_budget_s=30, max_receive=2)) as first:
        settled, released = await collect(first.source, 2, settle=False)
        first.source.stop_intake()  # one record was fetched and never handed out
        released.release("stopping")
        async with running(harness.options(drain_budget_s=30)) as second:
            async with asyncio.timeout(WAIT_S):
                while not source_of(first)._assignment.draining:
                    await asyncio.sleep(0.01)
            settled.settle()  # nothing else can finish here: the budget is not waited for
            await assigned(source_of(second), 1)
            assert first.source.status().connected
            assert (await harness.committed())[0] == 1


async def test_stuck_record_holds_one_partition_only(harness: KafkaHarness) -> None:
    """E05, E06: a stuck record stops its partition at the window; the others flow on."""
    for i in range(200):
        await harness.produce(b"%d" % i, partition=0)
    options = harness.options(max_in_flight_per_partition=20)
    async with running(options) as transport:
        source = source_of(transport)
        held = await collect(source, 16, settle=False)
        stuck = held[0]
        assert stuck.body == b"0"
        for delivery in held[1:]:
            delivery.settle()
        seen = len(held)
        while not await nothing_comes_but(source, held):
            seen += len(held)
            for delivery in held:
                delivery.settle()
        assert seen <= 20
        (mark,) = [source._marks[p] for p in source._marks.partitions if p.partition == 0]
        assert mark.oldest_unsettled == 0
        await harness.produce(b"other", partition=1)
        (other,) = await collect(source, 1)
        assert other.body == b"other"
        await flushed(source)
        assert not (await harness.committed()).get(0)
        stuck.settle()
        while seen < 200:
            seen += len(await collect(source, 1))
        await flushed(source)
        assert (await harness.committed())[0] == 200


async def nothing_comes_but(source: KafkaSource, found: list[Delivery]) -> bool:
    """True when nothing comes for `QUIET_S`; else `found` is what came."""
    try:
        async with asyncio.timeout(QUIET_S):
            found[:] = await source.receive()
    except TimeoutError:
        return True
    return False


async def test_nothing_is_committed_without_a_delivered_reply(harness: KafkaHarness) -> None:
    """E09, E10: the reply is refused, so the record is not settled and its offset not committed."""
    await harness.produce(b"a", partition=0)
    async with running(harness.options()) as transport:
        (delivery,) = await collect(transport.source, 1, settle=False)
        with pytest.raises(RecordTooLargeForBroker):
            await transport.sink.publish(harness.reply_topic, "r", b"x" * 2_000_000, {})
        delivery.release("the reply was refused")
        await flushed(transport.source)
        assert not (await harness.committed()).get(0)
        (again,) = await collect(transport.source, 1, settle=False)
        await transport.sink.publish(harness.reply_topic, "r", b"smaller", {})
        again.settle()
        await flushed(transport.source)
        assert (await harness.committed())[0] == 1


async def test_failed_commit_is_a_warning_and_repeated(harness: KafkaHarness) -> None:
    """E01: a commit refused after a rebalance does not kill the source."""
    metrics = CountingMetrics()
    async with running(harness.options(commit_interval_ms=20), metrics) as transport:
        source = source_of(transport)
        await harness.produce(b"a", partition=0)
        (delivery,) = await collect(source, 1, settle=False)
        consumer = source.consumer
        assert consumer is not None
        coordinator = consumer._coordinator
        commit, failures = coordinator.commit_offsets, [CommitFailedError(), TimeoutError()]

        async def failing(assignment: Any, offsets: Any) -> None:
            if failures:
                raise failures.pop()
            await commit(assignment, offsets)

        coordinator.commit_offsets = failing
        delivery.settle()
        await metrics.reached("source_commit_failures_total", 2)
        await flushed(source)
        assert (await harness.committed())[0] == 1


async def test_broken_producer_is_replaced(harness: KafkaHarness) -> None:
    """E11: a producer that lost its sequence fails that publish and is replaced for the next."""
    async with running(harness.options()) as transport:
        assert isinstance(transport.sink, KafkaSink)
        before = transport.sink._producer
        assert before is not None

        async def broken(*_: Any, **__: Any) -> None:
            raise OutOfOrderSequenceNumber

        before.send = broken
        with pytest.raises(PublishError) as caught:
            await transport.sink.publish(harness.reply_topic, "r", b"1", {})
        assert caught.value.retryable
        await transport.sink.publish(harness.reply_topic, "r", b"1", {})
        assert transport.sink._producer is not before
        assert await harness.replies(harness.reply_topic, bool) == [b"1"]


async def test_consumer_that_receives_nothing_is_replaced(harness: KafkaHarness) -> None:
    """E17: the consumer object lives but fetches no more; the watchdog sees the lag."""
    metrics = CountingMetrics()
    async with running(harness.options(watchdog_s=1), metrics) as transport:
        source = source_of(transport)
        await harness.produce(b"a")
        await collect(source, 1)
        await flushed(source)
        consumer = source.consumer
        assert consumer is not None
        fetcher = consumer._fetcher
        for task in (fetcher._fetch_task, *fetcher._pending_tasks):
            task.cancel()
        await harness.produce(b"b")
        (delivery,) = await collect(source, 1)
        assert delivery.body == b"b"
        assert metrics.counts["source_reconnects_total"] == 1


async def test_commits_during_rebalances_never_go_back(harness: KafkaHarness) -> None:
    """E18: commits every 20 ms while members come and go: no rewind, no stall, nothing lost."""
    await harness.producer()
    total, seen, highest = 400, set[bytes | None](), dict[int, int]()
    async with (
        running(harness.options(commit_interval_ms=20)) as first,
        asyncio.timeout(50),
        asyncio.TaskGroup() as group,
    ):

        async def produce() -> None:
            for i in range(total):
                await harness.produce(b"%d" % i, partition=i % 3)
                await asyncio.sleep(0.005)

        async def drink(source: Any) -> None:
            while True:
                for delivery in await source.receive():
                    seen.add(delivery.body)
                    delivery.settle()

        async def watch() -> None:
            for partition, offset in (await harness.committed()).items():
                assert offset >= highest.get(partition, 0), "a committed offset went back"
                highest[partition] = offset

        producing = group.create_task(produce())
        drinking = group.create_task(drink(first.source))
        while not producing.done():
            async with running(harness.options(commit_interval_ms=20)) as second:
                other = group.create_task(drink(second.source))
                await assigned(source_of(second), 1)
                await watch()
                other.cancel()
            await watch()
        while len(seen) < total:
            await asyncio.sleep(0.01)
        await first.source.flush(Deadline(5))
        await watch()
        assert sum(highest.values()) == total
        drinking.cancel()


async def test_killed_process_loses_nothing(harness: KafkaHarness) -> None:
    """E05: one message is slow, the rest is done, SIGKILL: it comes again; what was finished behind
    it stands in the commit's metadata and is not done again."""
    for i in range(10):
        await harness.produce(b"%d" % i, partition=0)
    url = (
        f"kafka://{harness.server.address}/{harness.topic}?group={harness.group}"
        f"&reply_topic={harness.reply_topic}&dead_letter_topic={harness.dead_letters}"
        "&session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=10"
    )
    async with consumer_process(url, "all-but:3") as process:
        assert await process.got(10) == [str(i) for i in range(10)]
        await process.kill()
    assert (await harness.committed())[0] == 3
    metrics = CountingMetrics()
    async with running(harness.options(), metrics) as transport:
        # The packaged broker keeps no commit metadata: there the finished ones come again, too.
        remembered = harness.server.real_kafka
        got = await collect(transport.source, 1 if remembered else 7)
        bodies = [delivery.body for delivery in got]
        assert bodies == ([b"3"] if remembered else [b"%d" % i for i in range(3, 10)])
        assert got[0].redelivered is remembered
        await flushed(transport.source)
        assert (await harness.committed())[0] == 10
        assert metrics.counts.get("source_skipped_done_total", 0) == (6 if remembered else 0)

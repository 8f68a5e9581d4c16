"""The in-process broker beyond the conformance suite: submit, parts, faults."""

from __future__ import annotations

import asyncio

import pytest

from actors.ports import NoMetrics, PublishError, SystemClock
from pipeline.transports.inproc.broker import InprocBroker, broker_for
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import open_transport
from tests.support.inproc_faults import FaultyBroker


async def echo(source: InprocSource, sink: InprocSink, parts: int = 1) -> None:
    while True:
        for delivery in await source.receive():
            for part in range(parts):
                await sink.publish(
                    delivery.headers["reply-to"].decode(),
                    delivery.default_id,
                    (delivery.body or b"") + b"-%d" % part,
                    {"content-type": b"x"},
                )
            delivery.settle()


async def test_submit_collects_every_part() -> None:
    broker = InprocBroker()
    source, sink = InprocSource(broker), InprocSink(broker)
    await source.open()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(source.run()), group.create_task(echo(source, sink, parts=3))]
        replies = await asyncio.gather(*(broker.submit(b"r%d" % i, key="same") for i in range(20)))
        assert [[r.body for r in reply] for reply in replies] == [
            [b"r%d-%d" % (i, part) for part in range(3)] for i in range(20)
        ]
        assert broker.unsettled == 0
        await source.aclose()
        tasks[1].cancel()


async def test_submit_without_a_reply_ends_empty() -> None:
    broker = InprocBroker()
    source = InprocSource(broker)
    await source.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(source.run())
        waiting = group.create_task(broker.submit(None))
        (delivery,) = await source.receive()
        assert delivery.body is None
        delivery.settle()
        assert await waiting == []
        await source.aclose()


async def test_full_queue_makes_submit_wait() -> None:
    """C10: nothing is dropped when the queue is full; the sender waits."""
    broker = InprocBroker(InprocOptions(max_queued=2))
    await broker.put(b"1")
    await broker.put(b"2")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await broker.put(b"3")
    assert broker.unsettled == 2
    broker.take(1)
    await broker.put(b"3")
    assert broker.unsettled == 3


async def test_lost_settle_is_delivered_again_after_a_crash() -> None:
    broker = FaultyBroker()
    source = InprocSource(broker)
    await source.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(source.run())
        await broker.put(b"a", key="k")
        (first,) = await source.receive()
        assert (first.attempt, first.default_id) == (1, "k")
        broker.faults.lose_settles = 1
        first.settle()
        broker.crash()
        (second,) = await source.receive()
        assert (second.body, second.attempt) == (b"a", 2)
        second.settle()
        assert broker.unsettled == 0
        await source.aclose()


async def test_publish_faults() -> None:
    broker = FaultyBroker()
    sink = InprocSink(broker)
    broker.faults.fail_publishes = 1
    with pytest.raises(PublishError) as caught:
        await sink.publish("inproc:x", "k", b"1", {})
    assert caught.value.retryable
    broker.faults.drop_publishes = 1
    await sink.publish("inproc:x", "k", b"2", {})
    await sink.publish("inproc:x", "k", b"3", {})
    assert [reply.body for reply in broker.replies("inproc:x")] == [b"3"]


async def test_kept_replies_are_bounded() -> None:
    broker = InprocBroker(InprocOptions(max_kept_replies=3))
    sink = InprocSink(broker)
    for i in range(10):
        await sink.publish(f"inproc:{i}", "k", b"%d" % i, {})
    assert [bool(broker.replies(f"inproc:{i}")) for i in range(10)] == [False] * 7 + [True] * 3


async def test_broker_is_shared_by_name() -> None:
    options = InprocOptions(name="shared")
    broker = broker_for(options)
    transport = await open_transport(options, clock=SystemClock(), metrics=NoMetrics())
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        await broker.put(b"x")
        (delivery,) = await transport.source.receive()
        delivery.settle()
        assert broker.settled == 1
        await transport.source.aclose()

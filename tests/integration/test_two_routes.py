"""Two routes in one service: one broken broker must not silence the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack

from gpu.batch import PackedBatch
from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.settings.load import PublishSettings, RouteSettings, Settings
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import Transport
from schemas.codec import decode_reply
from schemas.results import Reply
from tests.support.fakes import FakeRunner
from tests.support.inproc_faults import FaultyBroker

NAMES = ("one", "two")


@asynccontextmanager
async def running(
    brokers: dict[str, FaultyBroker], publish: PublishSettings, runner: FakeRunner | None = None
) -> AsyncIterator[App]:
    transports = {
        name: Transport(InprocSource(broker), InprocSink(broker))
        for name, broker in brokers.items()
    }
    app = App(
        Settings(
            routes=tuple(RouteSettings(name=name, source=f"inproc://{name}") for name in NAMES),
            publish=publish,
        ),
        transports=transports,
        runner_factories={"fake": lambda: runner or FakeRunner()},
    )
    stop = StopSignal(0.2)
    for transport in transports.values():
        await transport.source.open()
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(stop))
        await app.ready.wait()
        try:
            yield app
        finally:
            stop.request("test over")


async def test_a_route_whose_broker_hangs_does_not_hold_up_the_others() -> None:
    """E11: every publisher that waits for a dead broker belongs to that broker's route."""
    brokers = {name: FaultyBroker() for name in NAMES}
    entered, never = asyncio.Semaphore(0), asyncio.Event()

    async def hang(destination: str, body: bytes) -> None:
        entered.release()
        await never.wait()

    brokers["one"].faults.before_publish = hang
    async with running(brokers, PublishSettings(max_concurrent=2)):
        for i in range(5):
            await brokers["one"].put(msgpack.packb({"id": f"r{i}", "input": "x"}))
        await entered.acquire()  # one list may hold all five
        async with asyncio.timeout(10):
            replies = await brokers["two"].submit(msgpack.packb({"id": "b", "input": "x"}))
    assert len(replies) == 1


async def test_refusals_of_a_route_whose_broker_hangs_do_not_hold_up_the_others() -> None:
    """E11: nor do its refusals take the slots of the others."""
    brokers = {name: FaultyBroker() for name in NAMES}
    entered, never = asyncio.Semaphore(0), asyncio.Event()

    async def hang(destination: str, body: bytes) -> None:
        entered.release()
        await never.wait()

    brokers["one"].faults.before_publish = hang
    async with running(brokers, PublishSettings(max_concurrent=2)):
        for _ in range(300):
            await brokers["one"].put(b"\xff\x00")
        for _ in range(2):
            await entered.acquire()
        async with asyncio.timeout(10):
            replies = await brokers["two"].submit(msgpack.packb({"id": "b", "input": []}))
    assert len(replies) == 1


async def test_a_cancel_record_reaches_requests_of_its_own_route_only() -> None:
    """G10: who may write to one topic must not withdraw what came in through another."""
    brokers = {name: FaultyBroker() for name in NAMES}
    gate = threading.Event()

    def wait(batch: PackedBatch) -> None:
        assert gate.wait(20)

    runner = FakeRunner(before_forward=wait)
    async with running(brokers, PublishSettings(), runner), asyncio.TaskGroup() as group:
        asked = group.create_task(
            brokers["one"].submit(msgpack.packb({"id": "secret", "input": "x"}))
        )
        while not brokers["one"].unsettled:
            await asyncio.sleep(0)
        await brokers["two"].submit(msgpack.packb({"task": "cancel", "id": "secret"}))
        gate.set()
    [reply] = asked.result()
    assert isinstance(decode_reply(reply.body, reply.headers), Reply)

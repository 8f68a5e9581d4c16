"""Starting, being ready, failing for good, stopping: the app around the graph."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import msgspec
import pytest

from gpu.batch import PackedBatch, Runner
from gpu.faults import DeviceFault
from pipeline.app import App
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal
from pipeline.local.server import free_port
from pipeline.observe.http import HealthServer
from pipeline.oneoff import run_inproc
from pipeline.settings.load import (
    BatchingSettings,
    HealthSettings,
    ModelSettings,
    RouteSettings,
    Settings,
)
from pipeline.transports.inproc.broker import InprocBroker
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import Transport
from tests.support.fakes import FakeRunner, RecordingMetrics

ROUTE = RouteSettings(name="one", source="inproc://x")


class Rig:
    """An app on an in-process broker, running beside the test."""

    def __init__(self, runner: FakeRunner, **settings: Any) -> None:
        self.broker = InprocBroker()
        self.metrics = RecordingMetrics()
        self.stop = StopSignal(settings.pop("drain_budget_s", 20.0))
        self.app = App(
            Settings(routes=(ROUTE,), **{"health": HealthSettings(port=0), **settings}),
            metrics=self.metrics,
            transports={
                "one": Transport(InprocSource(self.broker), InprocSink(self.broker)),
            },
            runner_factories={"fake": lambda: runner},
            serve_health=True,
        )

    async def put(self, n: int) -> None:
        for i in range(n):
            await self.broker.put(msgpack.packb({"id": f"r{i}", "input": f"text {i}"}))


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[asyncio.Task[ExitStatus]]:
    await rig.app._transports["one"].source.open()  # type: ignore[index]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(rig.app.run(rig.stop))
        try:
            yield task
        finally:
            rig.stop.request("test over")


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def test_the_port_answers_during_the_load_and_names_the_phase() -> None:
    """G07: live at once, not ready with the phase's name, ready afterwards."""
    gate = threading.Event()
    runner = FakeRunner()

    def slow_load() -> Runner:
        assert gate.wait(20)
        return runner

    port = free_port()
    rig = Rig(runner, health=HealthSettings(port=port))
    rig.app._runner_factories = {"fake": slow_load}
    async with running(rig):
        while rig.app.phase != "loading model fake":
            await asyncio.sleep(0)
        assert (await asyncio.to_thread(get, port, "/live"))[0] == 200
        status, body = await asyncio.to_thread(get, port, "/ready")
        assert status == 503 and b"loading model fake" in body
        gate.set()
        await rig.app.ready.wait()
        assert (await asyncio.to_thread(get, port, "/ready"))[0] == 200
        status, body = await asyncio.to_thread(get, port, "/statistics")
        assert msgspec.json.decode(body)["models"]["fake"]["architecture"] == "Fake"
        assert gc.get_freeze_count() > 0, "a full collection walks all that was loaded"
    assert gc.get_freeze_count() == 0


async def test_a_dead_executor_ends_the_service_and_releases_the_work() -> None:
    """G04, C11: exit status 4, nothing answered, nothing settled; another service takes over."""
    entered = threading.Event()

    def die(batch: PackedBatch) -> None:
        entered.set()
        raise DeviceFault("CUDA error: device-side assert triggered")

    rig = Rig(FakeRunner(before_forward=die))
    async with running(rig) as task:
        await rig.app.ready.wait()
        await rig.put(5)
        assert await task is ExitStatus.FATAL
    assert entered.is_set()
    assert rig.broker.settled == 0 and rig.broker.unsettled == 5
    healthy = Rig(FakeRunner())
    healthy.broker = rig.broker
    healthy.app._transports = {"one": Transport(InprocSource(rig.broker), InprocSink(rig.broker))}
    async with running(healthy):
        while rig.broker.unsettled:
            await asyncio.sleep(0)
    assert rig.broker.settled == 5


async def test_a_model_that_fails_every_time_is_not_ready_but_lives() -> None:
    """G04: readiness turns false on repeated failures, true again after a success; live stays."""
    broken = True

    def maybe(batch: PackedBatch) -> None:
        if broken:
            raise RuntimeError("backend dead")

    rig = Rig(FakeRunner(before_forward=maybe))
    async with running(rig):
        await rig.app.ready.wait()
        await rig.put(4)
        while rig.broker.unsettled:
            await asyncio.sleep(0)
        verdict = rig.app.readiness()
        assert not verdict.ready and "forwards failed in a row" in verdict.reasons[0]
        broken = False
        await rig.put(1)
        while rig.broker.unsettled:
            await asyncio.sleep(0)
        assert rig.app.readiness().ready


async def test_busy_is_not_down() -> None:
    """G05: thousands queued behind a working model, still ready."""
    rig = Rig(FakeRunner(max_batch_tokens=4), batching=BatchingSettings(linger_ms=0))
    async with running(rig):
        await rig.app.ready.wait()
        await rig.put(900)
        while rig.app.graph is None or rig.app.graph.dispatcher.batches_done < 5:
            await asyncio.sleep(0)
        assert rig.app.readiness().ready
        while rig.broker.unsettled:
            await asyncio.sleep(0)


async def test_a_drain_answers_what_is_held_and_a_spent_budget_releases_it() -> None:
    """G01, rule 8: drained is 0, over budget is 3; nothing is half-settled."""
    gate = threading.Event()

    def wait(batch: PackedBatch) -> None:
        assert gate.wait(20)

    rig = Rig(FakeRunner(before_forward=wait), drain_budget_s=0.2)
    async with running(rig) as task:
        await rig.app.ready.wait()
        await rig.put(3)
        while rig.app.graph is None or len(rig.app.graph.table) < 3:
            await asyncio.sleep(0)
        rig.stop.request("test")
        assert await task is ExitStatus.DRAIN_EXCEEDED
        gate.set()
    assert rig.broker.settled == 0 and rig.broker.unsettled == 3

    rig = Rig(FakeRunner())
    async with running(rig) as task:
        await rig.app.ready.wait()
        await rig.put(50)
        while rig.app.graph is None or not len(rig.app.graph.table):
            await asyncio.sleep(0)
        rig.stop.request("test")
        assert await task is ExitStatus.OK
    assert rig.broker.settled + rig.broker.unsettled == 50


async def test_stopping_before_ready_is_clean() -> None:
    rig = Rig(FakeRunner())
    rig.stop.request("too early")
    async with running(rig) as task:
        assert await task is ExitStatus.OK


async def test_a_model_that_cannot_load_is_one_line_naming_it() -> None:
    """G07: warm-up or load failure: a clear line and an error, nothing taken from a broker."""

    def broken() -> Runner:
        raise ValueError("weights: missing key encoder.layer.0\nmore lines")

    with pytest.raises(OperatorError, match=r"models\.fake does not load: ValueError: weights"):
        async with run_inproc(Settings(), runner_factories={"fake": broken}):
            raise AssertionError("must not get here")


async def test_a_missing_model_folder_names_the_setting(tmp_path: Any) -> None:
    settings = Settings(models={"m": ModelSettings(path=str(tmp_path / "nope"))})
    with pytest.raises(OperatorError, match=r"models\.m"):
        async with run_inproc(settings):
            raise AssertionError("must not get here")


async def test_errors_of_the_caller_pass_through_unwrapped() -> None:
    """A one-off command's own error is raised as it is, and the service has stopped."""
    with pytest.raises(LookupError, match="mine"):
        async with run_inproc(Settings(), runner_factories={"fake": FakeRunner}) as service:
            raise LookupError("mine")
    assert service.app.phase == "stopped"


async def test_the_time_in_which_the_device_idles_beside_waiting_tokens_is_measured() -> None:
    """J01: stages overlap: near zero while a backlog is worked off.

    Each forward takes a moment, as one does: one that takes none leaves the device idle most of the time, and a
    tick of housekeeping may come just then.
    """
    rig = Rig(FakeRunner(max_batch_tokens=64, before_forward=lambda batch: time.sleep(0.005)))
    async with running(rig):
        await rig.app.ready.wait()
        await rig.put(800)
        while rig.broker.unsettled:
            await asyncio.sleep(0.01)
        statistics = rig.app.statistics()
    assert statistics["idle_with_work_s"] == 0.0
    assert rig.metrics.counts.get("executor_idle_with_work_seconds_total", 0.0) == 0.0


async def test_a_used_port_is_refused_by_name() -> None:
    """G07-style: the line names the setting to change."""
    port = free_port()
    other = HealthServer(HealthSettings(port=port), App(Settings()).health._views)
    await other.open()
    rig = Rig(FakeRunner(), health=HealthSettings(port=port))
    with pytest.raises(OperatorError, match=r"health\.port"):
        await rig.app.run(rig.stop)
    await other.aclose()


async def test_a_one_off_request_does_not_wait_for_a_dead_model() -> None:
    """C11: the executor dies under a one-off command: an error at once, not a time-out."""

    def die(batch: PackedBatch) -> None:
        raise DeviceFault("CUDA error: device-side assert triggered")

    runner = FakeRunner(before_forward=die)
    with pytest.raises(OperatorError):
        async with run_inproc(Settings(), runner_factories={"fake": lambda: runner}) as service:
            await service.request(msgpack.packb({"id": "a", "input": "x"}))


async def test_an_unreachable_broker_shows_before_any_model_is_loaded() -> None:
    """G09-style: one line, at once."""
    loads = 0

    def load() -> Runner:
        nonlocal loads
        loads += 1
        return FakeRunner()

    port = free_port()
    settings = Settings(
        routes=(RouteSettings(name="r", source=f"redis://127.0.0.1:{port}/x?group=g"),),
        health=HealthSettings(port=0),
    )
    app = App(settings, runner_factories={"fake": load})
    with pytest.raises(OperatorError, match=str(port)):
        await app.run(StopSignal(1.0))
    assert loads == 0

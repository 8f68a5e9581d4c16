"""Readiness as a pure function, and the port over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from actors.ports import SourceStatus
from gpu.batch import ExecutorHealth
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.observe import http as health_module
from pipeline.observe.http import MAX_CONNECTIONS, MAX_REQUEST_BYTES, HealthServer, HealthViews
from pipeline.observe.readiness import READY_PHASE, Readiness, ReadinessInputs, readiness
from pipeline.settings.load import HealthSettings

NOW = 1000.0
SETTINGS = HealthSettings()
GOOD = ReadinessInputs(
    phase=READY_PHASE,
    executors={"cpu": ExecutorHealth(alive=True)},
    sources={"r": SourceStatus(connected=True)},
)


def verdict(inputs: ReadinessInputs = GOOD, **changes: Any) -> Readiness:
    return readiness(replace(inputs, **changes), NOW, SETTINGS)


def executor(**fields: Any) -> dict[str, ExecutorHealth]:
    return {"cpu": ExecutorHealth(**{"alive": True, **fields})}


def test_ready_when_nothing_is_wrong() -> None:
    assert verdict() == Readiness(ready=True, phase=READY_PHASE)


@pytest.mark.parametrize("phase", ["starting", "loading model minilm", "draining", "stopped"])
def test_phase_is_named(phase: str) -> None:
    """G07: while a model loads the service is not ready and says what it does."""
    assert verdict(phase=phase) == Readiness(False, phase, (f"phase: {phase}",))


def test_dead_executor() -> None:
    """G04: a killed thread and a fatal latch count at once."""
    assert verdict(executors=executor(alive=False)).reasons == ("executor cpu: a thread has ended",)
    assert "out of memory" in verdict(executors=executor(fatal="out of memory")).reasons[0]
    assert verdict(fatal="ingress ended").reasons == ("fatal: ingress ended",)


def test_a_model_that_raises_on_every_call() -> None:
    """G04."""
    limit = SETTINGS.max_failed_forwards
    assert verdict(executors=executor(consecutive_failures=limit - 1)).ready
    failing = verdict(executors=executor(consecutive_failures=limit, last_success_s=NOW - 0.1))
    assert not failing.ready and "in a row" in failing.reasons[0]


def test_a_stuck_forward_turns_ready_false_within_ten_seconds() -> None:
    """G04."""
    assert SETTINGS.stuck_after_s < 10
    assert verdict(executors=executor(oldest_running_s=NOW - 7.9)).ready
    stuck = verdict(executors=executor(oldest_running_s=NOW - 8.1, last_success_s=NOW - 60))
    assert not stuck.ready and "running for 8 s" in stuck.reasons[0]


def test_busy_is_not_down() -> None:
    """G05: a long forward beside others that succeed, and any queue depth, stay ready."""
    busy = executor(oldest_running_s=NOW - 60, last_success_s=NOW - 1, n_running=2)
    queue_depth = {"r": SourceStatus(connected=True, in_flight=10_000, buffered=10_000)}
    assert verdict(executors=busy, sources=queue_depth).ready


def test_an_idle_service_stays_ready() -> None:
    """G05."""
    assert verdict(executors=executor(last_success_s=NOW - 86_400)).ready


def test_a_lost_source_is_named() -> None:
    """F13: not ready while a source is disconnected."""
    lost = verdict(sources={"r": SourceStatus(False, "broker refuses"), "s": SourceStatus(True)})
    assert lost.reasons == ("route r: source disconnected (broker refuses)",)


def test_a_late_loop_counts() -> None:
    assert verdict(loop_lag_s=SETTINGS.max_loop_lag_s).ready
    assert "2.5 s late" in verdict(loop_lag_s=2.5).reasons[0]


def test_every_reason_is_told() -> None:
    assert (
        len(verdict(phase="draining", executors=executor(alive=False), loop_lag_s=9).reasons) == 3
    )


# --- the port --------------------------------------------------------------------------------------


class Service:
    """A health server on a free port, whose answers the test sets."""

    def __init__(self) -> None:
        self.verdict = Readiness(True, READY_PHASE)
        self.probes = 0
        self.fail = False
        self.server = HealthServer(
            HealthSettings(),
            HealthViews(self.ready, lambda: {"in_flight": 3}, lambda: b"metric 1\n"),
        )

    def ready(self) -> Readiness:
        if self.fail:
            raise RuntimeError("a view is broken")
        return self.verdict

    async def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        return parse(await self.raw(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))

    async def raw(self, *chunks: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), headers, body


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    await made.server.listen(0)
    yield made
    await made.server.aclose()


async def test_the_four_pages(service: Service) -> None:
    assert await service.raw(b"GET /live HTTP/1.0\r\n\r\n") != b""
    status, headers, body = await service.get("/ready")
    assert status == 200 and headers["content-type"] == "application/json"
    assert json.loads(body) == {"ready": True, "phase": READY_PHASE, "reasons": []}
    status, headers, body = await service.get("/metrics?x=1")
    assert (status, body) == (200, b"metric 1\n") and headers["content-type"].startswith(
        "text/plain"
    )
    status, _, body = await service.get("/statistics/")
    assert (status, json.loads(body)) == (200, {"in_flight": 3})
    assert (await service.get("/nothing"))[0] == 404
    assert int((await service.get("/live", "HEAD"))[1]["content-length"]) == 5
    assert (await service.get("/live", "HEAD"))[2] == b""
    assert (await service.get("/live", "POST"))[0] == 405


async def test_live_at_once_and_ready_503_with_the_phase(service: Service) -> None:
    """G07"""
    service.verdict = verdict(phase="loading model minilm")
    assert (await service.get("/live"))[0] == 200
    status, _, body = await service.get("/ready")
    assert status == 503
    assert json.loads(body)["reasons"] == ["phase: loading model minilm"]


async def test_a_broken_view_is_500_and_live_stays(service: Service) -> None:
    service.fail = True
    status, _, body = await service.get("/ready")
    assert (status, body) == (500, b"RuntimeError\n")
    assert (await service.get("/live"))[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400),
        (b"GET /live HTTP/2.0\r\n\r\n", 400),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"a" * (MAX_REQUEST_BYTES + 10), 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000 + b"\r\n", 431),
    ],
)
async def test_hostile_requests(service: Service, request_bytes: bytes, status: int) -> None:
    assert parse(await service.raw(request_bytes))[0] == status
    assert (await service.get("/live"))[0] == 200


async def test_a_request_in_pieces(service: Service) -> None:
    assert parse(await service.raw(b"GET /l", b"ive HT", b"TP/1.1\r\n", b"\r\n"))[0] == 200


async def test_a_peer_that_says_nothing_is_answered_and_dropped(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "REQUEST_TIMEOUT_S", 0.01)
    assert parse(await service.raw(b"GET /live HT"))[0] == 408
    assert parse(await service.raw())[0] == 408


async def test_connections_are_bounded(service: Service) -> None:
    held = [
        await asyncio.open_connection("127.0.0.1", service.server.port)
        for _ in range(MAX_CONNECTIONS)
    ]
    try:
        # all of them have been accepted once the last one is answered
        held[-1][1].write(b"GET /live HTTP/1.1\r\n\r\n")
        assert (await asyncio.wait_for(held[-1][0].read(), 30)).startswith(b"HTTP/1.1 200")
        extra = [await asyncio.open_connection("127.0.0.1", service.server.port) for _ in range(2)]
        held += extra
        # one place is free again; of two, at least one is dropped without an answer
        answers = []
        for _, writer in extra:
            writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        for reader, _ in extra:
            try:
                answers.append(await asyncio.wait_for(reader.read(), 30))
            except ConnectionResetError:
                answers.append(b"")
        assert len([a for a in answers if a]) <= 1
    finally:
        for _, writer in held:
            writer.close()


async def test_a_port_in_use_is_one_line_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = HealthServer(HealthSettings(port=port), Service().server._views)
        with pytest.raises(OperatorError) as caught:
            await server.open()
    assert f"health.port {port} is in use" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status is ExitStatus.USAGE


async def test_an_address_of_another_machine_names_the_host() -> None:
    server = HealthServer(HealthSettings(host="192.0.2.1", port=18321), Service().server._views)
    with pytest.raises(OperatorError, match=r"health\.host"):
        await server.open()


async def test_port_zero_turns_it_off_and_closing_twice_is_fine() -> None:
    server = HealthServer(HealthSettings(port=0), Service().server._views)
    await server.open()
    assert server.port is None
    await server.aclose()
    await server.aclose()


async def test_closing_drops_open_connections(service: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
    assert (await service.get("/live"))[0] == 200
    await asyncio.wait_for(service.server.aclose(), 10)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()

"""`embedstream serve` as a process of its own, with a tiny real model: start, health, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.lifecycle import ExitStatus
from pipeline.local.server import free_port
from tests.support.models import write_model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def embedstream(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`embedstream ARGUMENTS`, killed at the end of the block."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EMBEDSTREAM_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def until_event(process: subprocess.Popen[bytes], event: str) -> list[dict[str, Any]]:
    """The log lines up to and with that event."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(json.loads(line))
        if seen[-1]["event"] == event:
            return seen
    raise AssertionError(f"the process ended before {event}: {seen[-3:]}")


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_file_is_served_to_its_end(model: Path, tmp_path: Path) -> None:
    source, replies = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"id": "a", "input": "alpha"}\nMARKER-bad\n{"id": "b", "input": ["x", "y"]}\n'
    )
    url = f"file://{source}?replies={replies}"
    with embedstream(
        "serve", "--source", url, "--model", str(model), "--health-port", "0"
    ) as process:
        assert process.wait(100) == ExitStatus.OK
        assert process.stderr is not None
        log = process.stderr.read()
    written = {r["id"]: r for r in map(json.loads, replies.read_text().splitlines())}
    assert len(written["a"]["data"]) == 1 and len(written["b"]["data"]) == 2
    assert b"MARKER" not in log  # I05
    assert all(json.loads(line)["event"] for line in log.splitlines())


def test_health_opens_first_and_sigterm_drains(model: Path) -> None:
    """G07: the port answers before the model is loaded; G01: SIGTERM ends with status 0."""
    port = free_port()
    arguments = ("--source", "-", "--model", str(model), "--health-port", str(port))
    with embedstream("serve", *arguments, "--set", "log.format=json") as process:
        until_event(process, "phase")  # the first phase: nothing is loaded yet
        assert get(port, "/live")[0] == 200
        status, body = get(port, "/ready")
        assert status == 503 and json.loads(body)["reasons"][0].startswith("phase: ")
        until_event(process, "service_ready")
        assert get(port, "/ready")[0] == 200
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'{"id": "a", "input": "alpha"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "a"
        # The reply leaves first and is counted when it is known to have arrived.
        while b'embedstream_requests_total{outcome="ok"' not in get(port, "/metrics")[1]:
            time.sleep(0.05)
        assert json.loads(get(port, "/statistics")[1])["phase"] == "ready"
        process.send_signal(signal.SIGTERM)
        events = [e["event"] for e in until_event(process, "service_stopped")]
        assert "signal" in events and "draining" in events
        assert process.wait(60) == ExitStatus.OK


def test_a_health_port_in_use_is_status_2_and_one_line(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with embedstream(
            "serve", "--source", "-", "--model", str(model), "--health-port", port
        ) as process:
            assert process.wait(60) == ExitStatus.USAGE
            assert process.stderr is not None
            *_, last = process.stderr.read().decode().splitlines()
    assert last.startswith(f"embedstream: health.port {port} is in use")


def test_a_model_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    """G07: exit status and one clear line that names the setting."""
    (tmp_path / "config.json").write_text("{}")
    with embedstream(
        "serve", "--source", "-", "--model", str(tmp_path), "--health-port", "0"
    ) as process:
        assert process.wait(60) == ExitStatus.ERROR
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
    errors = [line for line in lines if line.startswith("embedstream: ")]
    assert len(errors) == 1 and f"models.{tmp_path.name}" in errors[0]
    assert not any("Traceback" in line for line in lines)


def test_ctrl_c_of_a_one_off_command_is_one_line_and_130(model: Path) -> None:
    """An open pipe on stdin and a running service inside: both end at the first Ctrl-C."""
    with embedstream("embed", "-", "-o", "jsonl", "--model", str(model)) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b'{"id": "a", "input": "alpha"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == "a"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == ExitStatus.FORCED_INT
        assert process.stderr is not None
        assert process.stderr.read() == b"embedstream: interrupted\n"


async def test_the_second_signal_leaves_at_once(model: Path) -> None:
    """G01: during the load nothing is held; both signals are honoured within the grace."""
    with embedstream(
        "serve", "--source", "-", "--model", str(model), "--health-port", "0"
    ) as process:
        await asyncio.to_thread(until_event, process, "starting")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        status = await asyncio.to_thread(process.wait, 60)
    # two pending signals come in no promised order; OK when the first alone was quick enough
    assert status in (ExitStatus.FORCED_INT, ExitStatus.FORCED_TERM, ExitStatus.OK)

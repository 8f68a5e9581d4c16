"""`embedstream up`: real brokers with the service attached; nothing outlives it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.local.up import Addresses, read_ready_file, snippets
from tests.support.models import write_model
from tests.support.servers import apache_home

pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with random weights: what is tested here is the command."""
    folder = tmp_path_factory.mktemp("up")
    write_model(folder / "embedder")
    write_model(folder / "reranker", labels=1, pooling=None)
    path = folder / "up.toml"
    path.write_text(
        f'[models.embedder]\npath = "{folder / "embedder"}"\ndefault_for = ["embed"]\n'
        f'[models.reranker]\npath = "{folder / "reranker"}"\ndefault_for = ["rerank", "score"]\n'
    )
    return path


class Up:
    """One `embedstream up` in a process of its own."""

    def __init__(self, config: Path, folder: Path, *arguments: str, apache: bool = False) -> None:
        self.ready_file = folder / "run" / "ready.json"
        self.log = folder / "up.log"
        environment = {k: v for k, v in os.environ.items() if apache or k != "KAFKA_HOME"}
        self.command = [sys.executable, "-m", "pipeline", "up", "--config", str(config)]
        self.command += ["--ready-file", str(self.ready_file), *arguments]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, "COLUMNS": "200"},
                start_new_session=True,
            )

    def wait_ready(self) -> Addresses:
        wait_for(lambda: self.ready_file.exists() or self.process.poll() is not None, 90)
        assert self.process.poll() is None, self.text()
        return read_ready_file(self.ready_file)

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def wait_for(condition: object, timeout_s: float) -> None:
    assert callable(condition)
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def answers(address: str) -> bool:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def nothing_is_left(addresses: Addresses) -> bool:
    return not any(answers(a) for a in (addresses.kafka, addresses.redis, addresses.health))


@pytest.fixture
def up(config: Path, tmp_path: Path) -> Iterator[Up]:
    running = Up(config, tmp_path)
    yield running
    running.close()


def test_printed_client_code_works_and_a_signal_takes_all_down(up: Up) -> None:
    """G01: SIGTERM drains and exits 0; the brokers go after the service."""
    addresses = up.wait_ready()
    assert addresses.models == ("embedder", "reranker")
    with urllib.request.urlopen(f"{addresses.health}/ready", timeout=5) as ready:
        assert ready.status == 200
    printed = up.text()
    said = printed.partition("embed over Kafka")[0]  # the code below it handles errors
    assert "warning" not in said and "error" not in said, printed
    for address in (addresses.kafka, addresses.redis, addresses.health):
        assert address in printed
    outputs = []
    for code in snippets(addresses).values():
        for line in code.splitlines():
            assert line.strip() in printed
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "total_tokens" in outputs[0]
    assert outputs[1].count("dead") == 3, "three documents, ranked"
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0, up.text()
    assert nothing_is_left(addresses)


def test_brokers_do_not_outlive_a_killed_command(up: Up) -> None:
    addresses = up.wait_ready()
    up.process.kill()
    up.process.wait()
    wait_for(lambda: nothing_is_left(addresses), 20)


def test_a_broker_that_dies_stops_the_service_with_a_clear_line(up: Up) -> None:
    addresses = up.wait_ready()
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
        for pid in up.children()
    }
    port = addresses.redis.rpartition(":")[2]
    # Redis and Valkey rename themselves to "redis-server 127.0.0.1:PORT".
    redis = next(pid for pid, text in commands.items() if "-server" in text and port in text)
    os.kill(redis, signal.SIGKILL)
    assert up.process.wait(60) == 1
    assert "Redis has died (was killed by SIGKILL); its last words: " in up.text()
    assert "Ready to accept connections" in up.text()  # the log of that broker
    assert "Traceback" not in up.text()
    wait_for(lambda: nothing_is_left(addresses), 20)


LAUNCHER = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:])
child.wait()
"""


def test_it_stops_with_its_parent(config: Path, tmp_path: Path) -> None:
    """The demo may be killed; the service it started then stops by itself."""
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "pipeline", "up", "--config", str(config)]
    command += ["--ready-file", str(ready), "--stop-with-parent"]
    environment = {k: v for k, v in os.environ.items() if k != "KAFKA_HOME"}
    parent = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(ready.exists, 90)
        addresses = read_ready_file(ready)
        parent.kill()
        parent.wait()
        wait_for(lambda: nothing_is_left(addresses), 40)
    finally:
        parent.kill()
        parent.wait()


def test_a_taken_port_is_one_clear_line(config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = Up(config, tmp_path, "--health-port", str(port))
        try:
            assert up.process.wait(90) == 2
        finally:
            up.close()
    assert f"health.port {port} is in use" in up.text()
    assert "Traceback" not in up.text()


@pytest.mark.real_kafka
def test_a_local_apache_kafka_is_used_when_there_is_one(config: Path, tmp_path: Path) -> None:
    if apache_home() is None:
        pytest.skip("needs a local Apache Kafka: set KAFKA_HOME")
    up = Up(config, tmp_path, apache=True)
    try:
        addresses = up.wait_ready()
        assert addresses.kafka_kind == "apache"
        code = next(iter(snippets(addresses).values()))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert "total_tokens" in done.stdout, done.stderr
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(60) == 0, up.text()
        assert nothing_is_left(addresses)
    finally:
        up.close()

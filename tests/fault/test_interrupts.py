"""K33, K44: SIGINT and SIGTERM at random moments of every command that takes a while.

EMBEDSTREAM_TEST_INTERRUPTS says how many moments of each (50 for a release). What is asserted is the
status, the silence (no traceback, no C++ abort) and that nothing is left; time only as the bound that
the command itself has, far above it, because machines are slow.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.models import write_model
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
MOMENTS = int(os.environ.get("EMBEDSTREAM_TEST_INTERRUPTS", "4"))
END_S = 60.0
"""Never reached: a command that ignores signals would run until then."""
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Command:
    """One process in a session of its own, whose output is read as it comes."""

    def __init__(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "KAFKA_HOME"}
        self.output = b""
        self.writer: int | None = None
        """The other end of its stdin, kept open as long as it runs."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *arguments],
            cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**environment, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := self.process.stdout.read1(65536):  # type: ignore[attr-defined]
            self.output += chunk

    @property
    def watches(self) -> bool:
        """Handlers are set: before, while Python itself starts, nobody can."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return True
        mask = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(mask >> (signal.SIGTERM - 1) & 1)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < until, self.output
            time.sleep(0.005)

    def servers(self) -> list[int]:
        """Processes of the session that are no shells: the command itself and its brokers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[1]) == self.process.pid:
                found.append(int(path.parent.name))
        return found

    def end(self, number: signal.Signals) -> int:
        """Send the signal; the status."""
        servers = self.servers()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still there: {self.output!r}") from None
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.writer is not None:
            os.close(self.writer)
        until = time.monotonic() + 10  # a watchdog kills what a killed parent left
        while left := [pid for pid in servers if _runs(pid)]:
            assert time.monotonic() < until, left
            time.sleep(0.02)
        for word in (b"Traceback", b"terminate called", b"Exception ignored"):
            assert word not in self.output, self.output
        return status


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "up.toml"
    path.write_text(f'[models.m]\npath = "{model}"\ndefault_for = ["embed"]\n')
    return path


def moments(seed: str, longest_s: float) -> Iterator[tuple[float, signal.Signals]]:
    """Seconds after the handlers are set, most of them early, and a signal each."""
    dice = random.Random(seed)
    for _ in range(MOMENTS):
        yield longest_s * dice.random() ** 1.5, dice.choice([signal.SIGINT, signal.SIGTERM])


def run_into_signals(
    start: Callable[[], Command], longest_s: float, *, drains: bool = False
) -> None:
    seen = []
    for delay_s, number in moments(repr(start), longest_s):
        command = start()
        command.wait_until(lambda command=command: command.watches)  # type: ignore[misc]
        time.sleep(delay_s)  # the moment is what is drawn
        finished = command.process.poll() is not None
        status = command.end(number)
        allowed = {ENDED[number]} | ({0} if drains or finished else set())
        assert status in allowed, (delay_s, number, status, command.output)
        seen.append((f"{delay_s:.2f}", number.name, status))
    print(seen)


def test_start_and_load_of_a_question(model: Path) -> None:
    run_into_signals(lambda: Command("embed", "a text", "--model", str(model)), 6.0)


def test_serve_while_it_starts(model: Path, tmp_path: Path) -> None:
    """A FIFO that is open and silent: the service is idle once it is ready."""
    fifo = tmp_path / "in"
    os.mkfifo(fifo)
    with open(os.open(fifo, os.O_RDWR), "rb", buffering=0) as held:
        run_into_signals(
            lambda: Command(
                "serve", "--source", "-", "--model", str(model), "--health-port", "0",
                stdin=held.fileno(),
            ),
            6.0,
            drains=True,
        )  # fmt: skip


@pytest.mark.kafka
@pytest.mark.redis
def test_up(config: Path) -> None:
    run_into_signals(lambda: Command("up", "--config", str(config)), 8.0, drains=True)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.model
def test_demo() -> None:
    run_into_signals(lambda: Command("demo", "-n", "30", "--no-prompt"), 15.0)


@pytest.mark.model
@pytest.mark.parametrize("asked", [False, True])
def test_the_prompt_of_the_demo(asked: bool) -> None:
    """Before and after a question."""
    for number in [signal.SIGINT, signal.SIGTERM] * max(1, MOMENTS // 8):
        ours, theirs = pty.openpty()
        try:
            with _on_terminal(theirs) as (process, read):
                read(ours, b"? ", 1)
                if asked:
                    os.write(ours, b"what is a deadlock?\n")
                    read(ours, b"? ", 2)
                process.send_signal(number)
                assert process.wait(END_S) == ENDED[number]
        finally:
            os.close(ours)
            os.close(theirs)


@contextmanager
def _on_terminal(
    terminal: int,
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[int, bytes, int], None]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "demo", "-n", "20", "--in-process"],
        cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal,
        env={**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    seen = b""

    def read(ours: int, text: bytes, times: int) -> None:
        nonlocal seen
        while seen.count(b"\n" + text) < times:
            seen += os.read(ours, 65536)

    try:
        yield process, read
    finally:
        process.kill()
        process.wait()


def test_in_the_middle_of_stdin(model: Path, tmp_path: Path) -> None:
    """Half of the lines are there, the pipe stays open; a file of --out stays as it was."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"before")

    def start() -> Command:
        reader, writer = os.pipe()
        os.write(writer, b'{"id": "a", "input": "x"}\n{"id": "b", "inp')
        command = Command(
            *("embed", "-", "-o", "jsonl", "--out", str(out), "--model", str(model)), stdin=reader
        )
        os.close(reader)
        command.writer = writer
        return command

    run_into_signals(start, 8.0)
    assert out.read_bytes() == b"before" and os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.redis
def test_waiting_for_a_service_that_does_not_answer(redis_server: ServerInfo) -> None:
    url = f"redis://{redis_server.address}/nobody.reads.this"
    run_into_signals(lambda: Command("embed", "x", "--via", url), 2.5)

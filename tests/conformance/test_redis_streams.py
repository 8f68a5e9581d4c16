"""The suite over Redis streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conformance.redis_harness import RedisHarness
from tests.conformance.transport_suite import TransportSuite
from tests.support.servers import ServerInfo


@pytest.mark.redis
class TestRedisStreams(TransportSuite):
    @pytest.fixture
    async def harness(self, redis_server: ServerInfo) -> AsyncIterator[RedisHarness]:
        harness = RedisHarness(redis_server)
        yield harness
        await harness.aclose()

"""The suite over Kafka: on the best broker of the ladder, and once more on the packaged one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.transport_suite import TransportSuite
from tests.support.servers import ServerInfo


@pytest.mark.kafka
class TestKafka(TransportSuite):
    @pytest.fixture
    async def harness(self, kafka_server: ServerInfo) -> AsyncIterator[KafkaHarness]:
        harness = KafkaHarness(kafka_server)
        yield harness
        await harness.aclose()


@pytest.mark.kafka
class TestPackagedKafka(TransportSuite):
    """Skipped where the ladder already ends there."""

    @pytest.fixture
    async def harness(
        self, kafka_server: ServerInfo, packaged_kafka_server: ServerInfo
    ) -> AsyncIterator[KafkaHarness]:
        if kafka_server.kind == "packaged":
            pytest.skip("the suite has just run on the packaged broker")
        harness = KafkaHarness(packaged_kafka_server)
        yield harness
        await harness.aclose()

"""Clients of every kind over a real Kafka: the files that docs/kafka.md shows, but for the address."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.local.kafka import ApacheKafka
from tests.client.test_examples import EXAMPLES, ROOT, node_folder, run
from tests.support.client import background_service
from tests.support.fakes import DIMENSIONS
from tests.support.servers import new_apache, start_now

__all__ = ["node_folder"]
pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def broker() -> Iterator[ApacheKafka]:
    """A Kafka of our own: the examples use the default topics."""
    kafka = new_apache()
    start_now(kafka)
    with background_service(f"kafka://{kafka.address}?partitions=3"):
        yield kafka
    kafka.close()


def example(name: str, broker: ApacheKafka, folder: Path) -> Path:
    text = (EXAMPLES / name).read_text("utf-8")
    assert "localhost:9092" in text
    path = folder / Path(name).name
    path.write_text(text.replace("localhost:9092", broker.address))
    return path


def check_hundred(out: str) -> None:
    lines = sorted(out.splitlines())
    assert lines == sorted(f"text {i} {DIMENSIONS}" for i in range(100))


@pytest.mark.parametrize("name", ["kafka_aiokafka.py", "kafka_confluent.py"])
def test_python(name: str, broker: ApacheKafka, tmp_path: Path) -> None:
    """K01, K02: compressed records, and a transaction of librdkafka's."""
    check_hundred(run(sys.executable, example(name, broker, tmp_path)))


def test_node(broker: ApacheKafka, node_folder: Path) -> None:
    check_hundred(run("node", example("node/kafkajs.mjs", broker, node_folder)))


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (ROOT / "docs" / "kafka.md").read_text("utf-8")
    names = ["kafka_aiokafka.py", "kafka_confluent.py", "node/kafkajs.mjs"]
    for name in names:
        assert (EXAMPLES / name).read_text("utf-8").strip() in page, name

"""kill -9 in the middle of indexing, again and again: the collection ends exactly true.

`make chaos` runs it with 100 kills over 20,000 records; the numbers come from the environment.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import (
    Record,
    Topic,
    expected_rows,
    status_of,
    stored_rows,
    until_committed,
)
from tests.support.processes import ServiceProcess, service_process
from tests.support.servers import ServerInfo
from tests.support.stores import PostgresServer

KILLS = int(os.environ.get("EMBEDSTREAM_CHAOS_KILLS", "2"))
RECORDS = int(os.environ.get("EMBEDSTREAM_CHAOS_RECORDS", "900"))
LONGEST_S = 240 + 30 * KILLS

pytestmark = [pytest.mark.real_kafka, pytest.mark.kafka, pytest.mark.timeout(LONGEST_S)]


@pytest.fixture(params=["lance", "pgvector"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A collection in each of the two stores."""
    if request.param == "lance":
        return f"lance://{tmp_path}/index#docs"
    server: PostgresServer = request.getfixturevalue("postgres")
    return f"{server.url}#docs"


def history(n: int, seed: int = 7) -> list[Record]:
    """Inserts, updates, re-chunkings, deletes and re-inserts; as many keys as a third of the records."""
    rng = random.Random(seed)
    records: list[Record] = []
    for i in range(n):
        key = f"doc-{rng.randrange(max(1, n // 3))}"
        if rng.random() < 0.1:
            records.append((key, None))
            continue
        words = " ".join(f"w{i}x{j}" for j in range(rng.randrange(1, 40)))
        records.append((key, {"title": f"{key} {i}", "body": words, "lang": "en"}))
    return records


async def killed(service: ServiceProcess, topic: Topic, at: int, rng: random.Random) -> None:
    """SIGKILL soon after `at` records are committed; anywhere in whatever it does then."""
    await until_committed(topic, at)
    time.sleep(rng.random() * 0.2)  # not a wait for anything: where in a write it strikes
    service.kill()


async def test_no_kill_leaves_a_wrong_id_text_or_vector(
    kafka_server: ServerInfo, url: str, tmp_path: Path
) -> None:
    if not kafka_server.real_kafka:
        pytest.skip("needs a real Apache Kafka")
    topic, rng, records = Topic(kafka_server.address), random.Random(11), history(RECORDS)
    await topic.create()
    await topic.produce(records)
    config: dict[str, Any] = {
        "routes": [topic.route(url)],
        "forward_s": 0.002,
        "max_batch_tokens": 256,
    }
    for kill in range(KILLS):
        with service_process(config, tmp_path, f"service-{kill % 3}") as service:
            await killed(service, topic, RECORDS * kill // (KILLS + 1), rng)
    with service_process(config, tmp_path, "last"):
        await until_committed(topic, RECORDS)
        rows = await stored_rows(url)
    assert rows == expected_rows(records)
    there = {key for key, value in dict(records).items() if value is not None}
    assert (await status_of(url)).n_documents == len(there)

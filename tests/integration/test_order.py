"""`order` over a real Kafka: results of one key leave in offset order, whatever order they were computed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.codec import decode_reply
from tests.support.kafka_bench import Bench
from tests.support.processes import service_process
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(60)]

N = 200


@pytest.mark.parametrize("order", ["key", "partition"])
async def test_two_hundred_versions_of_one_key_are_answered_in_their_order_in_one_partition(
    kafka_server: ServerInfo, tmp_path: Path, order: str
) -> None:
    """Short interactive texts overtake long bulk ones in the batches, never in the reply topic; a
    request that is refused stands in line, too. Ids differ, so the key alone would spread the replies."""
    bench = Bench(kafka_server.address)
    await bench.create(3)
    versions = {
        f"v{i:03}": {"input": f"text {i}", "priority": "interactive"}
        if i % 2
        else {"input": "" if i % 20 == 4 else "word " * 40, "priority": "bulk"}
        for i in range(N)
    }
    found: dict[int, list[str]] = {}
    with service_process(bench.config({"order": order}, forward_s=0.002), tmp_path):
        await bench.produce(versions, key="document")
        async with bench.reading(bench.replies, 3) as consumer:
            while sum(map(len, found.values())) < N:
                for place, records in (await consumer.getmany(timeout_ms=500)).items():
                    for record in records:
                        reply = decode_reply(record.value, dict(record.headers))
                        assert record.key == reply.id.encode(), (
                            "the key of a reply is the request id"
                        )
                        found.setdefault(place.partition, []).append(reply.id)
    assert list(found.values()) == [list(versions)]

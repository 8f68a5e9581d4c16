"""docs/life-of-a-request.md names the files that an embed request over Kafka passes, all and no other."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from pipeline.app import App
from pipeline.lifecycle import StopSignal, beside
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import HealthSettings, ModelSettings, RouteSettings, Settings
from tests.support.models import write_model
from tests.support.servers import ServerInfo, unique

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "life-of-a-request.md"
ROOMS = ("schemas", "gpu", "actors", "pipeline")
PARTITIONS = 1


class Trace:
    """The product's files in which a function ran while `on`, on any thread."""

    def __init__(self) -> None:
        self.on = False
        self.seen: dict[str, None] = {}  # in the order of the first call

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self.seen[frame.f_code.co_filename] = None

    def files(self) -> list[str]:
        paths = [Path(name) for name in self.seen if name.startswith(str(ROOT))]
        relative = [path.relative_to(ROOT) for path in paths]
        return [str(path) for path in relative if path.parts[0] in ROOMS]


async def committed(address: str, topic: str) -> bool:
    """Has the group committed anything? It bears the topic's name."""
    async with AIOKafkaConsumer(bootstrap_servers=address, group_id=topic) as consumer:
        consumer.assign([TopicPartition(topic, n) for n in range(PARTITIONS)])
        return any([await consumer.committed(p) for p in consumer.assignment()])


async def traced_request(settings: Settings, address: str, topic: str) -> list[str]:
    """The files that one embed request passes, from the consumer to the committed offset."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    producer = AIOKafkaProducer(bootstrap_servers=address)
    replies = AIOKafkaConsumer(
        f"{topic}.replies", bootstrap_servers=address, auto_offset_reset="earliest"
    )
    app, stop = App(settings, metrics=PrometheusMetrics()), StopSignal(10.0)
    try:
        async with beside(app.run(stop)) as [running]:
            await app.ready.wait()
            async with producer, replies:
                record = {"id": "one", "input": ["hello river", "a red mountain"]}
                trace.on = True
                await producer.send_and_wait(topic, msgpack.packb(record))
                reply = await replies.getone()
                assert len(msgpack.unpackb(reply.value)["data"]) == 2
                while not await committed(address, topic):
                    await asyncio.sleep(0.05)
                trace.on = False
            stop.request("the request is settled")
            await asyncio.wait({running})
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return trace.files()


@pytest.mark.kafka
async def test_the_page_names_every_file_that_a_request_passes(
    kafka_server: ServerInfo, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    topic = unique("life")
    settings = Settings(
        models={"embed": ModelSettings(path=str(folder), device="cpu")},
        routes=(
            RouteSettings(
                name="life",
                source=f"kafka://{kafka_server.address}/{topic}?group={topic}"
                f"&reply_topic={topic}.replies&partitions={PARTITIONS}",
            ),
        ),
        health=HealthSettings(port=0),
    )
    passed = await traced_request(settings, kafka_server.address, topic)
    page = PAGE.read_text("utf-8")
    rows = page[page.index("## Every file") :].splitlines()
    name = re.compile(r"`((?:schemas|gpu|actors|pipeline)/[a-z0-9_/]+\.py)`")
    named = [file for row in rows for file in name.findall(row)]
    meanwhile = {
        file for row in rows if row.startswith("| meanwhile") for file in name.findall(row)
    }
    lines = sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in passed)
    print(f"{len(passed)} files, {lines} lines:", *passed, sep="\n")
    assert len(named) == len(set(named)) and meanwhile
    assert set(passed) - set(named) == set()
    assert set(named) - set(passed) - meanwhile == set()

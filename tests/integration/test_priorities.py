"""Two lanes on one route, over every kind of broker."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import numpy as np
import pytest

from embedstream_client import AsyncClient
from gpu.batch import PackedBatch
from pipeline.app import App
from pipeline.lifecycle import ExitStatus, StopSignal
from pipeline.settings.load import (
    AdmissionSettings,
    ExecutorSettings,
    LaneAdmission,
    RouteSettings,
    Settings,
)
from tests.support.client import held, until
from tests.support.fakes import FakeRunner, fake_ids, fake_vector
from tests.support.servers import ServerInfo, unique

BULK = fake_ids("bulk")[0]


async def check(source: str, url: str) -> None:
    """Bulk records fill their lane and do not come to an end; a question behind them is answered."""
    go = threading.Event()

    def hold_bulk(batch: PackedBatch) -> None:
        if BULK in batch.input_ids:
            assert go.wait(60)

    settings = Settings(
        routes=(RouteSettings(name="r", source=source, lane="bulk"),),
        admission=AdmissionSettings(bulk=LaneAdmission(max_in_flight_requests=1)),
        executor=ExecutorSettings(cpu_workers=2),
    )
    runner = partial(FakeRunner, before_forward=hold_bulk)
    app, stop = App(settings, runner_factories={"fake": runner}), StopSignal(10.0)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(stop))
        await asyncio.wait_for(app.ready.wait(), 60)
        async with AsyncClient.from_url(url, timeout=60) as client, asyncio.TaskGroup() as calls:
            first = calls.create_task(client.embed("bulk first"))
            await until(lambda: held(app) == 1)
            others = [calls.create_task(client.embed(f"bulk {n}")) for n in range(8)]
            answer = await client.embed("question", priority="interactive")
            np.testing.assert_array_equal(answer.vector, fake_vector(fake_ids("question")))
            assert not first.done() and not any(other.done() for other in others)
            go.set()
        for n, other in enumerate(others):
            vector = fake_vector(fake_ids(f"bulk {n}"))
            np.testing.assert_array_equal(other.result().vector, vector)
        stop.request("the test is over")
    assert running.result() is ExitStatus.OK


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["redis", "redis-list"])
async def test_a_question_passes_bulk_records_on_its_route(
    redis_server: ServerInfo, kind: str
) -> None:
    """Their lane is full; they are neither lost nor forgotten."""
    url = f"{kind}://{redis_server.address}/{unique('embedstream.lanes')}"
    await check(url, url)


@pytest.mark.kafka
async def test_a_question_passes_bulk_records_of_its_partition(kafka_server: ServerInfo) -> None:
    topic, replies = unique("lanes"), unique("embedstream.out")
    address, query = f"kafka://{kafka_server.address}/{topic}", f"reply_topic={replies}"
    await check(f"{address}?group={topic}&partitions=1&{query}", f"{address}?{query}")

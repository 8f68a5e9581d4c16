"""The service around a model that costs nothing, beside a bare loop on the same broker.

    python -m benchmarks.pipeline [--rounds 5] [--quick] [--transports inproc redis kafka]

Who calls it: `make bench`, or a person. Redis is a server of our own (system or packaged), Kafka is
Apache Kafka where KAFKA_HOME says where it is, else the packaged broker.
What must stay true: broker, loop or service, and nothing else run meanwhile (records are there before
the clock starts, in a fresh topic or stream); the service has its own logging and metrics on; the clock runs
from the first record received to the last request settled. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from benchmarks._bare import BATCH, ROW, bare_inproc, bare_kafka, bare_redis
from benchmarks._common import Sample, interleave, median, table, write_results
from gpu.batch import (
    EncodedItem,
    EncodedRequest,
    ItemOptions,
    ItemOutcome,
    ItemResult,
    ModelInfo,
    PackedBatch,
)
from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServer
from pipeline.observe.logs import configure_logging
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import BatchingSettings, RouteSettings, Settings
from pipeline.transports.inproc.broker import InprocBroker
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import Transport, open_transport, parse_url
from schemas.codec import encode_request
from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest, EmbedRequest, Text

IDS = np.arange(1, 9, dtype=np.int32)
VECTOR = np.frombuffer(ROW, dtype=np.float32)


class NoModel:
    """Encoder and runner in one: eight ids for every text, the same vector for every row."""

    def __init__(self) -> None:
        self.encoder = self
        self.info = ModelInfo(
            name="none", fingerprint="none", architecture="none", dtype="float32", device="cpu",
            tasks=frozenset({"embed"}), max_tokens=512, max_batch_tokens=512, dimensions=384,
        )  # fmt: skip

    def encode(self, requests: list[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        options = ItemOptions()
        return [
            EncodedRequest(tuple(EncodedItem(IDS, options) for _ in range(request.n_items)))
            for request in requests
        ]

    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        result = ItemResult(dense=VECTOR)
        return [result] * batch.n_items

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class Lane:
    """One transport: fill it, then run either contestant on it until all is settled."""

    name: str
    fill: Callable[[list[bytes]], Awaitable[dict[str, Any]]]
    bare: Callable[[dict[str, Any]], Awaitable[float]]
    transport: Callable[[dict[str, Any]], Awaitable[Transport]]
    server: LocalServer | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)


def bodies(count: int, n_items: int) -> list[bytes]:
    """Embed requests of `n_items` short texts."""
    texts = tuple(Text(f"text number {i} of a request") for i in range(n_items))
    return [encode_request(EmbedRequest(id=f"r{i}", input=texts))[0] for i in range(count)]


async def service(
    transport: Transport,
    count: int,
    *,
    factory: Callable[[], Any] = NoModel,
    settings: Settings | None = None,
) -> float:
    """The whole application on an open transport. Seconds from the first delivery to the last settle."""
    marks = {"first": 0.0, "published": 0.0}
    receive, publish = transport.source.receive, transport.sink.publish
    publish_all = getattr(transport.sink, "publish_all", None)
    left = count
    finished = asyncio.Event()

    async def timed_receive() -> Any:
        deliveries = await receive()
        marks["first"] = marks["first"] or time.perf_counter()
        return deliveries

    def published(n: int) -> None:
        nonlocal left
        left -= n
        if left <= 0:
            finished.set()

    async def timed_publish(*arguments: Any, **options: Any) -> None:
        await publish(*arguments, **options)
        if publish_all is None:
            published(1)

    async def timed_publish_all(records: Any, tell: Any) -> None:
        assert publish_all is not None
        await publish_all(records, tell)
        published(len(records))

    transport.source.receive = timed_receive  # type: ignore[method-assign]
    transport.sink.publish = timed_publish  # type: ignore[method-assign]
    if publish_all is not None:
        transport.sink.publish_all = timed_publish_all  # type: ignore[attr-defined]
    settings = msgspec.structs.replace(
        settings or Settings(),
        routes=(RouteSettings(name="bench", source="inproc://bench", lane="bulk"),),
        batching=BatchingSettings(result_cache_bytes=0),  # every item is the same one here
    )
    metrics = PrometheusMetrics()
    app = App(
        settings,
        metrics=metrics,
        transports={"bench": transport},
        runner_factories={"none": factory},
    )
    stop = StopSignal(20.0)

    async def end() -> None:
        await finished.wait()
        assert app.graph is not None
        await app.graph.table.wait_empty()
        marks["published"] = time.perf_counter()
        stop.request("all replies are out")

    async with asyncio.TaskGroup() as group:
        group.create_task(end())
        group.create_task(app.run(stop))
    answered = metrics.registry.get_sample_value("embedstream_items_total", {"task": "embed"}) or 0
    assert answered >= count, f"{answered:.0f} items were answered for {count} requests"
    return marks["published"] - marks["first"]


def inproc(max_in_flight: int = 1024) -> Lane:
    """In this process, no broker at all."""

    async def fill(records: list[bytes]) -> dict[str, Any]:
        return {"records": records}

    async def transport(state: dict[str, Any]) -> Transport:
        broker = InprocBroker(InprocOptions(max_queued=1_000_000, max_in_flight=max_in_flight))
        opened = Transport(InprocSource(broker), InprocSink(broker))
        await opened.source.open()
        for record in state["records"]:
            await broker.put(record)
        return opened

    return Lane("in-process", fill, lambda state: bare_inproc(state["records"]), transport)


def redis(server: RedisServer) -> Lane:
    """Streams with a consumer group."""

    async def fill(records: list[bytes]) -> dict[str, Any]:
        from redis.asyncio import Redis

        client: Any = Redis(port=server.port)
        stream = f"bench.{uuid.uuid4().hex[:8]}"
        await client.xgroup_create(stream, "bench", id="0", mkstream=True)
        for start in range(0, len(records), BATCH):
            async with client.pipeline(transaction=False) as pipe:
                for record in records[start : start + BATCH]:
                    pipe.xadd(stream, {"data": record})
                await pipe.execute()
        await client.aclose()
        return {"stream": stream, "count": len(records)}

    async def bare(state: dict[str, Any]) -> float:
        stream = state["stream"]
        return await bare_redis(server.port, stream, "bench", stream + ".bare", state["count"])

    async def transport(state: dict[str, Any]) -> Transport:
        url = f"redis://127.0.0.1:{server.port}/{state['stream']}?group=bench"
        return await _opened(url)

    return Lane("Redis", fill, bare, transport, server)


def kafka(server: LocalServer) -> Lane:
    """A topic of three partitions and a fresh group each time."""

    async def fill(records: list[bytes]) -> dict[str, Any]:
        from aiokafka import AIOKafkaProducer
        from aiokafka.admin import AIOKafkaAdminClient, NewTopic

        topic = f"bench.{uuid.uuid4().hex[:8]}"
        admin = AIOKafkaAdminClient(bootstrap_servers=server.address)
        await admin.start()
        await admin.create_topics([NewTopic(topic, 3, 1), NewTopic(f"{topic}.bare", 3, 1)])
        await admin.close()
        producer = AIOKafkaProducer(bootstrap_servers=server.address, linger_ms=5)
        await producer.start()
        sent = [await producer.send(topic, record) for record in records]
        await asyncio.gather(*sent)
        await producer.stop()
        return {"topic": topic, "count": len(records)}

    async def bare(state: dict[str, Any]) -> float:
        topic = state["topic"]
        return await bare_kafka(server.address, topic, topic, f"{topic}.bare", state["count"])

    async def transport(state: dict[str, Any]) -> Transport:
        topic = state["topic"]
        return await _opened(
            f"kafka://{server.address}/{topic}?group={topic}&reply_topic={topic}.replies"
        )

    return Lane(server.kind, fill, bare, transport, server)


async def _opened(url: str) -> Transport:
    from actors.ports import SystemClock

    return await open_transport(parse_url(url), clock=SystemClock(), metrics=PrometheusMetrics())


def contestants(lane: Lane, requests: list[bytes]) -> dict[str, Callable[[], None]]:
    """The bare loop and the service on fresh records."""

    async def run_bare() -> float:
        return await lane.bare(await lane.fill(requests))

    async def run_service() -> float:
        state = await lane.fill(requests)
        return await service(await lane.transport(state), len(requests))

    def note(name: str, work: Callable[[], Awaitable[float]]) -> None:
        async def call() -> float:
            return await work()

        lane.seconds.setdefault(name, []).append(asyncio.run(call()))

    return {
        "bare loop": lambda: note("bare loop", run_bare),
        "embedstream": lambda: note("embedstream", run_service),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, 3 rounds")
    parser.add_argument("--transports", nargs="*", default=["inproc", "redis", "kafka"])
    parser.add_argument("--out", default="pipeline")
    arguments = parser.parse_args()
    rounds = min(arguments.rounds, 3) if arguments.quick else arguments.rounds
    scale = 4 if arguments.quick else 1
    configure_logging("info", "json", stream=io.StringIO())
    rows: list[list[object]] = []
    data: dict[str, Any] = {}
    for lane in _lanes(arguments.transports):
        with contextlib.closing(lane.server) if lane.server else contextlib.nullcontext():
            for n_items, count in ((1, 8000 // scale), (32, 1000 // scale)):
                lane.seconds.clear()
                work = contestants(lane, bodies(count, n_items))
                for warm in work.values():
                    warm()
                gc.collect()
                gc.freeze()  # as `serve` does
                lane.seconds.clear()
                samples = interleave({n: [w] for n, w in work.items()}, rounds, say=_say)
                rows.append(_row(lane, n_items, count, samples))
                data[f"{lane.name}, {n_items} a request"] = {
                    "requests": count, "inputs": count * n_items, "seconds": dict(lane.seconds),
                }  # fmt: skip
                print(rows[-1])
    header = ["transport", "inputs a request", "bare requests/s", "ours requests/s", "ours inputs/s",
              "bare / ours", "ms of ours per request beyond the bare loop", "cores used by others"]  # fmt: skip
    notes = (
        f"{rounds} interleaved rounds, medians. The bare loop (`benchmarks/_bare.py`) consumes, unpacks, packs a reply of "
        "384-wide rows, publishes with acknowledgement and commits; ours is the whole service around a model that costs "
        "nothing, with metrics and logging as shipped. Client, service and broker share the machine's cores."
    )
    path = write_results(
        arguments.out, "Pipeline: the service around no model", [notes, table(header, rows)], data
    )
    print(table(header, rows))
    print(f"written to {path}")


def _say(line: str) -> None:
    print(line, flush=True)


def _lanes(names: list[str]) -> list[Lane]:
    lanes = []
    if "inproc" in names:
        lanes.append(inproc())
    if "redis" in names:
        server = RedisServer()
        asyncio.run(server.start())
        lanes.append(redis(server))
    if "kafka" in names:
        home = os.environ.get("KAFKA_HOME")
        broker: LocalServer = ApacheKafka(home) if home else PackagedKafka()
        asyncio.run(broker.start())
        lanes.append(kafka(broker))
    return lanes


def _row(lane: Lane, n_items: int, count: int, samples: dict[str, list[Sample]]) -> list[object]:
    bare, ours = lane.seconds["bare loop"], lane.seconds["embedstream"]
    ratio = median([b / o for b, o in zip(ours, bare, strict=True)])
    extra = (median(ours) - median(bare)) / count * 1000
    others = median([s.others for taken in samples.values() for s in taken])
    return [
        lane.name, n_items, f"{count / median(bare):,.0f}", f"{count / median(ours):,.0f}",
        f"{count * n_items / median(ours):,.0f}", f"{ratio:.1f}", f"{extra:.3f}", f"{others:.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()

"""How soon is a changed document in the collection: idle, and beside a backfill into the same one.

    python -m benchmarks.freshness [--model all-MiniLM-L6-v2] [--seconds 20] [--rate 4] [--rounds 3]

Who calls it: a person. Two routes of one service share a LanceDB folder: live changes in the interactive
lane, at random moments, and a backfill in the bulk lane that never runs dry.
What must stay true: freshness counts from the moment a change is sent until its record is settled, which
is after the store has confirmed chunks and ledger; idle and beside the backfill take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks._common import machine, median
from pipeline.app import App
from pipeline.bench.workload import WORDS
from pipeline.demo.fetch import ensure_model
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.lifecycle import StopSignal
from pipeline.observe.logs import configure_logging
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import ExecutorSettings, ModelSettings, RouteSettings, Settings
from pipeline.transports.inproc.broker import InprocBroker
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import Transport

WORDS_OF_A_DOCUMENT = 60
LIVE_DOCUMENTS = 50
AHEAD = 512
"""Records of the backfill that wait in its queue."""


def body(rng: random.Random, name: str) -> bytes:
    """One version of a document, unlike any other."""
    text = " ".join(rng.choices(WORDS, k=WORDS_OF_A_DOCUMENT))
    return json.dumps({"id": name, "text": text}).encode()


@asynccontextmanager
async def service(
    model: str, folder: str, reserved: int
) -> AsyncIterator[tuple[InprocBroker, InprocBroker]]:
    """The queues of live changes and of the backfill of a running service."""
    document = DocumentOptions(id="id", text="{text}")
    brokers: dict[str, InprocBroker] = {}
    transports: dict[str, Transport] = {}
    routes = []
    for name, lane in (("live", "interactive"), ("backfill", "bulk")):
        options = InprocOptions(name=name, max_queued=AHEAD)
        brokers[name] = InprocBroker(options)
        source = InprocSource(brokers[name])
        await source.open()
        transports[name] = Transport(source, InprocSink(brokers[name]))
        routes.append(
            RouteSettings(
                name=name, source=f"inproc://{name}", destination=f"lance://{folder}#docs",
                lane=lane, document=document, chunk=ChunkOptions(by="tokens"),  # type: ignore[arg-type]
            )
        )  # fmt: skip
    settings = Settings(
        models={"m": ModelSettings(path=model)},
        routes=tuple(routes),
        executor=ExecutorSettings(reserved_threads=reserved),
    )
    app = App(settings, metrics=PrometheusMetrics(), transports=transports)
    stop = StopSignal(20.0)
    running = asyncio.create_task(app.run(stop))
    await asyncio.wait(
        {running, ready := asyncio.create_task(app.ready.wait())},
        return_when=asyncio.FIRST_COMPLETED,
    )
    ready.cancel()
    try:
        if not running.done():
            yield brokers["live"], brokers["backfill"]
    finally:
        stop.request("measured")
        await running


async def live(
    broker: InprocBroker, rng: random.Random, rate: float, seconds: float
) -> list[float]:
    """Seconds until each change was stored."""
    ages: list[float] = []

    async def change() -> None:
        sent = time.perf_counter()
        await broker.submit(body(rng, f"live-{rng.randrange(LIVE_DOCUMENTS)}"))
        ages.append(time.perf_counter() - sent)

    ends = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() < ends:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(change())
    return sorted(ages)


async def backfill(broker: InprocBroker, rng: random.Random, numbers: itertools.count[int]) -> None:
    """Documents without end."""
    while True:
        await broker.put(body(rng, f"old-{next(numbers)}"))


async def measure(arguments: argparse.Namespace) -> None:
    """Print one line per round and the medians."""
    configure_logging("info", "json", stream=io.StringIO())
    model = str(ensure_model(arguments.model))
    numbers, rng = itertools.count(), random.Random(1)
    p50: dict[str, list[float]] = {"idle": [], "beside a backfill": []}
    p99: dict[str, list[float]] = {"idle": [], "beside a backfill": []}
    with tempfile.TemporaryDirectory() as folder:
        async with service(model, folder, arguments.reserved) as (changes, documents):
            await live(changes, rng, arguments.rate, 3.0)
            for number in range(arguments.rounds):
                for name in p50:
                    settled, started = documents.settled, time.perf_counter()
                    filling = None
                    if name != "idle":
                        filling = asyncio.create_task(backfill(documents, rng, numbers))
                    ages = await live(changes, rng, arguments.rate, arguments.seconds)
                    rate = (documents.settled - settled) / (time.perf_counter() - started)
                    if filling is not None:
                        filling.cancel()
                        while documents.unsettled and number + 1 < arguments.rounds:
                            await asyncio.sleep(0.05)
                    p50[name].append(ages[len(ages) // 2])
                    p99[name].append(ages[max(0, -(-len(ages) * 99 // 100) - 1)])
                    print(
                        f"round {number + 1} {name}: {len(ages)} changes, p50 {1000 * p50[name][-1]:.0f} ms, "
                        f"p99 {1000 * p99[name][-1]:.0f} ms, backfill "
                        f"{rate:.0f} documents/s",
                        flush=True,
                    )
    ratio = median([b / a for a, b in zip(p99["idle"], p99["beside a backfill"], strict=True)])
    print(f"p99 beside a backfill / idle: {ratio:.1f} (median of {arguments.rounds} rounds)")
    print(", ".join(f"{k}: {v}" for k, v in machine().items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--reserved", type=int, default=1, help="executor.reserved_threads (auto is 0 below four)"
    )
    asyncio.run(measure(parser.parse_args()))

"""What somebody who waits feels of bulk work: RPC over Redis at a fixed rate, beside a Kafka backlog.

    python -m benchmarks.mixed [--rate 20] [--seconds 12] [--forward-ms 20]

Who calls it: a person. The service runs in a process of its own with a fake model, whose forward takes
`--forward-ms` however full the batch is: what is measured is waiting, not computing.
What must stay true: calls start at their times whether or not earlier ones were answered (an open
loop); where other work loads the machine, long forwards keep its noise out of the ratio (`--forward-ms 500
--rate 4 --seconds 40`); the backlog outlasts the measurement; the same traffic is measured alone, with its two lanes, and
in one queue in the order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from aiokafka import AIOKafkaProducer

from benchmarks._common import table
from benchmarks.client import quantile
from embedstream_client import AsyncClient
from pipeline.local.kafka import PackagedKafka
from pipeline.local.redis import RedisServer

ROOT = Path(__file__).parents[1]
TEXTS_PER_RECORD = 16
TOKENS_PER_TEXT = 8
BATCH_TOKENS = 512
AHEAD_S = 2.0
"""How long bulk work runs before the first call."""


@dataclass(frozen=True)
class Plan:
    """One measurement. lane: where the calls go; with_bulk: whether there is a backlog."""

    name: str
    lane: str
    with_bulk: bool


PLANS = (
    Plan("calls alone", "interactive", with_bulk=False),
    Plan("two lanes", "interactive", with_bulk=True),
    Plan("one queue", "bulk", with_bulk=True),
)


async def fill(bootstrap: str, topic: str, n_records: int) -> None:
    """A backlog of `n_records`."""
    text = " ".join(f"word{n}" for n in range(TOKENS_PER_TEXT))
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        sent = []
        for n in range(n_records):
            body = msgpack.packb({"id": f"{topic}-{n}", "input": [text] * TEXTS_PER_RECORD})
            sent.append(await producer.send(topic, body, partition=0))
        await asyncio.gather(*sent)


async def call(client: AsyncClient, number: int, took_ms: list[float]) -> None:
    began = time.perf_counter()
    await client.embed(f"question {number}")
    took_ms.append((time.perf_counter() - began) * 1000)


async def measure(
    plan: Plan, options: Any, redis: RedisServer, kafka: PackagedKafka
) -> tuple[str, ...]:
    """One row of the table."""
    name = uuid.uuid4().hex[:8]
    topic, stream = f"bulk.{name}", f"embedstream.rpc.{name}"
    per_second = BATCH_TOKENS / TOKENS_PER_TEXT / TEXTS_PER_RECORD * 1000 / options.forward_ms
    workers = os.cpu_count() or 1
    if plan.with_bulk:
        await fill(
            kafka.address, topic, int(per_second * workers * (options.seconds + AHEAD_S) * 1.5)
        )
    routes = [{"name": "rpc", "source": f"redis://{redis.address}/{stream}", "lane": plan.lane}]
    if plan.with_bulk:
        source = f"kafka://{kafka.address}/{topic}?group={name}&reply_topic=replies.{name}"
        routes.insert(0, {"name": "bulk", "source": source, "lane": "bulk"})
    config = {
        "routes": routes,
        "max_batch_tokens": BATCH_TOKENS,
        "forward_s": options.forward_ms / 1000,
        "drain_budget_s": 1.0,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(config))
        file.flush()
        service = subprocess.Popen(
            [sys.executable, "-m", "tests.support.service_main", file.name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert service.stdout is not None
            await asyncio.to_thread(service.stdout.readline)
            took_ms: list[float] = []
            url = f"redis://{redis.address}/0?stream={stream}"
            async with AsyncClient.from_url(url, timeout=300) as client:
                await client.embed("warm")
                await asyncio.sleep(AHEAD_S if plan.with_bulk else 0)
                began = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    for number in range(int(options.rate * options.seconds)):
                        at = began + number / options.rate
                        await asyncio.sleep(max(0.0, at - time.perf_counter()))
                        group.create_task(call(client, number, took_ms))
        finally:
            service.kill()
            service.wait()
    p50, p99 = quantile(took_ms, 0.5), quantile(took_ms, 0.99)
    full = options.forward_ms
    return plan.name, f"{len(took_ms)}", f"{p50:.1f}", f"{p99:.1f}", f"{p99 / full:.1f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=20.0, help="calls a second")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of one batch")
    options = parser.parse_args()
    redis, kafka = RedisServer(), PackagedKafka()
    await asyncio.gather(redis.start(), kafka.start())
    try:
        rows = [await measure(plan, options, redis, kafka) for plan in PLANS]
    finally:
        await asyncio.gather(redis.stop(), kafka.stop())
    print(
        f"{options.rate:g} calls/s, one full batch of {BATCH_TOKENS} tokens takes "
        f"{options.forward_ms:g} ms, load {os.getloadavg()[0]:.1f}"
    )
    print(table(("traffic", "calls", "p50 ms", "p99 ms", "p99 in full batches"), rows))


if __name__ == "__main__":
    asyncio.run(main())

"""What a call of the light client costs over Redis, at 1 to 1,000 concurrent callers.

    python -m benchmarks.client [--address host:port]

Who calls it: a person. A service with a fake model runs in a process of its own, on a Redis of its own
unless an address is given.
What must stay true: per number of callers it prints the whole call; the call without its forward (asking
over Redis and waiting for a place in a batch); the call without all time inside the service (client, Redis,
network); and the client's own CPU time, which depends least on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from embedstream_client import AsyncClient
from pipeline.local.redis import RedisServer

CALLERS = (1, 32, 500, 1000)
CALLS = 2000
ROOT = Path(__file__).parents[1]


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * q))]


async def measure(client: AsyncClient, n_callers: int) -> str:
    """One row: `n_callers` callers, each asking again as soon as it has its answer."""
    n_each = max(2, CALLS // n_callers)
    calls: list[tuple[float, float, float]] = []

    async def caller(number: int) -> None:
        for _ in range(n_each):
            began = time.perf_counter()
            result = await client.embed(f"caller {number}")
            took_ms = (time.perf_counter() - began) * 1000
            timings = result.timings
            assert timings is not None
            calls.append((took_ms, took_ms - timings.forward_ms, took_ms - timings.total_ms))

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(n_callers)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    columns = [
        f"{quantile(column, 0.5):8.2f} {quantile(column, 0.99):8.2f}"
        for column in zip(*calls, strict=True)
    ]
    rate, cpu_ms = len(calls) / wall, cpu / len(calls) * 1000
    return f"{n_callers:7d} {' '.join(columns)} {cpu_ms:8.2f} {rate:8.0f}"


async def run(address: str) -> None:
    """Start the service, print the table, stop the service."""
    stream = f"embedstream.bench.{uuid.uuid4().hex[:12]}"
    source = f"redis://{address}/{stream}"
    config = {
        "routes": [{"name": "r", "source": source, "lane": "interactive"}],
        "max_batch_tokens": 512,
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
            url = f"redis://{address}/0?stream={stream}"
            async with AsyncClient.from_url(url, timeout=300) as client:
                await client.embed("warm")
                print(
                    "                 call ms    without forward    without service  CPU ms  calls/s"
                )
                print("callers      p50      p99      p50      p99      p50      p99")
                for n_callers in CALLERS:
                    print(await measure(client, n_callers))
        finally:
            service.terminate()
            service.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="host:port of a Redis; one is started otherwise")
    address = parser.parse_args().address
    if address is not None:
        await run(address)
        return
    server = RedisServer()
    await server.start()
    try:
        await run(server.address)
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main())

"""What stays in Redis after many requests, and what lies there meanwhile.

    python -m benchmarks.redis_memory [--requests 100000] [--callers 500]

Who calls it: a person. A service with a fake model runs in a process of its own, on a Redis of its own.
What must stay true: memory is what Redis itself says (`used_memory`), before the first request, at its
highest while they run, and after the last reply, with the client still connected; then the client closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from benchmarks._common import table
from embedstream_client import AsyncClient
from pipeline.local.redis import RedisServer

ROOT = Path(__file__).parents[1]
LOOK_EVERY_S = 0.2


async def facts(server: Any) -> tuple[int, int]:
    """Bytes that Redis uses, and its keys."""
    return int((await server.info("memory"))["used_memory"]), int(await server.dbsize())


async def watch(server: Any, highest: list[int]) -> None:
    while True:
        used, _ = await facts(server)
        highest[0] = max(highest[0], used)
        await asyncio.sleep(LOOK_EVERY_S)


async def ask(client: AsyncClient, n_requests: int, n_callers: int) -> None:
    """`n_callers` callers, each asking again as soon as it has its answer."""
    left = iter(range(n_requests))

    async def caller() -> None:
        for number in left:
            await client.embed(f"request {number}")

    async with asyncio.TaskGroup() as group:
        for _ in range(n_callers):
            group.create_task(caller())


async def measure(kind: str, address: str, options: Any) -> list[tuple[str, ...]]:
    """Rows of one kind of source: `redis` or `redis-list`."""
    url = f"{kind}://{address}/embedstream.bench.{uuid.uuid4().hex[:12]}"
    config = {"routes": [{"name": "r", "source": url, "lane": "interactive"}]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps({**config, "max_batch_tokens": 512}))
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
            async with redis.Redis.from_url(f"redis://{address}") as server:
                async with AsyncClient.from_url(url, timeout=300) as client:
                    await ask(
                        client, 1000, options.callers
                    )  # its connections and buffers are there now
                    moments = {"before": await facts(server)}
                    highest = [0]
                    watching = asyncio.create_task(watch(server, highest))
                    await ask(client, options.requests, options.callers)
                    watching.cancel()
                    moments["highest"] = highest[0], 0
                    moments["after"] = await facts(server)
                moments["client closed"] = await facts(server)
        finally:
            service.terminate()
            service.wait()
    return [
        (kind, moment, f"{used / 2**20:.2f}", str(keys) if keys else "")
        for moment, (used, keys) in moments.items()
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--callers", type=int, default=500)
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for kind in ("redis", "redis-list"):
        server = RedisServer()
        await server.start()
        try:
            rows += await measure(kind, server.address, options)
        finally:
            await server.stop()
    print(f"{options.requests} requests, {options.callers} callers, load {os.getloadavg()[0]:.1f}")
    print(table(("source", "moment", "MiB", "keys"), rows))


if __name__ == "__main__":
    asyncio.run(main())

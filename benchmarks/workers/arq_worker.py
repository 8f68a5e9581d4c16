"""arq over Redis: https://arq-docs.helpmanual.io/ (`on_startup`; blocking work in an executor, "Synchronous
Jobs"; `job_timeout`, after which, and ten seconds, the jobs of a worker that died run again).

Run as ``arq benchmarks.workers.arq_worker.WorkerSettings``.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arq.connections import RedisSettings

from benchmarks.workers import ADDRESS, REQUESTS, load


async def startup(ctx: dict[str, Any]) -> None:
    ctx["model"] = load()
    ctx["pool"] = ThreadPoolExecutor(max_workers=1)


async def embed(ctx: dict[str, Any], text: str) -> bytes:
    loop = asyncio.get_running_loop()
    vector = await loop.run_in_executor(ctx["pool"], ctx["model"].encode, text)
    body: bytes = vector.tobytes()
    return body


class WorkerSettings:
    functions = [embed]  # noqa: RUF012  as its documentation writes it
    on_startup = startup
    redis_settings = RedisSettings.from_dsn(ADDRESS or "redis://localhost")
    queue_name = REQUESTS or "arq:queue"
    job_timeout = 10

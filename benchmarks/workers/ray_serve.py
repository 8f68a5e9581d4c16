"""Ray Serve's task consumer over Redis: its Celery adapter, a replica a core; or a consumer before a batch.

https://docs.ray.io/en/latest/serve/asynchronous-inference.html (an alpha): handlers are plain functions, results go
to the backend, tasks are acknowledged late; `max_ongoing_requests` is how many a replica has at once. Handlers see
one task each and cannot be `async`, so `serve.batch` does not fit on them: ``batch`` hands each text to a
deployment that batches (https://docs.ray.io/en/latest/serve/advanced-guides/dyn-req-batch.html and
https://docs.ray.io/en/latest/serve/model_composition.html), with the batch size and wait that are its defaults.
`visibility_timeout` is 20 s, as in `celery_app`. No HTTP proxy, no dashboard, no usage statistics.

It is in no extra: after `make bench`, ``.venv/bin/python -m pip --python .venv/peers install
'ray[serve-async-inference]' -c constraints.txt``, and everything by ``.venv/peers/bin/python``.
Run as ``python -m benchmarks.workers.ray_serve task``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import CeleryAdapterConfig, TaskProcessorConfig
from ray.serve.task_consumer import task_consumer, task_handler

from benchmarks.workers import ADDRESS, REQUESTS, load

BATCH = 10  # its default
CORES = len(os.sched_getaffinity(0))
TASKS = TaskProcessorConfig(
    queue_name=REQUESTS or "embed",
    adapter_config=CeleryAdapterConfig(
        broker_url=ADDRESS or "redis://localhost",
        backend_url=ADDRESS or "redis://localhost",
        broker_transport_options={"visibility_timeout": 20},
    ),
)


@serve.deployment(num_replicas=CORES, max_ongoing_requests=1)
@task_consumer(task_processor_config=TASKS)
class Embed:
    """A model in each replica; Ray gives each one thread, for its one CPU."""

    def __init__(self) -> None:
        self.model = load()

    @task_handler(name="embed")
    def embed(self, text: str) -> list[float]:
        vector: list[float] = self.model.encode(text).tolist()
        return vector


@serve.deployment(num_replicas=CORES, max_ongoing_requests=2 * BATCH)
class Batched:
    def __init__(self) -> None:
        self.model = load()

    @serve.batch(max_batch_size=BATCH)
    async def __call__(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = (await asyncio.to_thread(self.model.encode, texts)).tolist()
        return vectors


@serve.deployment(max_ongoing_requests=2 * BATCH * CORES, ray_actor_options={"num_cpus": 0})
@task_consumer(task_processor_config=TASKS)
class Consume:
    """Waits in a thread for each task, while the deployment behind it computes."""

    def __init__(self, batched: DeploymentHandle) -> None:
        self.batched = batched

    @task_handler(name="embed")
    def embed(self, text: str) -> list[float]:
        vector: list[float] = self.batched.remote(text).result()
        return vector


def main(batch: bool) -> None:
    ray.init(num_cpus=CORES, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    app: Any = Consume.bind(Batched.bind()) if batch else Embed.bind()
    serve.run(app, route_prefix=None, blocking=True)


if __name__ == "__main__":
    main(sys.argv[1] == "batch")

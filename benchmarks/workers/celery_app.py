"""Celery over Redis: prefork, a model in each process, acknowledged after the task.

https://docs.celeryq.dev/en/stable/userguide/tasks.html#tasks-acks-late (`acks_late` with
`reject_on_worker_lost` for tasks that may run twice), `worker_process_init` of its signals page, and the
`visibility_timeout` of https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html,
shortened from an hour to 20 s, so that what a dead worker held comes again while somebody watches.

Run as ``celery -A benchmarks.workers.celery_app worker``.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.signals import worker_process_init

from benchmarks.workers import ADDRESS, REQUESTS, load

app = Celery("bench", broker=ADDRESS, backend=ADDRESS)
app.conf.update(
    task_default_queue=REQUESTS or "celery",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_transport_options={"visibility_timeout": 20},
)
_model: Any = None


@worker_process_init.connect
def start(**_: object) -> None:
    global _model
    import torch

    torch.set_num_threads(1)  # one process a core
    _model = load()


@app.task(name="embed")
def embed(text: str) -> list[float]:
    vector: list[float] = _model.encode(text).tolist()
    return vector

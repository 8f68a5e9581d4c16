"""Small pieces of the graph for unit tests of single stations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from actors.messages import Entry, InFlight
from gpu.batch import EncodedItem, ExecutorDied, ExecutorHealth, ItemOutcome, PackedBatch, Runner
from schemas.requests import AnyRequest, EmbedRequest, Lane, TokenIds
from tests.support.fakes import FakeDelivery

_numbers = itertools.count()


def in_flight(
    request: AnyRequest, *, lane: Lane = "bulk", route: Any = None, model: str = "fake"
) -> InFlight:
    """An admitted request outside any service."""
    number = next(_numbers)
    return InFlight(
        request=request,
        route=route,
        model=model,
        lane=lane,
        address="inproc:x",
        admitted_at=0.0,
        cost_bytes=10,
        deliveries=[FakeDelivery()],
        join_key=(request.id, "route", "inproc:x", str(number).encode()),
    )


def entry(
    n_tokens: int, *, at: float = 0.0, deadline_ms: int | None = None, first_id: int = 1
) -> Entry:
    """One queued item of a request of its own."""
    ids = np.arange(first_id, first_id + n_tokens, dtype=np.int32)
    request = EmbedRequest(
        id=f"r{next(_numbers)}", input=(TokenIds(tuple(ids.tolist())),), deadline_ms=deadline_ms
    )
    return Entry(EncodedItem(ids), in_flight(request), 0, at, n_tokens)


class InlineExecutor:
    """Runs batches at once on the caller's thread, or keeps them until `release` when held."""

    def __init__(self, runner: Runner, *, width: int = 1, held: bool = False) -> None:
        self.runner = runner
        self.width = width
        self.held = held
        self.dead: str | None = None
        self.waiting: list[Callable[[], None]] = []

    def submit(self, model: str, batch: PackedBatch) -> Future[list[ItemOutcome]]:
        future: Future[list[ItemOutcome]] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self.dead is not None:
                future.set_exception(ExecutorDied(self.dead))
                return
            try:
                future.set_result(self.runner.forward(batch))
            except Exception as error:
                future.set_exception(error)

        if self.held:
            self.waiting.append(work)
        else:
            work()
        return future

    def release(self) -> None:
        """Run what was held."""
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()

    def health(self) -> ExecutorHealth:
        return ExecutorHealth(alive=self.dead is None, fatal=self.dead)

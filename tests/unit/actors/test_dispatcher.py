"""Dispatcher and coalescer together: order, failures, halving, a dead executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from actors.attempts import Attempts
from actors.coalescer import Coalescer
from actors.dispatcher import Dispatcher
from actors.messages import Entry, InFlight
from actors.packing import PackingPolicy
from actors.ports import SystemClock
from actors.supervisor import Supervisor
from gpu.batch import ExecutorDied, ItemOutcome, ItemResult, PackedBatch
from schemas.errors import EmbedstreamError, Internal, ModelError, NonFinite, OutOfMemory
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_vector
from tests.support.stations import InlineExecutor, entry


class Harness:
    """A coalescer and a dispatcher on an inline executor; outcomes by entry."""

    def __init__(self, runner: FakeRunner, *, budget: int = 64, held: bool = False) -> None:
        self.metrics = RecordingMetrics()
        self.outcomes: dict[int, ItemOutcome] = {}
        self.failed: list[tuple[InFlight, EmbedstreamError]] = []
        self.changed = asyncio.Event()
        clock = SystemClock()
        self.coalescer = Coalescer(
            {"fake": PackingPolicy(max_batch_tokens=budget)},
            max_queued_tokens=10**6,
            clock=clock,
            fail=lambda owner, error: self.failed.append((owner, error)),
        )
        self.executor = InlineExecutor(runner, held=held)
        self.supervisor = Supervisor(
            clock=clock, metrics=self.metrics, fatal_errors=(ExecutorDied,)
        )
        self.dispatcher = Dispatcher(
            self.coalescer,
            self.executor,
            spawn=self.supervisor.spawn,
            attempts=Attempts(),
            complete=self._complete,
            clock=clock,
            metrics=self.metrics,
        )

    def _complete(self, owner: InFlight, index: int, outcome: ItemOutcome) -> None:
        assert id(owner) not in self.outcomes, "answered twice"
        self.outcomes[id(owner)] = outcome
        self.changed.set()

    async def answered(self, entries: list[Entry]) -> list[ItemOutcome]:
        while not all(id(one.owner) in self.outcomes for one in entries):
            self.changed.clear()
            await self.changed.wait()
        return [self.outcomes[id(one.owner)] for one in entries]


@asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[Harness]:
    async with harness.supervisor:
        harness.supervisor.start("dispatcher", harness.dispatcher.run)
        yield harness


async def test_results_belong_to_their_items_over_many_batches() -> None:
    """A07: 200 items of random length in several batches; every vector is its own item's."""
    rng = np.random.default_rng(7)
    entries = [entry(int(n), first_id=i + 1) for i, n in enumerate(rng.integers(1, 60, 200))]
    async with running(Harness(FakeRunner())) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
    for one, outcome in zip(entries, outcomes, strict=True):
        assert isinstance(outcome, ItemResult) and outcome.dense is not None
        np.testing.assert_array_equal(outcome.dense, fake_vector(one.item.input_ids.tolist()))


async def test_only_the_poisoned_item_fails() -> None:
    """C01: a batch that raises is halved until the bad item is alone; the next batch works."""
    runner = FakeRunner(poison_id=500)
    entries = [entry(2, first_id=10 * i + 1) for i in range(20)]
    bad = entry(2, first_id=500)
    entries.insert(7, bad)
    async with running(Harness(runner)) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
        later = entry(3, first_id=900)
        await harness.coalescer.put("fake", [later], "bulk")
        (after,) = await harness.answered([later])
    assert isinstance(outcomes[7], ModelError) and outcomes[7].items == (0,)
    assert all(isinstance(one, ItemResult) for i, one in enumerate(outcomes) if i != 7)
    assert isinstance(after, ItemResult)


async def test_out_of_memory_halves_in_bounded_forwards() -> None:
    """C04: at most 2n - 1 forwards for n items, a single item that still fails is out_of_memory."""
    runner = FakeRunner(oom_tokens=8)
    entries = [entry(4, first_id=1 + 10 * i) for i in range(8)] + [entry(20, first_id=700)]
    async with running(Harness(runner)) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
    assert isinstance(outcomes[-1], OutOfMemory)
    assert all(isinstance(one, ItemResult) for one in outcomes[:-1])
    assert len(runner.batches) <= 2 * len(entries) - 1


async def test_a_non_finite_row_fails_alone_and_is_counted() -> None:
    """A03: NaN for one item of five; the other four are answered."""
    entries = [entry(3, first_id=1 + 10 * i) for i in range(5)]
    async with running(Harness(FakeRunner(nan_id=21))) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
    assert isinstance(outcomes[2], NonFinite)
    assert [isinstance(one, ItemResult) for one in outcomes] == [True, True, False, True, True]
    assert harness.metrics.counts["nonfinite_total"] == 1


async def test_expired_while_queued_is_failed_not_computed() -> None:
    """G10: the forward never sees it, the sender hears `expired`."""
    runner = FakeRunner()
    late = entry(3, deadline_ms=1)
    good = entry(3, first_id=50)
    async with running(Harness(runner)) as harness:
        await harness.coalescer.put("fake", [late, good], "bulk")
        await harness.answered([good])
    assert [error.code for _, error in harness.failed] == ["expired"]
    assert [batch.n_items for batch in runner.batches] == [1]


async def test_one_batch_runs_and_one_is_ready_no_more() -> None:
    harness = Harness(FakeRunner(max_batch_tokens=4), budget=4, held=True)
    async with running(harness):
        entries = [entry(4, first_id=1 + 10 * i) for i in range(6)]
        await harness.coalescer.put("fake", entries, "bulk")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(harness.executor.waiting) == 2 and harness.coalescer.queued_tokens() == 16
        harness.executor.held = False
        harness.executor.release()
        await harness.answered(entries)


async def test_a_dead_executor_is_fatal_and_answers_nobody() -> None:
    """G04, C11: unsettled work must go to others, so nothing is failed here."""
    harness = Harness(FakeRunner())
    harness.executor.dead = "CUDA error: device-side assert"
    async with running(harness):
        await harness.coalescer.put("fake", [entry(3)], "bulk")
        await harness.supervisor.wait_fatal()
    assert isinstance(harness.supervisor.fatal, ExecutorDied)
    assert "device-side assert" in str(harness.supervisor.fatal)
    assert harness.outcomes == {} and harness.failed == []


async def test_a_fault_that_a_model_calls_internal_fails_its_item_and_not_the_service() -> None:
    """Only the executor itself can say that it is dead."""

    def internal(batch: PackedBatch) -> None:
        raise Internal("a model's own fault")

    entries = [entry(3, first_id=1 + 10 * i) for i in range(2)]
    async with running(Harness(FakeRunner(before_forward=internal))) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
        assert harness.supervisor.fatal is None
    assert all(isinstance(outcome, Internal) for outcome in outcomes)


async def test_stopping_in_mid_forward_consumes_the_executor_result() -> None:
    """Rule 4: cancelling the dispatcher leaves no un-retrieved exception behind."""
    harness = Harness(FakeRunner(poison_id=1), held=True)
    async with running(harness):
        await harness.coalescer.put("fake", [entry(3)], "bulk")
        while not harness.executor.waiting:
            await asyncio.sleep(0)
    harness.executor.release()
    await asyncio.sleep(0)
    assert harness.outcomes == {}


async def test_interactive_work_of_any_model_goes_first() -> None:
    clock = SystemClock()
    coalescer = Coalescer(
        {name: PackingPolicy(max_batch_tokens=64, bulk_floor=0.0) for name in ("a", "b")},
        max_queued_tokens=10**6,
        clock=clock,
        fail=lambda owner, error: None,
    )
    await coalescer.put("a", [entry(3)], "bulk")
    await coalescer.put("b", [entry(3)], "interactive")
    first = coalescer.try_next_batch(idle=True)
    second = coalescer.try_next_batch(idle=True)
    assert first is not None and second is not None
    assert (first.model, second.model) == ("b", "a")


async def test_a_runner_that_returns_too_few_rows_fails_its_items_not_the_service() -> None:
    """C01: a broken contract is a failed batch; nobody waits for ever and nobody gets another's row."""

    class Short(FakeRunner):
        def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
            return super().forward(batch)[:-1]

    entries = [entry(3, first_id=1 + 10 * i) for i in range(3)]
    async with running(Harness(Short())) as harness:
        await harness.coalescer.put("fake", entries, "bulk")
        outcomes = await harness.answered(entries)
        assert harness.supervisor.fatal is None
    assert all(isinstance(outcome, ModelError) for outcome in outcomes)

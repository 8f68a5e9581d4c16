"""Dispatcher and coalescer together: order, failures, halving, a dead executor."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np

from actors.attempts import Attempts
from actors.coalescer import Coalescer
from actors.dispatcher import MAX_TAKEN_BACK, Dispatcher
from actors.messages import Entry, InFlight
from actors.packing import PackingPolicy
from actors.ports import SystemClock
from actors.supervisor import Supervisor
from gpu.batch import Executor, ExecutorDied, ItemOutcome, ItemResult, PackedBatch
from gpu.executor import ModelExecutor
from schemas.errors import EmbedstreamError, Internal, ModelError, NonFinite, OutOfMemory
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_vector
from tests.support.stations import InlineExecutor, entry


class Harness:
    """A coalescer and a dispatcher on an inline executor; outcomes by entry."""

    def __init__(
        self,
        runner: FakeRunner,
        *,
        budget: int = 64,
        held: bool = False,
        executor: Executor | None = None,
        reserved: int | None = None,
    ) -> None:
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
            executor or self.executor,
            spawn=self.supervisor.spawn,
            attempts=Attempts(),
            complete=self._complete,
            clock=clock,
            metrics=self.metrics,
            reserved=reserved,
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


# --- interactive work that comes while a batch of bulk waits behind the running one ---------------------


async def out(harness: Harness, n: int) -> None:
    """Until so many batches were handed to the executor, taken back ones included."""
    while len(harness.executor.waiting) < n:
        await asyncio.sleep(0)


async def test_a_waiting_batch_is_packed_again_with_the_interactive_item_in_it() -> None:
    """The item is in the next forward, not in the one after it; bulk keeps its order."""
    runner = FakeRunner(max_batch_tokens=4)
    harness = Harness(runner, budget=4, held=True)
    bulk = [entry(4, first_id=1 + 10 * i) for i in range(4)]
    question = entry(4, first_id=500)
    async with running(harness):
        await harness.coalescer.put("fake", bulk, "bulk")
        await out(harness, 2)
        assert bulk[1].owner.first_forward_at is not None
        await harness.coalescer.put("fake", [question], "interactive")
        await out(harness, 3)
        assert bulk[1].owner.first_forward_at is None  # and may be withdrawn
        harness.executor.held = False
        harness.executor.release()
        await harness.answered([*bulk, question])
    assert [int(batch.input_ids[0]) for batch in runner.batches] == [1, 500, 11, 21, 31]
    assert harness.metrics.counts["batches_packed_again_total"] == 1
    assert len(harness.metrics.observed["queue_wait_seconds"]) == 5


async def test_a_batch_is_packed_again_a_few_times_at_most() -> None:
    """Interactive items without end neither keep the event loop packing nor fill the executor's queue."""
    runner = FakeRunner(max_batch_tokens=40)
    harness = Harness(runner, budget=40, held=True)
    bulk = [entry(10, first_id=1 + 10 * i) for i in range(40)]
    questions = [entry(1, first_id=600 + i) for i in range(20)]
    async with running(harness):
        await harness.coalescer.put("fake", bulk, "bulk")
        await out(harness, 2)
        for n, question in enumerate(questions):
            await harness.coalescer.put("fake", [question], "interactive")
            await out(harness, min(2 + MAX_TAKEN_BACK, 3 + n))
        assert len(harness.executor.waiting) == 2 + MAX_TAKEN_BACK
        harness.executor.held = False
        harness.executor.release()
        await harness.answered([*bulk, *questions])
    assert sum(batch.n_items for batch in runner.batches) == 60, "computed twice, or never"


async def test_a_batch_of_redelivered_records_is_not_taken_back() -> None:
    """Its attempts are counted at the source around the step."""
    runner = FakeRunner(max_batch_tokens=4)
    harness = Harness(runner, budget=4, held=True)
    bulk = [entry(4, first_id=1 + 10 * i) for i in range(3)]
    noted: list[str] = []

    class Counting:
        async def attempt_begins(self, deliveries: object) -> None:
            noted.append("begins")

        async def attempt_came_back(self, deliveries: object) -> None:
            noted.append("came back")

    bulk[1].owner.redelivered = True
    bulk[1].owner.route = SimpleNamespace(source=Counting())  # type: ignore[assignment]
    async with running(harness):
        await harness.coalescer.put("fake", bulk, "bulk")
        await out(harness, 2)
        await harness.coalescer.put("fake", [entry(4, first_id=500)], "interactive")
        harness.executor.held = False
        harness.executor.release()
        await harness.answered(bulk)
    assert [int(batch.input_ids[0]) for batch in runner.batches][:2] == [1, 11]
    assert noted == ["begins", "came back"]


async def test_a_waiting_batch_of_another_model_makes_room_too() -> None:
    clock = SystemClock()
    coalescer = Coalescer(
        {name: PackingPolicy(max_batch_tokens=8, bulk_floor=0.25) for name in ("a", "b")},
        max_queued_tokens=10**6,
        clock=clock,
        fail=lambda owner, error: None,
    )
    await coalescer.put("a", [entry(8) for _ in range(20)], "bulk")
    chosen = []
    for _ in range(12):
        selected = coalescer.try_next_batch(idle=True)
        assert selected is not None
        await coalescer.put("b", [entry(8)], "interactive")
        if coalescer.would_gain(selected):
            coalescer.put_back(selected)
            selected = coalescer.try_next_batch(idle=True)
            assert selected is not None
        chosen.append(selected.model)
    assert chosen == ["b"] * 4 + ["a"] + ["b"] * 4 + ["a"] + ["b"] * 2


async def test_over_threads_nothing_is_lost_and_nothing_is_computed_twice() -> None:
    """A07: both lanes at once on a real executor of two threads, whose batches begin at any moment."""
    rng = np.random.default_rng(11)
    pauses = iter(rng.uniform(0, 0.003, 10_000).tolist())
    runner = FakeRunner(max_batch_tokens=64, before_forward=lambda _: time.sleep(next(pauses)))
    executor = ModelExecutor({"fake": lambda: runner}, 2)
    harness = Harness(runner, executor=executor)
    try:
        await asyncio.wrap_future(executor.load("fake"))
        entries: list[Entry] = []
        async with running(harness):
            for n in range(150):
                bulk = [entry(int(k), first_id=1 + 40 * (9 * n + i)) for i, k in
                        enumerate(rng.integers(1, 30, 8))]  # fmt: skip
                question = entry(3, first_id=1 + 40 * (9 * n + 8))
                await harness.coalescer.put("fake", bulk, "bulk")
                if n % 2:
                    await asyncio.sleep(float(rng.uniform(0, 0.004)))
                await harness.coalescer.put("fake", [question], "interactive")
                entries += [*bulk, question]
            await harness.answered(entries)
            for one in entries:
                outcome = harness.outcomes[id(one.owner)]
                assert isinstance(outcome, ItemResult) and outcome.dense is not None
                np.testing.assert_array_equal(
                    outcome.dense, fake_vector(one.item.input_ids.tolist())
                )
    finally:
        await asyncio.to_thread(executor.close, 10)
    assert sum(batch.n_items for batch in runner.batches) == len(entries)
    assert harness.metrics.counts["batches_packed_again_total"] > 0


async def test_reserved_threads_are_free_while_interactive_items_are_expected() -> None:
    """Bulk forwards that hold their threads hold up no interactive item; one thread stays for bulk."""
    go_on, bulk_id = threading.Event(), 7

    def block(batch: PackedBatch) -> None:
        if bulk_id in batch.input_ids:
            assert go_on.wait(30)

    runner = FakeRunner(max_batch_tokens=4, before_forward=block)
    executor = ModelExecutor({"fake": lambda: runner}, 2)
    await asyncio.wrap_future(executor.load("fake"))
    now = SystemClock().monotonic
    harness = Harness(runner, budget=4, executor=executor, reserved=9)
    bulk = [entry(4, first_id=bulk_id, at=now()) for _ in range(8)]
    try:
        async with running(harness):
            first = entry(4, first_id=100, at=now())
            await harness.coalescer.put("fake", [first], "interactive")
            await harness.answered([first])
            await harness.coalescer.put("fake", bulk, "bulk")
            while harness.dispatcher.n_out == 0:
                await asyncio.sleep(0)
            for number in range(3):  # then bulk has earned its share
                live = entry(4, first_id=200 + 10 * number, at=now())
                await harness.coalescer.put("fake", [live], "interactive")
                async with asyncio.timeout(30):
                    await harness.answered([live])
            go_on.set()
            await harness.answered(bulk)
    finally:
        go_on.set()
        executor.close(5.0)

"""The executor on fake runners: every future is resolved, whatever a model does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ExecutorDied, ItemResult, PackedBatch, pack
from gpu.executor import QUEUED_PER_THREAD, ModelExecutor
from gpu.faults import DeviceFault, DeviceMemoryError, as_runner_error
from schemas.errors import Overloaded, UnknownModel

WAIT_S = 20.0


class FakeRunner:
    """`forward` is what the test says; counts closes."""

    info: Any = None
    encoder: Any = None

    def __init__(self, forward: Callable[[PackedBatch], Any] | None = None) -> None:
        self._forward = forward
        self.closed = 0

    def forward(self, batch: PackedBatch) -> Any:
        if self._forward is not None:
            return self._forward(batch)
        return [ItemResult(dense=np.zeros(2, np.float32)) for _ in batch.items]

    def close(self) -> None:
        self.closed += 1


def batch(n: int = 2) -> PackedBatch:
    return pack([EncodedItem(np.ones(3, np.int32)) for _ in range(n)])


@pytest.fixture
def start() -> Iterator[Callable[..., ModelExecutor]]:
    """`start(runner, workers=1)` -> a started executor with model "m" loaded; closed afterwards."""
    made: list[ModelExecutor] = []

    def build(runner: Any, workers: int = 1, **kwargs: Any) -> ModelExecutor:
        executor = ModelExecutor({"m": lambda: runner}, workers, **kwargs)
        made.append(executor)
        executor.load("m").result(WAIT_S)
        return executor

    yield build
    for executor in made:
        executor.close(WAIT_S)


Start = Callable[..., ModelExecutor]


def test_an_exception_fails_its_batch_and_the_next_one_works(start: Start) -> None:
    """C01: the third batch raises; the fourth is answered, and health tells both."""
    calls = iter(range(1, 100))

    def forward(b: PackedBatch) -> Any:
        if next(calls) == 3:
            raise ValueError("boom")
        return [ItemResult() for _ in b.items]

    executor = start(FakeRunner(forward))
    for n in range(1, 5):
        future = executor.submit("m", batch())
        if n == 3:
            with pytest.raises(ValueError, match="boom"):
                future.result(WAIT_S)
            assert executor.health().consecutive_failures == 1
        else:
            assert len(future.result(WAIT_S)) == 2
    health = executor.health()
    assert health.alive and health.fatal is None and health.consecutive_failures == 0
    assert health.last_success_s is not None


def test_out_of_memory_passes_through_as_memory_error(start: Start) -> None:
    """C04."""

    def forward(b: PackedBatch) -> Any:
        raise DeviceMemoryError("CUDA out of memory")

    executor = start(FakeRunner(forward))
    with pytest.raises(MemoryError):
        executor.submit("m", batch()).result(WAIT_S)
    assert executor.health().fatal is None


def test_a_lost_device_is_fatal_for_good(start: Start) -> None:
    """G04, C11: the running, the waiting and every later batch end with ExecutorDied."""
    entered, go = threading.Event(), threading.Event()

    def forward(b: PackedBatch) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        raise DeviceFault("CUDA error: device-side assert triggered")

    executor = start(FakeRunner(forward))
    running = executor.submit("m", batch())
    assert entered.wait(WAIT_S)
    waiting = [executor.submit("m", batch()) for _ in range(3)]
    go.set()
    for future in [running, *waiting]:
        with pytest.raises(ExecutorDied, match="device"):
            future.result(WAIT_S)
    with pytest.raises(ExecutorDied):
        executor.submit("m", batch()).result(WAIT_S)
    health = executor.health()
    assert not health.alive and "device-side assert" in str(health.fatal)


def test_a_thread_that_dies_fails_everybody_at_once(start: Start) -> None:
    """C11, G04: SystemExit in a forward ends the thread; nothing waits for it."""

    def forward(b: PackedBatch) -> Any:
        raise SystemExit(1)

    executor = start(FakeRunner(forward), workers=2)
    with pytest.raises(ExecutorDied, match="thread ended"):
        executor.submit("m", batch()).result(WAIT_S)
    for thread in executor._threads:
        thread.join(WAIT_S / 100)
    with pytest.raises(ExecutorDied):
        executor.submit("m", batch()).result(WAIT_S)
    assert executor.health().fatal is not None and not executor.health().alive


def test_a_thread_that_cannot_start_fails_the_load() -> None:
    """C11."""

    def broken() -> None:
        raise RuntimeError("no such library")

    executor = ModelExecutor({"m": FakeRunner}, 1, thread_init=broken)
    with pytest.raises(ExecutorDied, match="RuntimeError"):
        executor.load("m").result(WAIT_S)
    assert executor.close(WAIT_S)


def test_a_failed_load_is_the_futures_and_a_phase(start: Start) -> None:
    """G07."""

    class Factory:
        phase = "reading weights"

        def __call__(self) -> Any:
            raise FileNotFoundError("model.safetensors")

    executor = ModelExecutor({"bad": Factory(), "good": FakeRunner}, 1)
    try:
        assert executor.phases() == {"bad": "waiting", "good": "waiting"}
        with pytest.raises(FileNotFoundError):
            executor.load("bad").result(WAIT_S)
        assert executor.load("good").result(WAIT_S) is executor.load("good").result(WAIT_S)
        assert executor.phases() == {"bad": "failed", "good": "ready"}
        with pytest.raises(UnknownModel):
            executor.load("other").result(WAIT_S)
        with pytest.raises(UnknownModel):
            executor.submit("bad", batch()).result(WAIT_S)
    finally:
        executor.close(WAIT_S)


def test_the_phase_is_visible_while_a_model_loads() -> None:
    """G07."""
    entered, go = threading.Event(), threading.Event()

    class Factory:
        phase = "waiting"

        def __call__(self) -> Any:
            self.phase = "loading weights"
            entered.set()
            assert go.wait(WAIT_S)
            return FakeRunner()

    executor = ModelExecutor({"m": Factory()}, 1)
    try:
        future = executor.load("m")
        assert entered.wait(WAIT_S)
        assert executor.phases() == {"m": "loading weights"}
        assert executor.health().oldest_running_s is None  # a load is no stuck forward
        go.set()
        future.result(WAIT_S)
        assert executor.phases() == {"m": "ready"}
    finally:
        go.set()
        executor.close(WAIT_S)


def test_width_batches_run_at_once_and_thread_init_runs_on_each_thread() -> None:
    together = threading.Barrier(3)
    threads: set[int] = set()

    def forward(b: PackedBatch) -> Any:
        together.wait(WAIT_S)
        return [ItemResult() for _ in b.items]

    executor = ModelExecutor(
        {"m": lambda: FakeRunner(forward)},
        3,
        thread_init=lambda: threads.add(threading.get_ident()),
    )
    try:
        executor.load("m").result(WAIT_S)
        for future in [executor.submit("m", batch()) for _ in range(3)]:
            future.result(WAIT_S)
        assert executor.width == 3 and len(threads) == 3
    finally:
        executor.close(WAIT_S)


def test_a_full_queue_refuses_instead_of_growing(start: Start) -> None:
    entered, go = threading.Event(), threading.Event()

    def forward(b: PackedBatch) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        return []

    executor = start(FakeRunner(forward))
    first = executor.submit("m", batch())
    assert entered.wait(WAIT_S)
    waiting = [executor.submit("m", batch()) for _ in range(QUEUED_PER_THREAD)]
    with pytest.raises(Overloaded):
        executor.submit("m", batch()).result(WAIT_S)
    assert executor.health().n_running == 1
    go.set()
    assert [f.result(WAIT_S) for f in [first, *waiting]] == [[]] * (QUEUED_PER_THREAD + 1)


def test_a_cancelled_future_is_skipped(start: Start) -> None:
    entered, go = threading.Event(), threading.Event()
    seen: list[int] = []

    def forward(b: PackedBatch) -> Any:
        seen.append(b.n_items)
        entered.set()
        assert go.wait(WAIT_S)
        return []

    executor = start(FakeRunner(forward))
    first = executor.submit("m", batch(1))
    assert entered.wait(WAIT_S)
    second, third = executor.submit("m", batch(2)), executor.submit("m", batch(3))
    assert second.cancel()
    go.set()
    first.result(WAIT_S)
    third.result(WAIT_S)
    assert seen == [1, 3]


def test_close_is_bounded_fails_what_waits_and_drops_models(start: Start) -> None:
    """C11."""
    entered, go = threading.Event(), threading.Event()

    def forward(b: PackedBatch) -> Any:
        entered.set()
        assert go.wait(WAIT_S)
        return []

    runner = FakeRunner(forward)
    executor = start(runner)
    running = executor.submit("m", batch())
    assert entered.wait(WAIT_S)
    waiting = executor.submit("m", batch())
    assert (
        executor.close(0.01) is False
    )  # the forward still runs; its model is not dropped under it
    assert runner.closed == 0
    with pytest.raises(ExecutorDied, match="stopping"):
        waiting.result(WAIT_S)
    with pytest.raises(ExecutorDied, match="stopping"):
        executor.submit("m", batch()).result(WAIT_S)
    go.set()
    assert running.result(WAIT_S) == []
    assert executor.close(WAIT_S) is True and executor.close(WAIT_S) is True
    assert runner.closed == 1


def test_no_thread_is_no_executor() -> None:
    """C13."""
    with pytest.raises(ValueError, match="at least one"):
        ModelExecutor({}, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", MemoryError),
        (
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory",
            MemoryError,
        ),
        ("could not create a memory object", MemoryError),
        ("CUDA error: device-side assert triggered", DeviceFault),
        ("CUDA error: an illegal memory access was encountered", DeviceFault),
        ("The size of tensor a (3) must match", RuntimeError),
    ],
)
def test_torch_errors_are_sorted(text: str, expected: type[Exception]) -> None:
    """C04, G04."""
    assert type(as_runner_error(RuntimeError(text))).__mro__.__contains__(expected)
    assert isinstance(as_runner_error(MemoryError(text)), MemoryError)


def test_an_executor_imports_no_torch() -> None:
    """The layer's promise: `gpu.executor` alone stays light."""
    import subprocess
    import sys

    code = "import sys, gpu.executor, gpu.load; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_batch_that_was_taken_back_is_not_computed_and_frees_its_place(start: Start) -> None:
    """Its caller may put another in its place, as often as it likes."""
    begun, go = threading.Event(), threading.Event()
    seen: list[int] = []

    def forward(b: PackedBatch) -> Any:
        seen.append(b.n_items)
        begun.set()
        assert go.wait(WAIT_S)
        return [ItemResult() for _ in b.items]

    executor = start(FakeRunner(forward))
    running = executor.submit("m", batch(1))
    assert begun.wait(WAIT_S)
    assert not running.cancel()
    for _ in range(3 * QUEUED_PER_THREAD):
        assert executor.submit("m", batch(2)).cancel()
    last = executor.submit("m", batch(3))
    go.set()
    assert len(last.result(WAIT_S)) == 3 and len(running.result(WAIT_S)) == 1
    assert seen == [1, 3]

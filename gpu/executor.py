"""The threads that own the models of one device: batches in, futures of outcomes out.

Who calls it: `pipeline/model_pool.py` loads models through it, the dispatcher submits batches.
What must stay true: an exception in a model resolves its future and never ends a thread; every future
handed out is resolved, also when a thread dies, the device is lost or the executor closes; once fatal,
always fatal: nothing waits for an executor that cannot answer; a thread without a batch computes parts of
another's (`gpu.device.intra_op`). No torch here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpu.batch import ExecutorDied, ExecutorHealth, ItemOutcome, PackedBatch, Runner
from gpu.device.cores import n_threads, usable_cores
from gpu.device.heap import HeapTrim
from gpu.device.intra_op import Lent, Part, lending
from gpu.faults import DeviceFault
from schemas.errors import Overloaded, UnknownModel

QUEUED_PER_THREAD = 8
"""Batches that may wait per thread. The dispatcher keeps one or two; more is a bug upstream."""

Factory: TypeAlias = Callable[[], Runner]


@dataclass(slots=True)
class _Job:
    """work: runs on a thread. future: what its caller waits for. forward: counts for health."""

    work: Callable[[], Any]
    future: Future[Any]
    forward: bool
    started_s: float = field(default=0.0)


class ModelExecutor:
    """Implements `gpu.batch.Executor`.

    Args:
        factories: by model name; called once, on one of the threads. A factory may have `phase` (text,
            readable from any thread) and `thread_init` (run once on every thread before its first job).
        workers: threads, and so batches that run at once; None: `gpu.device.cores.n_threads`.
        thread_init: instead of the factories' own.
    """

    def __init__(
        self,
        factories: Mapping[str, Factory],
        workers: int | None = None,
        *,
        thread_init: Callable[[], None] | None = None,
    ) -> None:
        self.width = n_threads(len(usable_cores())) if workers is None else workers
        if self.width < 1:
            raise ValueError(f"an executor needs at least one thread, not {workers}")
        self._factories = dict(factories)
        self._inits = _thread_inits(self._factories, thread_init)
        self._runners: dict[str, Runner] = {}
        self._loads: dict[str, Future[Runner]] = {}
        self._queue: queue.SimpleQueue[_Job | Part[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._running: dict[int, _Job] = {}
        self._fatal: str | None = None
        self._closing = False
        self._last_success_s: float | None = None
        self._failures = 0
        self._heap = HeapTrim()
        self._lent = Lent(self._queue.put, self._idle_for_each)
        self._threads = [
            threading.Thread(target=self._run, name=f"executor-{i}", daemon=True)
            for i in range(self.width)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, model: str) -> Future[Runner]:
        """Load a model on one of the threads; a second call gives the same future.

        Resolves to what the factory raised, `UnknownModel`, or `ExecutorDied` after close or a fault.
        """
        with self._lock:
            known = self._loads.get(model)
            if known is not None:
                return known
            future: Future[Runner] = Future()
            if model not in self._factories:
                future.set_exception(UnknownModel(f"no model of the name {model!r} is configured"))
                return future
            self._loads[model] = future
        self._enqueue(_Job(lambda: self._load(model), future, forward=False))
        return future

    def submit(self, model: str, batch: PackedBatch) -> Future[list[ItemOutcome]]:
        """See `gpu.batch.Executor`. `Overloaded` when more wait than any caller should have out."""
        future: Future[list[ItemOutcome]] = Future()
        runner = self._runners.get(model)
        if runner is None and self._fatal is None and not self._closing:
            future.set_exception(UnknownModel(f"model {model!r} is not loaded"))
            return future
        self._enqueue(_Job(lambda: self._forward(model, batch), future, forward=True))
        return future

    def phases(self) -> dict[str, str]:
        """How far each model's load is: "waiting", the factory's own word, "ready" or "failed"."""
        phases: dict[str, str] = {}
        for name, factory in self._factories.items():
            future = self._loads.get(name)
            if future is None:
                phases[name] = "waiting"
            elif not future.done():
                phases[name] = str(getattr(factory, "phase", "loading"))
            else:
                failed = future.cancelled() or future.exception() is not None
                phases[name] = "failed" if failed else "ready"
        return phases

    def health(self) -> ExecutorHealth:
        """Counts forwards only: a load may take minutes and has its own phase."""
        with self._lock:
            started = [job.started_s for job in self._running.values() if job.forward]
            return ExecutorHealth(
                alive=self._fatal is None and all(t.is_alive() for t in self._threads),
                fatal=self._fatal,
                last_success_s=self._last_success_s,
                oldest_running_s=min(started, default=None),
                n_running=len(started),
                consecutive_failures=self._failures,
            )

    def close(self, timeout_s: float) -> bool:
        """Fail what waits, let what runs finish within the time, drop the models.

        Returns whether all threads ended; a thread that sits in native code is left to the exit of
        the process, and its model is not dropped under it. Idempotent.
        """
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._fail_waiting("the service is stopping")
            for _ in self._threads:
                self._queue.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            runners, self._runners = self._runners, {}
            for runner in runners.values():
                runner.close()
        return ended

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            reason = self._fatal or ("the service is stopping" if self._closing else None)
            full = self._waiting >= self.width * QUEUED_PER_THREAD and job.forward
            if reason is None and not full:
                self._waiting += 1
                job.future.add_done_callback(self._note_cancelled)
                self._queue.put(job)
                return
        if reason is not None:
            job.future.set_exception(ExecutorDied(reason))
        else:
            job.future.set_exception(Overloaded("too many batches wait for the executor"))

    def _note_cancelled(self, future: Future[Any]) -> None:
        """Its caller took it back: the thread that comes to it goes on to the next."""
        if future.cancelled():
            with self._lock:
                self._waiting -= 1

    def _run(self) -> None:
        """One thread. Only a fatal fault or close ends it."""
        told = "an executor thread ended"
        try:
            for init in self._inits:
                init()
            while (job := self._queue.get()) is not None:
                if isinstance(job, Part):
                    job.run()
                    continue
                if not job.future.set_running_or_notify_cancel():
                    continue
                with self._lock:
                    self._waiting -= 1
                self._execute(job)
                self._heap.when_due()
        except BaseException as error:  # noqa: BLE001 - told through health and every future
            told = f"an executor thread ended: {type(error).__name__}"
        finally:
            if not self._closing:
                self._latch(told)

    def _execute(self, job: _Job) -> None:
        me = threading.get_ident()
        job.started_s = time.monotonic()
        with self._lock:
            self._running[me] = job
        result: Any = None
        fault: BaseException | None = None
        try:
            result = job.work()
        except BaseException as error:  # noqa: BLE001 - resolves the future, then is judged
            fault = error
        with self._lock:
            del self._running[me]
            if job.forward and fault is None:
                self._last_success_s, self._failures = time.monotonic(), 0
            elif job.forward:
                self._failures += 1
        if fault is None:
            job.future.set_result(result)
        elif isinstance(fault, DeviceFault):
            self._latch(f"the device is lost: {fault}")
            job.future.set_exception(ExecutorDied(f"the device is lost: {fault}"))
        elif isinstance(fault, Exception):
            job.future.set_exception(fault)
        else:  # SystemExit, KeyboardInterrupt: this thread ends, and `_run` latches
            job.future.set_exception(
                ExecutorDied(f"an executor thread ended: {type(fault).__name__}")
            )
            raise fault

    def _load(self, model: str) -> Runner:
        runner = self._factories[model]()
        self._runners[model] = runner
        return runner

    def _forward(self, model: str, batch: PackedBatch) -> list[ItemOutcome]:
        with lending(self._lent):
            return self._runners[model].forward(batch)

    def _idle_for_each(self) -> int:
        """Threads without a job, for each of those with one."""
        running = len(self._running)
        return (self.width - running) // running if running else 0

    def _latch(self, reason: str) -> None:
        """Refuse work for good, and fail what waits."""
        with self._lock:
            if self._fatal is None:
                self._fatal = reason
        self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        stops = 0
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                stops += 1
                continue
            if isinstance(job, Part):  # who wants it computes it
                continue
            if job.future.set_running_or_notify_cancel():
                with self._lock:
                    self._waiting -= 1
                job.future.set_exception(ExecutorDied(reason))
        for _ in range(stops):  # another thread's word to stop
            self._queue.put(None)


def _thread_inits(
    factories: Mapping[str, Factory], given: Callable[[], None] | None
) -> list[Callable[[], None]]:
    if given is not None:
        return [given]
    own = (getattr(factory, "thread_init", None) for factory in factories.values())
    return [init for init in own if init is not None]

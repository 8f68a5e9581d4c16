"""The supervisor: owns the TaskGroup that every task of the service lives in.

Who calls it: `pipeline.app` starts the actors through it; the dispatcher spawns batch tasks.
What must stay true: no task without a parent; a crashed actor is restarted with back-off, within a
budget, and anything beyond the budget (or marked fatal) ends the service with its reason; stopping
cancels what is left and waits for it; CancelledError is never swallowed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

from actors.backoff import Backoff
from actors.ports import Clock, Metrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` within `window_s`; waits double, with jitter."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


NO_RESTART = RestartPolicy(max_restarts=0)

CANCEL_AGAIN_S = 2.0
"""Shorter: a slow clean-up is cut off. Longer: a lost cancellation delays the exit for that long."""


class Supervisor:
    """Async context manager around one TaskGroup.

    Args:
        fatal_errors: exception types that are never restarted.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        metrics: Metrics,
        fatal_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._fatal_errors = fatal_errors
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fatal: BaseException | None = None
        self.fatal_actor: str | None = None
        self._ended = asyncio.Event()
        self._stopping = False
        self._again: asyncio.TimerHandle | None = None
        self.restarts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._cancel_all()
        if isinstance(exc, Exception):  # it comes out as it was raised, not in a group
            exc_type = exc = traceback = None
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        finally:
            if self._again is not None:
                self._again.cancel()

    def _cancel_all(self) -> None:
        """Now, and again while a task has not ended: some libraries swallow a cancellation."""
        for task in self._tasks:
            task.cancel()
        self._again = asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel_all)

    def start(
        self,
        name: str,
        body: Callable[[], Coroutine[Any, Any, None]],
        policy: RestartPolicy | None = None,
    ) -> asyncio.Task[None]:
        """Run an actor until it returns; restart it by `policy` when it raises."""
        return self._adopt(self._supervise(name, body, policy or RestartPolicy()), name)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a short task once. If it raises, that is a bug: logged, counted and fatal."""
        return self._adopt(self._once(name, coroutine), name)

    def _adopt(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _once(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001  boundary: the parent of every task
            self._end(name, error)

    async def _supervise(
        self, name: str, body: Callable[[], Coroutine[Any, Any, None]], policy: RestartPolicy
    ) -> None:
        crashes: deque[float] = deque()
        while True:
            try:
                await body()
            except self._fatal_errors as error:
                self._end(name, error)
                return
            except Exception as error:
                if self._stopping:  # its clean-up failed: a restart would outlive the cancellation
                    log.error("actor_failed_while_stopping", actor=name, exc_info=error)
                    return
                now = self._clock.monotonic()
                while crashes and now - crashes[0] > policy.window_s:
                    crashes.popleft()
                if len(crashes) >= policy.max_restarts:
                    self._end(name, error)
                    return
                backoff_s = Backoff(
                    policy.first_backoff_s, policy.max_backoff_s, tries=len(crashes)
                ).next_s()
                crashes.append(now)
                self.restarts[name] = self.restarts.get(name, 0) + 1
                self._metrics.count("actor_restarts_total", actor=name)
                log.error(
                    "actor_crashed",
                    actor=name,
                    error_type=type(error).__name__,
                    restart_in_s=backoff_s,
                    exc_info=error,
                )
                await asyncio.sleep(backoff_s)
            else:
                return

    def _end(self, name: str, error: BaseException) -> None:
        log.error(
            "actor_failed_for_good", actor=name, error_type=type(error).__name__, exc_info=error
        )
        if self.fatal is None:
            self.fatal, self.fatal_actor = error, name
        self._ended.set()

    async def wait_fatal(self) -> None:
        """Wait until an actor failed for good; `fatal` says why."""
        await self._ended.wait()

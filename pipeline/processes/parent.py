"""`serve --processes N`: N processes, each a service of its own, under one parent.

Who calls it: `pipeline.cli.serve`.

    start    the first alone: what is wrong is said once, and libraries are measured on a quiet machine;
             once it is ready, all others together
    run      a process that ends is started again, after a wait that doubles
    stop     a signal is passed on to each of them, a second one too; the worst status is the whole's

What must stay true: the parent loads no model and holds no request, so that its death loses nothing;
every process ends with it (`pipeline.processes.member`); members of groups are the processes, never
the parent; the health port is the parent's and speaks for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from actors.backoff import Backoff
from actors.ports import Clock, SystemClock
from gpu.device.cores import n_threads, usable_cores
from pipeline.lifecycle import FORCE_GRACE_S, CutShort, ExitStatus, StopSignal, beside, race
from pipeline.observe.http import HealthServer, HealthViews
from pipeline.observe.metric_table import BY_NAME
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.observe.readiness import READY_PHASE, Readiness
from pipeline.processes.member import BEYOND_BUDGET_S, Member, packed
from pipeline.processes.merged import Seen, ask, merge_metrics
from pipeline.processes.shares import shares
from pipeline.settings.records import Settings

log = structlog.get_logger(__name__)

LOOK_S = 1.0
"""How often each process is asked how it is: so old may be what the health port says."""
ANSWER_S = 2.0
HUNG_S = 10.0
"""A process that has answered and does not for this long hangs: `/live` says so."""
SETTLED_S = 60.0
"""A process that was ready this long is no longer on trial: its next end counts as the first."""
GIVE_UP_AFTER = 5
"""Starts in a row of every process that did not become ready: then the platform may try."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_METRICS = ("process_up", "process_restarts_total")


@dataclass(slots=True)
class Child:
    """One process, through all of its lives. listener: the socket on which each of them answers."""

    number: int
    cores: tuple[int, ...]
    listener: socket.socket
    process: asyncio.subprocess.Process | None = None
    seen: Seen | None = None
    ready_s: float | None = None
    """Since when this life is ready, by the monotonic clock."""
    status: int | None = None
    """Of the last life that ended; below zero: the signal that ended it."""
    starts: int = 0
    failures: int = 0
    """Lives in a row that never became ready."""
    wait: Backoff = field(default_factory=lambda: Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S))

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Parent:
    """The processes of one service.

    Args:
        settings: of the service; `executor.processes` of them are started.
        command: how a process is started, without its place; `again` gives that of this one.

    Raises:
        OperatorError: the cores do not suffice.
    """

    def __init__(
        self, settings: Settings, command: Sequence[str], *, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._command = list(command)
        self._clock = clock or SystemClock()
        self._metrics = PrometheusMetrics([BY_NAME[name] for name in _METRICS])
        divided = shares(settings, usable_cores())
        self.children = [Child(n, cores, _listener()) for n, cores in enumerate(divided, 1)]
        self.health = HealthServer(
            settings.health,
            HealthViews(self.readiness, self.statistics, self.metrics, hung=self.hung),
        )
        self._stop = StopSignal(settings.lifecycle.drain_budget_s)
        self._opened = asyncio.Event()
        self._gave_up: ExitStatus | None = None
        self._ends: set[int] = set()
        """Statuses of those that ended after the request to stop."""

    async def run(self, stop: StopSignal) -> ExitStatus:
        """Until `stop` is requested and all have drained, or none of them can be kept alive."""
        self._stop = stop
        await self.health.open()
        try:
            async with beside(self._pass_on()), asyncio.TaskGroup() as group:
                for child in self.children:
                    group.create_task(self._keep(child))
        finally:
            await self.health.aclose()
            for child in self.children:
                child.listener.close()
        status = self._status()
        log.info("service_stopped", status=status.name, reason=stop.reason)
        return status

    # --- starting, and starting again ------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        """One process and its successors, until the stop."""
        if child is not self.children[0] and not await self._before_stop(self._opened.wait()):
            return
        while not self._stop.requested:
            try:
                await self._live(child)
            except OSError as error:  # no process, no memory: as one that ended at once
                log.error("process_not_started", process=child.number, error=error.strerror)
                child.status = ExitStatus.ERROR
            if self._stop.requested:
                self._ends.add(child.status or 0)
                return
            if not self._tries_again(child):
                self._gave_up = _as_exit_status(child.status)
                self._stop.request(f"process {child.number} cannot be kept alive")
                return
            self._metrics.count("process_restarts_total", process=str(child.number))
            wait_s = child.wait.next_s()
            log.warning(
                "process_restarts", process=child.number, in_s=round(wait_s, 1), after=child.status
            )
            await self._before_stop(asyncio.sleep(wait_s))

    async def _before_stop(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Wait for `work`; false when the stop came first."""
        try:
            await race(work, self._stop.wait())
        except CutShort:
            return False
        return True

    async def _live(self, child: Child) -> None:
        """One life: from its start to its end."""
        child.seen, child.ready_s = None, None
        child.starts += 1
        self._metrics.gauge("process_up", 0.0, process=str(child.number))
        place = Member(
            number=child.number,
            of=len(self.children),
            cores=child.cores if hasattr(os, "sched_setaffinity") else (),
            health=child.listener.fileno(),
        )
        child.process = await asyncio.create_subprocess_exec(
            *self._command,
            "serve",
            "--member",
            msgspec.json.encode(place).decode(),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(place.health,),
            env={"OMP_NUM_THREADS": str(len(child.cores)), **os.environ},
            start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
        )
        log.info(
            "process_started",
            process=child.number,
            pid=child.process.pid,
            n_cores=len(child.cores),
        )
        if self._stop.requested:  # while it was being started
            child.signal(signal.SIGTERM)
        assert child.process.stdin is not None
        with suppress(ConnectionError):  # it ended at once: its status tells
            child.process.stdin.write(packed(self._settings_of(child)))
            await child.process.stdin.drain()
        async with beside(self._look(child)):
            child.status = await child.process.wait()
        child.process.stdin.close()
        self._metrics.gauge("process_up", 0.0, process=str(child.number))
        log.log(
            20 if child.status == 0 else 40,
            "process_ended",
            process=child.number,
            status=_status_name(child.status),
        )

    def _settings_of(self, child: Child) -> Settings:
        executor = self._settings.executor
        if executor.cpu_workers == "auto":
            threads = n_threads(len(child.cores), executor.processes)
            executor = msgspec.structs.replace(executor, cpu_workers=threads)
        return msgspec.structs.replace(self._settings, executor=executor)

    async def _look(self, child: Child) -> None:
        """Ask one process again and again how it is."""
        while True:
            seen: Seen | None = None  # not up yet, or it hangs: the age of the last answer tells
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                async with asyncio.timeout(ANSWER_S):
                    seen = await ask(child.port, self._clock.monotonic())
            if seen is not None:
                child.seen = seen
                if seen.readiness.ready and child.ready_s is None:
                    child.ready_s = seen.at_s
                    child.failures = 0
                    log.info("process_ready", process=child.number)
                    self._metrics.gauge("process_up", 1.0, process=str(child.number))
                    self._opened.set()
            await asyncio.sleep(LOOK_S)

    def _tries_again(self, child: Child) -> bool:
        """Whether a process that ended by itself is worth another start."""
        if child.status == ExitStatus.USAGE or not self._opened.is_set():
            return False
        if child.ready_s is None:
            child.failures += 1
        elif self._clock.monotonic() - child.ready_s >= SETTLED_S:
            child.wait.reset()
        return any(one.failures < GIVE_UP_AFTER for one in self.children)

    # --- stopping --------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Signals to every process; what outlasts all patience is killed: its work comes again."""
        await self._stop.wait()
        self._signal(signal.SIGTERM)
        assert self._stop.deadline is not None
        patience_s = self._stop.deadline.remaining_s() + BEYOND_BUDGET_S
        try:
            await race(asyncio.sleep(patience_s), self._stop.wait_forced())
        except CutShort:
            self._signal(self._stop.forced_by or signal.SIGTERM)
            await asyncio.sleep(FORCE_GRACE_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _status(self) -> ExitStatus:
        """Of the whole: the worst that happened."""
        if self._gave_up is not None:
            return self._gave_up
        forced = self._stop.forced_by
        if forced is not None and ExitStatus.FATAL not in self._ends:
            return ExitStatus.FORCED_INT if forced == signal.SIGINT else ExitStatus.FORCED_TERM
        # 143, or SIGTERM before there was a handler, is one that held nothing yet. What another signal
        # killed left its work to others.
        begun = self._ends - {-signal.SIGTERM}
        ends = (ExitStatus.DRAIN_EXCEEDED if end < 0 else end for end in begun)
        return max(
            (_as_exit_status(e) for e in ends if e <= ExitStatus.FATAL), default=ExitStatus.OK
        )

    # --- looking in ------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Ready when every process is; else whatever each of them says."""
        reasons = [reason for child in self.children for reason in self._reasons(child)]
        phase = READY_PHASE if not reasons else "starting"
        if self._stop.requested:
            phase = "draining"
        elif self._opened.is_set() and reasons:
            phase = "incomplete"
        return Readiness(phase == READY_PHASE, phase, tuple(reasons))

    def _reasons(self, child: Child) -> Iterator[str]:
        who = f"process {child.number}"
        if child.process is None:
            yield f"{who}: not started yet"
        elif child.process.returncode is not None:
            yield f"{who}: ended ({_status_name(child.process.returncode)})"
        elif child.seen is None:
            yield f"{who}: phase: starting"
        elif self._is_silent(child):
            yield f"{who}: does not answer"
        else:
            for reason in child.seen.readiness.reasons:
                yield f"{who}: {reason}"

    def _is_silent(self, child: Child) -> bool:
        age_s = 0.0 if child.seen is None else self._clock.monotonic() - child.seen.at_s
        running = child.process is not None and child.process.returncode is None
        return running and age_s > HUNG_S

    def hung(self) -> str | None:
        """Processes that run, did answer and do not any more; None while there are none."""
        numbers = [str(child.number) for child in self.children if self._is_silent(child)]
        return f"process {', '.join(numbers)} does not answer" if numbers else None

    def statistics(self) -> dict[str, object]:
        """A snapshot of all, by number."""
        return {
            "phase": self.readiness().phase,
            "processes": {
                str(child.number): {
                    "pid": None if child.process is None else child.process.pid,
                    "cores": list(child.cores),
                    "starts": child.starts,
                    "statistics": None if child.seen is None else child.seen.statistics,
                }
                for child in self.children
            },
        }

    def metrics(self) -> bytes:
        """The exposition of all, with the label `process`: a number, or `parent`."""
        told = [("parent", self._metrics.exposition())]
        told += [(str(c.number), c.seen.metrics) for c in self.children if c.seen is not None]
        return merge_metrics(told)


def again() -> list[str]:
    """How this very command was started, up to its arguments."""
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    return listener


def _as_exit_status(status: int | None) -> ExitStatus:
    """A death by signal is one for good; what no status of ours says is an error."""
    if status is None:
        return ExitStatus.OK
    if status < 0:
        return ExitStatus.FATAL
    return ExitStatus(status) if status in set(ExitStatus) else ExitStatus.ERROR


def _status_name(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return _as_exit_status(status).name

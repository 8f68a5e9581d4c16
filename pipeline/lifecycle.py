"""How the service stops: signals become a plan, the plan becomes an exit status.

    first SIGTERM or SIGINT    drain: stop intake, finish, publish, settle, within one `Deadline`
    second signal              force: give up what is held (it is delivered again) and leave
    two seconds later          the process ends whatever still blocks

Who calls it: the CLI makes a `StopSignal` and watches signals with `watch_signals`; `pipeline.app`
waits on it and returns an `ExitStatus`; every operator-facing error derives from `OperatorError`.
What must stay true: `StopSignal` works without signals, threads or a running loop until somebody
waits on it; the drain budget starts at the first request to stop and is never extended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import IntEnum
from types import FrameType
from typing import Any, Literal, TypeVar, cast

from actors.ports import Deadline

T = TypeVar("T")

FORCE_GRACE_S = 2.0
"""After a second signal: time to cancel tasks and write the last log line. Longer, and a person who
pressed Ctrl-C twice presses it again; shorter, and the reason of the stop is not printed."""


class ExitStatus(IntEnum):
    """Exit statuses of the `embedstream` command. docs/operations.md lists them."""

    OK = 0
    """Finished; for `serve`: drained, nothing left behind."""
    ERROR = 1
    """The command failed."""
    USAGE = 2
    """Wrong arguments or settings; nothing was started."""
    DRAIN_EXCEEDED = 3
    """The drain budget ran out: unfinished work was released and is delivered again."""
    FATAL = 4
    """A model, an executor or a source failed for good; unfinished work was released."""
    FORCED_INT = 128 + signal.SIGINT
    """Interrupted, or forced by a second signal, the last one being SIGINT."""
    FORCED_TERM = 128 + signal.SIGTERM
    """Ended by SIGTERM before there was anything to drain, or forced by a second signal, the last one
    being SIGTERM."""


class OperatorError(Exception):
    """Something the operator can put right. The message is one line that ends in the remedy.

    Raised for wrong settings, ports in use, brokers out of reach, models that do not load. The CLI
    prints it without a traceback and exits with `exit_status`.
    """

    exit_status: ExitStatus = ExitStatus.ERROR

    def __init__(self, message: str, *, exit_status: ExitStatus | None = None) -> None:
        super().__init__(message)
        if exit_status is not None:
            self.exit_status = exit_status


def exit_status_for(
    *, drained: bool, fatal: bool = False, forced_by: int | None = None
) -> ExitStatus:
    """The exit status of `serve`. What happened last and was worst decides.

    Args:
        drained: everything held was answered and settled.
        fatal: a model, executor or source failed for good.
        forced_by: number of the second signal, when there was one.
    """
    if fatal:
        return ExitStatus.FATAL
    if forced_by is not None:
        return ExitStatus.FORCED_INT if forced_by == signal.SIGINT else ExitStatus.FORCED_TERM
    return ExitStatus.OK if drained else ExitStatus.DRAIN_EXCEEDED


class StopSignal:
    """The wish to stop, as a value that tasks can wait on.

    `request` may be called from any task, from a signal handler through the loop, or by a test.
    """

    def __init__(self, drain_budget_s: float) -> None:
        self.drain_budget_s = drain_budget_s
        self.deadline: Deadline | None = None
        """Set by the first request: the one budget of the whole stop."""
        self.reason: str | None = None
        self.forced_by: int | None = None
        self._drain = asyncio.Event()
        self._force = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Somebody asked to stop."""
        return self.deadline is not None

    @property
    def forced(self) -> bool:
        """Somebody asked twice."""
        return self.forced_by is not None

    def request(
        self, reason: str = "requested", *, signum: int | None = None
    ) -> Literal["drain", "force", "ignored"]:
        """Ask to stop. Returns what this request changed.

        The first request starts the drain. A second one forces the stop if it came by a signal;
        requests from inside (a fatal executor, say) never force. Not thread-safe.
        """
        if self.deadline is None:
            self.deadline = Deadline(self.drain_budget_s)
            self.reason = reason
            self._drain.set()
            return "drain"
        if signum is not None and self.forced_by is None:
            self.forced_by = signum
            self._force.set()
            return "force"
        return "ignored"

    async def wait(self) -> None:
        """Until the first request. Safe to cancel."""
        await self._drain.wait()

    async def wait_forced(self) -> None:
        """Until the request that forces. Safe to cancel."""
        await self._force.wait()


class CutShort(Exception):
    """Something else ended first."""


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run `works` as tasks while the block runs; they are cancelled and waited for when it ends.

    What the block raises comes out as it is, not in a group.
    """
    failed: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001  raised below, outside the TaskGroup
            failed = error
        finally:
            for task in tasks:
                task.cancel()
    if failed is not None:
        raise failed


async def race(
    work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, Any], timeout_s: float | None = None
) -> T:
    """What `work` returns or raises. Raises `CutShort` when one of `others`, or the time, ends first."""
    async with beside(errors_as_value(work), *others) as tasks:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise CutShort
    result, error = cast(tuple[T, Exception | None], tasks[0].result())
    if error is not None:
        raise error
    return result


async def errors_as_value(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    """Await `work`; an error is returned, so that it does not cancel its siblings."""
    try:
        return await work, None
    except Exception as error:  # noqa: BLE001  raised by the caller, unchanged
        return None, error


@contextmanager
def watch_signals(
    stop: StopSignal,
    *,
    on_action: Callable[[str, int], None] = lambda action, signum: None,
    end_process: Callable[[int], None] = os._exit,
) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into requests on `stop` while the block runs.

    Call it on the main thread, inside the running loop. A forced stop that is not over after
    `FORCE_GRACE_S` ends the process, even after the block: executor threads may sit in native code
    that nothing cancels, and the interpreter would join them.

    Args:
        on_action: told "drain", "force" or "ignored" and the signal number, for the log.
        end_process: ends the process with a status; injected by tests.
    """
    loop = asyncio.get_running_loop()
    watched = (signal.SIGTERM, signal.SIGINT)

    def on_signal(signum: int) -> None:
        on_action(stop.request(f"signal {signal.Signals(signum).name}", signum=signum), signum)

    def read_signals(fd: int) -> None:
        received = 0
        while _END not in (numbers := os.read(fd, 64)):
            for signum in numbers:
                if signum not in watched:
                    continue
                received += 1
                if received >= 2:
                    timer = threading.Timer(FORCE_GRACE_S, end_process, args=(128 + signum,))
                    timer.daemon = True
                    timer.start()
                with suppress(RuntimeError):  # the loop is closed: only the timer is left
                    loop.call_soon_threadsafe(on_signal, signum)

    # The interpreter writes a signal's number to this pipe the moment it arrives. A Python-level
    # handler would wait for the main thread, which may sit in native code or just be entering it.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=read_signals, args=(reader,), name="signals", daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _noted) for number in watched}
    try:
        yield
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)
        signal.set_wakeup_fd(previous_fd)
        os.write(writer, bytes([_END]))
        thread.join()
        os.close(reader)
        os.close(writer)


_END = 0  # no signal has this number


def _noted(signum: int, frame: FrameType | None) -> None:
    """Nothing left to do: the pipe has it. Without a handler the signal would end the process."""

"""What the session needs of a broker, and the wait between two tries to reach one.

Who calls it: `_session`; `_redis` and `_kafka` implement it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, Protocol

from ._calls import Call


class Link(Protocol):
    """One way to a service: one connection that sends, one reader, whatever the number of calls."""

    reply_to: str
    """Where the service shall put replies for this client."""

    async def run(self) -> None:
        """Send and read until cancelled; closes what it opened."""
        ...

    def send(self, call: Call) -> None:
        """Have the call's record sent as soon as possible; it is dropped when the call has ended."""
        ...

    def withdraw(self, call: Call) -> None:
        """Nobody waits for the call any more: forget its record, or send a cancel record after it."""
        ...

    async def ping(self) -> None:
        """Whether the broker can be used now. Raises `Unreachable`."""
        ...

    async def why_silent(self, call: Call) -> str:
        """What to look at when no reply came in time. Bounded to a moment."""
        ...


def leave_if_cancelled() -> None:
    """Raise the cancellation of this task that a library has swallowed (redis-py does while it
    connects); every loop of a link begins with this. Python 3.10 cannot tell; `aclose` asks again."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "cancelling") and task.cancelling():
        raise asyncio.CancelledError


def leave_if_abandoned(loop: asyncio.AbstractEventLoop) -> None:
    """End this coroutine when its event loop was ended under it: whatever it awaits fails from now on."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        raise GeneratorExit


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; then end the others, and raise what it raised."""
    tasks = [asyncio.get_running_loop().create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except GeneratorExit:  # the event loop was ended under us: nothing can be awaited any more
        tasks.clear()
        raise
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class Backoff:
    """Seconds to wait before the next try: none at first, then doubling with full jitter."""

    def __init__(self, first_s: float = 0.05, max_s: float = 2.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._bound_s = 0.0

    def reset(self) -> None:
        self._bound_s = 0.0

    def next_s(self) -> float:
        wait_s = random.uniform(self._bound_s / 2, self._bound_s)
        self._bound_s = min(self._max_s, max(self._first_s, 2 * self._bound_s))
        return wait_s

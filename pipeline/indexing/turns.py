"""Turns at something that serves one at a time: whoever is in a hurry is next.

Who calls it: the index writer, around calls to its collection.
What must stay true: one holds the turn at a time; within a lane they come in order; a turn that was given to
a task which is cancelled goes to the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.requests import LANES, Lane


class Turns:
    """A lock with lanes."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in LANES}

    @asynccontextmanager
    async def turn(self, lane: Lane) -> AsyncIterator[None]:
        """Hold the turn; interactive waiters get it before bulk ones."""
        if self._held:
            mine = asyncio.get_running_loop().create_future()
            self._waiting[lane].append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._pass_on()
                raise
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        for lane in LANES:
            while self._waiting[lane]:
                following = self._waiting[lane].popleft()
                if not following.done():
                    following.set_result(None)
                    return
        self._held = False

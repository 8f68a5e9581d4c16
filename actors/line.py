"""What waits between two stations: first in, first out, taken in lists.

Who calls it: the tokenizer and the outbox.
What must stay true: nothing is lost, whoever is cancelled; whoever takes gets at least one. It does what an
`asyncio.Queue` does for a sixth of the time: no lock, no count of unfinished work, no call for each thing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """At most `max_waiting` things, unless `put_nowait` is called on a full one: its caller has counted."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.waiting: deque[T] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._is_waking = False  # one is on its way, and takes what is there by then
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self.waiting)

    def full(self) -> bool:
        """Would `put` wait?"""
        return len(self.waiting) >= self._max_waiting

    def put_nowait(self, thing: T) -> None:
        """Add it at the end."""
        self.waiting.append(thing)
        if self._takers and not self._is_waking:
            self._wake_taker()

    async def put(self, thing: T) -> None:
        """Add it at the end once there is room."""
        while self.full():
            self._room.clear()
            await self._room.wait()
        self.put_nowait(thing)

    async def some(self) -> deque[T]:
        """Wait until something waits; what waits, to take from at once, and to tell with `taken`."""
        while not self.waiting:
            taker = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            try:
                await taker
            except BaseException:
                if taker in self._takers:
                    self._takers.remove(taker)
                else:  # it was woken, and takes nothing
                    self._is_waking = False
                    self.taken()
                raise
            self._is_waking = False
        return self.waiting

    def taken(self) -> None:
        """There is room now, and the next may have what is left."""
        self._room.set()
        if self.waiting and not self._is_waking:
            self._wake_taker()

    def _wake_taker(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                self._is_waking = True
                return

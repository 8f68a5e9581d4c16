"""An actor's bounded input: bounded by items and by cost, closed once, never lossy.

Who calls it: the stations put work into the next one's mailbox; the owner gets from it.
What must stay true: `put` waits (backpressure), `put_nowait` raises; a closed mailbox hands out
what it still holds and then raises `MailboxClosed`; nothing is dropped by cancelling a waiter.
`asyncio.Queue` has neither a cost bound nor a close on Python 3.11, hence this class.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class MailboxClosed(Exception):
    """Nothing more can be put, or nothing more will come."""


class MailboxFull(Exception):
    """`put_nowait` would exceed a bound."""


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """A snapshot: how full the mailbox is and who waits."""

    n_items: int
    cost: int
    waiting_putters: int
    waiting_getters: int


class Mailbox(Generic[T]):
    """First in, first out, for one event loop.

    Args:
        name: shown in errors and statistics.
        max_items: bound on items, at least 1.
        max_cost: bound on the sum of costs; one entry above it passes when the mailbox is empty,
            so that no entry can wait for ever.
    """

    def __init__(self, name: str, *, max_items: int, max_cost: int | None = None) -> None:
        if max_items < 1:
            raise ValueError(f"mailbox {name}: max_items must be at least 1, not {max_items}")
        self.name = name
        self._max_items = max_items
        self._max_cost = max_cost
        self._entries: deque[tuple[T, int]] = deque()
        self._cost = 0
        self._closed = False
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Mailbox({self.name}, items={len(self._entries)}, cost={self._cost})"

    @property
    def closed(self) -> bool:
        return self._closed

    def statistics(self) -> MailboxStatistics:
        """Counts at this moment."""
        return MailboxStatistics(
            len(self._entries), self._cost, len(self._putters), len(self._getters)
        )

    def _has_room(self, cost: int) -> bool:
        if not self._entries:
            return True
        if len(self._entries) >= self._max_items:
            return False
        return self._max_cost is None or self._cost + cost <= self._max_cost

    async def put(self, entry: T, cost: int = 0) -> None:
        """Wait for room, then append. Cancelling leaves the mailbox as it was."""
        while True:
            if self._closed:
                raise MailboxClosed(self.name)
            if self._has_room(cost) and not self._putters:
                break
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._putters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._putters:
                    self._putters.remove(waiter)
                else:
                    self._wake_putter()
                raise
            if self._closed:
                raise MailboxClosed(self.name)
            if self._has_room(cost):
                break
        self._append(entry, cost)
        self._wake_putter()

    def put_nowait(self, entry: T, cost: int = 0) -> None:
        """Append now or raise `MailboxFull`."""
        if self._closed:
            raise MailboxClosed(self.name)
        if not self._has_room(cost):
            raise MailboxFull(self.name)
        self._append(entry, cost)

    def _append(self, entry: T, cost: int) -> None:
        self._entries.append((entry, cost))
        self._cost += cost
        if self._getters:
            waiter = self._getters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def get(self) -> T:
        """Wait for an entry and take it. Raises `MailboxClosed` when closed and empty."""
        while not self._entries:
            if self._closed:
                raise MailboxClosed(self.name)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._getters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._getters:
                    self._getters.remove(waiter)
                elif self._entries and self._getters:
                    self._wake_getter()
                raise
        return self._take()

    def get_nowait(self) -> T | None:
        """An entry, or None when there is none now."""
        return self._take() if self._entries else None

    def _take(self) -> T:
        entry, cost = self._entries.popleft()
        self._cost -= cost
        self._wake_putter()
        return entry

    def _wake_putter(self) -> None:
        while self._putters:
            if len(self._entries) >= self._max_items:
                return
            waiter = self._putters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _wake_getter(self) -> None:
        while self._getters:
            waiter = self._getters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def close(self) -> None:
        """No more puts; waiting putters raise, waiting getters raise once it is empty."""
        self._closed = True
        for waiter in (*self._putters, *self._getters):
            if not waiter.done():
                waiter.set_result(None)
        self._putters.clear()
        self._getters.clear()

"""Requests of a full lane that wait aside, so that the other lane's pass them on their route. Pure.

Who calls it: ingress, one parking per route and lane.
What must stay true: what is parked leaves in its order; records and bytes are bounded; what has ended
while it was parked says so (`gone`) to whoever holds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from actors.ports import Delivery
from actors.route import Decoded
from schemas.requests import AnyRequest

MAX_RECORDS = 256
MAX_BYTES = 16 * 1024 * 1024
"""How far a route looks past the first record that has no room."""


@dataclass(slots=True, eq=False)
class Parked:
    """One decoded request. gone: it has left the parking."""

    parking: Parking
    delivery: Delivery
    decoded: Decoded
    request: AnyRequest
    n_bytes: int
    gone: bool = False

    def leave(self) -> None:
        """It is admitted, refused or given back: whoever says so first has it. Idempotent."""
        if not self.gone:
            self.gone = True
            self.parking.forget(self)


class Parking:
    """Parked requests of one lane; `some` and `quiet` say whether there are any."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._waiting: deque[Parked] = deque()
        self.n_bytes = 0
        self._left = asyncio.Event()
        self.some = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Parked]:
        """Oldest first; what leaves meanwhile is no trouble."""
        return iter(tuple(self._waiting))

    @property
    def head(self) -> Parked | None:
        return self._waiting[0] if self._waiting else None

    def has_room(self, n_bytes: int) -> bool:
        """For one more record of so many bytes? One that is too long for all of it waits in its place."""
        fits = self.n_bytes + n_bytes <= self._max_bytes
        return fits and len(self._waiting) < self._max_records

    def add(self, parked: Parked) -> None:
        self._waiting.append(parked)
        self.n_bytes += parked.n_bytes
        self.some.set()
        self.quiet.clear()

    def forget(self, parked: Parked) -> None:
        self._waiting.remove(parked)
        self.n_bytes -= parked.n_bytes
        self._left.set()
        if not self._waiting:
            self.some.clear()
            self.quiet.set()

    async def wait_for_room(self) -> None:
        """Wait until one leaves."""
        self._left.clear()
        await self._left.wait()

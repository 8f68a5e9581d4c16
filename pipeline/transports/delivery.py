"""What all sources share: the delivery object, the hand-off to `receive`, the release back-off.

Who calls it: each source in this package; nobody outside it.
What must stay true: the first of `settle` and `release` wins and later calls do nothing; popping
from the hand-off and returning it happen without an await between them, so cancelling `receive`
loses nothing; a released record is handed out again after a growing, bounded wait.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from actors.backoff import Backoff
from actors.ports import Delivery, SourceClosed


class Owner(Protocol):
    """The source that handed a delivery out and hears what became of it."""

    def on_settle(self, delivery: HeldDelivery) -> None: ...
    def on_release(self, delivery: HeldDelivery, reason: str) -> None: ...
    def is_withdrawn(self, delivery: HeldDelivery) -> bool: ...
    def holds(self, delivery: HeldDelivery) -> bool: ...


class HeldDelivery:
    """A record in our hands; implements `actors.ports.Delivery`.

    `token` is whatever the owner needs to find the record again; `epoch` is the assignment it was
    handed out under: the owner ignores outcomes of earlier ones.
    """

    __slots__ = (
        "_outcome",
        "_owner",
        "attempt",
        "body",
        "damage",
        "default_id",
        "epoch",
        "headers",
        "key",
        "origin",
        "received_at",
        "redelivered",
        "size_bytes",
        "token",
    )

    def __init__(
        self,
        owner: Owner,
        token: object,
        *,
        body: bytes | None,
        headers: Mapping[str, bytes],
        key: str | None,
        default_id: str,
        received_at: float,
        origin: Mapping[str, str | int],
        attempt: int = 1,
        redelivered: bool = False,
        epoch: int = 0,
        damage: str | None = None,
    ) -> None:
        self._owner = owner
        self._outcome: str | None = None
        self.token = token
        self.body = body
        self.headers = headers
        self.key = key
        self.default_id = default_id
        self.received_at = received_at
        self.origin = origin
        self.attempt = attempt
        self.redelivered = redelivered
        self.epoch = epoch
        self.damage = damage
        self.size_bytes = len(body or b"")
        for name, value in headers.items():
            self.size_bytes += len(name) + len(value)

    def again(self, received_at: float, *, attempt: int | None = None) -> HeldDelivery:
        """The same record as a new delivery; `attempt` defaults to one more than before."""
        return HeldDelivery(
            self._owner,
            self.token,
            body=self.body,
            headers=self.headers,
            key=self.key,
            default_id=self.default_id,
            received_at=received_at,
            origin=self.origin,
            attempt=self.attempt + 1 if attempt is None else attempt,
            epoch=self.epoch,
            damage=self.damage,
        )

    def is_of(self, owner: object) -> bool:
        """Did this source hand it out?"""
        return self._owner is owner

    @property
    def withdrawn(self) -> bool:
        """Taken back by its source: whoever has not begun with it drops it."""
        return self._owner.is_withdrawn(self)

    @property
    def held(self) -> bool:
        """Still ours: what becomes of it counts."""
        return self._owner.holds(self)

    def settle(self) -> None:
        """Finished for good; only the first outcome counts."""
        if self._outcome is None:
            self._outcome = "settled"
            self._owner.on_settle(self)

    def release(self, reason: str) -> None:
        """Hand it back; only the first outcome counts."""
        if self._outcome is None:
            self._outcome = "released"
            self._owner.on_release(self, reason)

    def __repr__(self) -> str:  # never the body: it may be user text
        return (
            f"HeldDelivery({dict(self.origin)}, attempt={self.attempt}, {self._outcome or 'held'})"
        )


class HandOff:
    """Deliveries fetched and not yet received. The owner bounds what it puts in."""

    def __init__(self, max_take: int) -> None:
        self._ready: deque[HeldDelivery] = deque()
        self._max_take = max_take
        self._changed = asyncio.Event()
        self._paused = False
        self._ending = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, deliveries: Iterable[HeldDelivery]) -> None:
        """Make them receivable. After `close` they are dropped: the broker still has them."""
        if not self._closed:
            self._ready.extend(deliveries)
            self._changed.set()

    async def take(self) -> list[Delivery]:
        """At least one and at most `max_take`, oldest first; waits, also while paused.

        Raises `SourceClosed` after `close`, or after `end` once all has been handed out.
        """
        while True:
            if self._closed or (self._ending and not self._ready):
                raise SourceClosed("intake has stopped")
            if self._ready and not self._paused:
                count = min(self._max_take, len(self._ready))
                return [self._ready.popleft() for _ in range(count)]
            self._changed.clear()
            await self._changed.wait()

    def discard(self, unwanted: Callable[[HeldDelivery], bool]) -> list[HeldDelivery]:
        """Take out what must not be handed out any more (a revoked partition)."""
        gone = [delivery for delivery in self._ready if unwanted(delivery)]
        if gone:
            kept = [delivery for delivery in self._ready if not unwanted(delivery)]
            self._ready.clear()
            self._ready.extend(kept)
        return gone

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._changed.set()

    def end(self) -> None:
        """No more will come: `take` raises once the rest is handed out."""
        self._ending = True
        self._changed.set()

    def close(self) -> list[HeldDelivery]:
        """Nothing is handed out any more; returns what was still waiting."""
        self._closed = True
        left = list(self._ready)
        self._ready.clear()
        self._changed.set()
        return left


class Redelivery:
    """Released records that wait for their next attempt. Bounded by what is in flight."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, HeldDelivery]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: HeldDelivery, now: float) -> None:
        """The wait doubles with each attempt, up to the longest."""
        wait_s = Backoff(self._first_s, self._longest_s, tries=delivery.attempt - 1).next_s()
        heapq.heappush(self._waiting, (now + wait_s, next(self._order), delivery))

    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def pop_due(self, now: float) -> list[HeldDelivery]:
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(heapq.heappop(self._waiting)[2])
        return due

    def discard(self, unwanted: Callable[[HeldDelivery], bool]) -> list[HeldDelivery]:
        """Take out what must not come again (a revoked partition)."""
        gone = [entry[2] for entry in self._waiting if unwanted(entry[2])]
        if gone:
            self._waiting = [entry for entry in self._waiting if not unwanted(entry[2])]
            heapq.heapify(self._waiting)
        return gone

    def clear(self) -> list[HeldDelivery]:
        left = [entry[2] for entry in sorted(self._waiting)]
        self._waiting.clear()
        return left

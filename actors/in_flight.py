"""The table of in-flight requests: what is admitted and not settled.

Who calls it: ingress adds, egress removes, the dispatcher and housekeeping fail what expired,
`pipeline.app` waits for it to be empty while draining.
What must stay true: an entry enters after its charge and leaves with its refund; a request that
arrives twice at once (same id, same bytes, same destination) is computed once and both deliveries
are settled by the one reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from actors.admission import Admission
from actors.answers import Key
from actors.messages import InFlight
from actors.ports import Delivery
from actors.rate import Rate
from schemas.requests import Lane


class InFlightTable:
    """All in-flight requests of the service, over all routes."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._all: dict[InFlight, None] = {}  # oldest first
        self._by_key: dict[Key, InFlight] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._n_answered = 0
        self._rate = Rate()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._all))

    def join(self, key: Key, delivery: Delivery) -> InFlight | None:
        """The running twin of a request, which now also owns `delivery`; None when there is none.

        One that was cancelled, expired or failed is no twin: who asks again wants an answer.
        """
        twin = self._by_key.get(key)
        if twin is None or twin.failure is not None:
            return None
        twin.join(delivery)
        return twin

    def with_id(self, request_id: str) -> list[InFlight]:
        """In-flight requests that carry this id (several senders may have chosen the same). Looks at all:
        only cancel records ask."""
        return [one for one in self._all if one.request.id == request_id]

    def add(self, in_flight: InFlight) -> None:
        """Charge the budgets and remember it."""
        self._admission.charge(in_flight.lane, in_flight.cost_bytes)
        self._all[in_flight] = None
        self._by_key[in_flight.join_key] = in_flight
        self._empty.clear()

    def charge_tokens(self, in_flight: InFlight, tokens: int) -> None:
        """Charge what encoding made of (a slice of) a request; refunded by `remove`."""
        if in_flight in self._all:
            in_flight.charged_tokens += tokens
            self._admission.charge_tokens(in_flight.lane, tokens)

    def remove(self, in_flight: InFlight) -> None:
        """Refund the budgets and forget it. Idempotent."""
        if in_flight not in self._all:
            return
        del self._all[in_flight]
        self._n_answered += in_flight.first_forward_at is not None
        if self._by_key.get(in_flight.join_key) is in_flight:
            del self._by_key[in_flight.join_key]
        self._admission.refund(in_flight.lane, in_flight.cost_bytes, in_flight.charged_tokens)
        self._room.set()
        if not self._all:
            self._empty.set()

    def tick(self, elapsed_s: float) -> None:
        """Once per round of housekeeping: how fast are requests answered?"""
        self._rate.note(self._n_answered, elapsed_s, busy=bool(self._all))
        self._n_answered = 0

    def beyond(self, budget_s: float) -> int:
        """Requests that cannot be answered within `budget_s` at the measured rate."""
        if self._rate.per_s is None:
            return 0
        return max(0, len(self._all) - int(self._rate.per_s * budget_s))

    async def wait_for_room(self) -> None:
        """Wait until something was refunded since the last call."""
        self._room.clear()
        await self._room.wait()

    async def wait_empty(self) -> None:
        """Wait until nothing is in flight."""
        await self._empty.wait()

    def count(self, lane: Lane) -> int:
        """In-flight requests of one lane."""
        return self._admission.use[lane].requests

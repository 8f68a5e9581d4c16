"""What has ended and waits to leave, by route.

Who calls it: egress alone.
What must stay true: a destination that hangs holds up its own route alone; a list is short enough to be
encoded in one go.
"""

from __future__ import annotations

import asyncio

from actors.line import Line
from actors.messages import InFlight, Outgoing
from actors.ordering import KeyOrder
from actors.route import Route
from gpu.batch import ItemResult
from schemas.errors import EmbedstreamError

LIST_REQUESTS, LIST_ITEMS = 128, 512
"""A list ends at either: what it holds is encoded in one go and waits for one acknowledgement (512 vectors
of 1,024 float32 are 2 MB)."""

_RESULT = frozenset((ItemResult,))


class Outbox:
    """Of one route: one by one in `queue`, in lists where its destination takes them, in lines by `order`."""

    def __init__(self, route: Route, attempts: int, max_waiting: int, refusal_slots: int) -> None:
        self.queue: asyncio.Queue[Outgoing] = asyncio.Queue(max_waiting + refusal_slots)
        self.lists: Line[InFlight] = Line(max_waiting)
        self.takes_lists = leaves_in_lists(route, attempts)
        self.refusals = asyncio.Semaphore(refusal_slots)
        self.order: KeyOrder[Outgoing] = KeyOrder()

    async def next_list(self) -> list[InFlight]:
        """What has ended and leaves together; waits for the first."""
        waiting = await self.lists.some()
        some: list[InFlight] = []
        n_items = 0
        while waiting and len(some) < LIST_REQUESTS and n_items < LIST_ITEMS:
            some.append(waiting.popleft())
            n_items += len(some[-1].outcomes)
        self.lists.taken()
        return some


def leaves_in_lists(route: Route, attempts: int) -> bool:
    """Are its results written many at a time? What has a place in a line or in a transaction is not, nor
    what may be tried only once: a list would be the first of two tries."""
    if attempts < 2:
        return False
    return route.destination.takes_lists and route.order == "none" and route.transactions is None


def outgoing_of(in_flight: InFlight, *, tried: bool = False) -> Outgoing:
    """The one request, to leave alone."""
    return Outgoing(
        route=in_flight.route,
        deliveries=in_flight.deliveries,
        request_id=in_flight.request.id,
        outcome=outcome_label(in_flight),
        in_flight=in_flight,
        ticket=in_flight.ticket,
        tried=tried,
    )


def outcome_label(in_flight: InFlight) -> str:
    if in_flight.failure is not None:
        return in_flight.failure.code
    if _RESULT.issuperset(map(type, in_flight.outcomes)):
        return "ok"
    n_errors = sum(isinstance(outcome, EmbedstreamError) for outcome in in_flight.outcomes)
    return "partial" if n_errors < len(in_flight.outcomes) else "all_items_failed"

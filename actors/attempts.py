"""Attempts of work that was handed out before: counted at its source around every step that can kill.

Who calls it: the tokenizer around an encoder call, the dispatcher around a forward.
What must stay true: an attempt counts when its record was in a step that did not come back, never
because it was handed out, so a crash loop gives up the record that causes it and no other; the
count is durable before the step begins; a record that was in such a step is afterwards computed in
nobody's company. Records that come for the first time cost nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from actors.messages import InFlight
from actors.ports import Delivery, Source


class Attempts:
    """One for the service: its lock keeps suspects of all models apart."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def counted(self, owners: Iterable[InFlight]) -> AsyncIterator[None]:
        """Around a step that computes `owners`. With a suspect among them, pass no other request."""
        again = [owner for owner in dict.fromkeys(owners) if owner.redelivered]
        if not again:
            yield
            return
        if any(owner.suspect for owner in again):
            async with self._alone:
                await self._note(again, begins=True)
                yield
        else:
            await self._note(again, begins=True)
            yield
        await self._note(again, begins=False)  # not when cancelled: the step may still run

    async def _note(self, owners: list[InFlight], *, begins: bool) -> None:
        by_source: dict[Source, list[Delivery]] = {}
        for owner in owners:
            found = by_source.setdefault(owner.route.source, [])
            found.extend(d for d in owner.deliveries if d.redelivered)
        for source, deliveries in by_source.items():
            if begins:
                await source.attempt_begins(deliveries)
            else:
                await source.attempt_came_back(deliveries)


def apart(owners: Iterable[InFlight]) -> list[list[InFlight]]:
    """Groups to compute one after the other: all that may share a step, then each suspect alone,
    the least suspicious first, so that they are answered before the next death."""
    together: list[InFlight] = []
    alone: list[InFlight] = []
    for owner in dict.fromkeys(owners):
        (alone if owner.suspect else together).append(owner)
    alone.sort(key=lambda owner: max(delivery.attempt for delivery in owner.deliveries))
    return ([together] if together else []) + [[owner] for owner in alone]

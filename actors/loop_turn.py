"""A long piece of work on the event loop, cut into turns that others can come between.

Who calls it: ingress, which admits a whole hand-out without ever having to wait.
What must stay true: between two looks at `is_long` runs what may take a while but never for long.
"""

from __future__ import annotations

import asyncio

from actors.ports import Clock

LONGEST_S = 0.002
"""Of one turn. An interactive call passes the loop some ten times: a hand-out of 256 bulk records in one turn
held it up for 40 to 70 ms each time (two cores, 16 short texts a record)."""


class LoopTurn:
    """How long this task has had the loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()

    @property
    def is_long(self) -> bool:
        """Is the turn over?"""
        return self._clock.monotonic() - self._began > LONGEST_S

    async def end(self) -> None:
        """Let others run."""
        await asyncio.sleep(0)
        self._began = self._clock.monotonic()

"""Records of one list that the client has taken, until the brokers have them.

Who calls it: `kafka/sink.py`, `publish_all`.
What must stay true: each record is told at its own acknowledgement, whatever becomes of its neighbours, and
nothing is told after the end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.ports import PublishError, Told


class SentList:
    """`n_acknowledged`: records that the brokers have."""

    def __init__(self, n_records: int, tell: Told) -> None:
        self._tell = tell
        self._untold = set(range(n_records))
        self._waiting: dict[asyncio.Future[Any], int] = {}
        self._changed = asyncio.Event()
        self._failed: list[tuple[int, BaseException]] = []
        self.n_acknowledged = 0

    def sent(self, number: int, future: asyncio.Future[Any]) -> None:
        """The client has taken record `number`; `future` is its acknowledgement."""
        self._waiting[future] = number
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        number = self._waiting.pop(future, None)
        if number is None:  # after the end
            return
        if error is not None:
            self._failed.append((number, error))
        else:
            self.n_acknowledged += 1
            self._untold.discard(number)
            self._tell(number, None)
        if not self._waiting:
            self._changed.set()

    async def acknowledged(self) -> None:
        """Wait until nothing is on its way."""
        while self._waiting:
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> list[tuple[int, BaseException]]:
        """Say of the rest that it was not published here; what the client refused, by number."""
        self._waiting.clear()
        for number in sorted(self._untold):
            self._tell(number, PublishError("not published with the list", retryable=True))
        return self._failed

"""Few connections for many publishers: one that waits sends for all that wait.

Who calls it: `redis/sink.py`.
What must stay true: each record is told once; whoever is cancelled while it sends leaves the others' records
in the queue, and somebody sends them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from actors.ports import PublishError, Told
from pipeline.transports.redis.append import Append

PIPELINES = 2
_BATCH_RECORDS = 128
_BATCH_BYTES = 8 * 1024 * 1024


class Publisher:
    """Whoever waits in `publish` or `publish_all`. `woken` is set when it was appointed to send (`leads`)
    or has all outcomes; `left`: outcomes that are missing; `gone`: it was cancelled, nobody would wake."""

    __slots__ = ("gone", "leads", "left", "tell", "woken")

    def __init__(self, left: int, tell: Told) -> None:
        self.left = left
        self.tell = tell
        self.woken = asyncio.Event()
        self.leads = False
        self.gone = False


class Waiting:
    """One record of a publisher. `is_ours`: for a place that the operator has to make writable."""

    __slots__ = ("append", "by", "done", "is_ours", "number", "size_bytes")

    def __init__(
        self, by: Publisher, number: int, append: Append, size_bytes: int, is_ours: bool
    ) -> None:
        self.by = by
        self.number = number
        self.append = append
        self.size_bytes = size_bytes
        self.is_ours = is_ours
        self.done = False

    def resolve(self, error: PublishError | None) -> None:
        if self.done or self.by.gone:
            return
        self.done = True
        self.by.left -= 1
        self.by.tell(self.number, error)
        if not self.by.left:
            self.by.woken.set()


class SharedWrites:
    """The queue of records, and at most `PIPELINES` publishers that send from it.

    Args:
        write: sends a batch and resolves each of its records.
    """

    def __init__(self, write: Callable[[list[Waiting]], Awaitable[None]]) -> None:
        self._write = write
        self._queue: deque[Waiting] = deque()  # bounded by the publishers, each waits for its own
        self._leaders = 0

    @property
    def idle(self) -> bool:
        """Does nothing wait and nobody send?"""
        return not self._queue and not self._leaders

    async def send(self, publisher: Publisher, records: Iterable[Waiting]) -> None:
        """Have them sent; returns when all of the publisher's records are told."""
        self._queue.extend(records)
        self._appoint()
        try:
            while publisher.left:
                await publisher.woken.wait()
                publisher.woken.clear()
                if publisher.leads and publisher.left:
                    await self._send_batch()
                    self._step_down(publisher)
        finally:
            if publisher.left:
                publisher.gone = True
                self._queue = deque(w for w in self._queue if w.by is not publisher)
            if publisher.leads:
                self._step_down(publisher)

    def _appoint(self) -> None:
        """Let the first waiting publisher send, while a connection is free."""
        if self._leaders >= PIPELINES:
            return
        for waiting in self._queue:
            if not waiting.by.leads:
                waiting.by.leads = True
                self._leaders += 1
                waiting.by.woken.set()
                return

    def _step_down(self, publisher: Publisher) -> None:
        publisher.leads = False
        self._leaders -= 1
        self._appoint()

    async def _send_batch(self) -> None:
        batch: list[Waiting] = []
        size = 0
        while self._queue and len(batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
            waiting = self._queue.popleft()
            batch.append(waiting)
            size += waiting.size_bytes
        if not batch:
            return
        try:
            await self._write(batch)
        except BaseException:
            # Cancelled in between: whether it arrived is unknown, so the others send theirs again.
            self._queue.extendleft(w for w in reversed(batch) if not (w.done or w.by.gone))
            raise

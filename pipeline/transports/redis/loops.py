"""What both Redis sources do alike: two clients, a loop that reads, a loop that keeps house.

Who calls it: `redis/source.py` and `redis_list/source.py` derive from `RedisLoops`.
What must stay true: a server that fails is left alone for a growing while, reported once, and works
again only after a write passed; settles are written in batches; closing ends in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sized
from typing import Any

import structlog
from redis.exceptions import RedisError

from actors.backoff import Backoff
from actors.ports import Clock, Deadline, Metrics, SourceStatus
from pipeline.transports.redis.client import ServerFacts
from pipeline.transports.redis.connect import close_client, make_client, reconnect_if_wrong
from pipeline.transports.redis.errors import describe
from pipeline.transports.redis.health import Health
from pipeline.transports.redis.options import RedisQueueOptions
from pipeline.transports.source import BrokerSource

log = structlog.get_logger(__name__)

TROUBLE = (RedisError, OSError, TimeoutError)
SETTLE_BATCH = 500
STATIONS_FIRST = 3
"""Turns of the loop before the next read is sent, which takes it half a millisecond: until then what has come is
received, admitted and on its way to the tokenizer's thread."""
_RETRY_FIRST_S = 0.1
_RETRY_LONGEST_S = 2.0


class RedisLoops(BrokerSource, ABC):
    """Reads over one connection and keeps house over another.

    `_settled`: what waits to be removed on the server, oldest first.
    """

    _settled: Sized

    def __init__(
        self,
        options: RedisQueueOptions,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._queue = options
        self.consumer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._reader = make_client(options, connections=1)
        self._client = make_client(options, connections=2)
        self._health = Health(options.address, self._metrics, self.kind)
        # What waits to be settled takes room from what may be read.
        self._enough = min(SETTLE_BATCH, max(1, options.max_in_flight // 2))
        self._gathered = asyncio.Event()
        self._state = "not open"  # empty while it is
        self._sink_fault: Callable[[], str | None] = lambda: None
        self.facts: ServerFacts | None = None

    # --- what the two do differently ------------------------------------------------------------

    @abstractmethod
    async def _survey(self) -> ServerFacts:
        """Whether the server serves us, and all made ready. Raises `ConnectionError`."""

    @abstractmethod
    def _in_hand(self) -> int:
        """Records handed out, buffered or released."""

    @abstractmethod
    def _in_hand_bytes(self) -> int:
        """How large they are together."""

    @abstractmethod
    async def _read(self, room: int) -> None:
        """One wait for new records, at most `room`, and what came is handed out."""

    @abstractmethod
    async def _prove(self, client: Any) -> None:
        """A write that changes nothing: passes only where and when the server takes writes."""

    @abstractmethod
    def _doubt(self) -> None:
        """An answer may have been lost on the way: its records are ours and not in our hands."""

    @abstractmethod
    async def _settle_batch(self) -> None:
        """Remove a batch of `_settled` from the server, and then from there."""

    @abstractmethod
    async def _look_after(self) -> None:
        """Hand out again what was released, keep leases."""

    @abstractmethod
    async def _claim(self) -> None:
        """Every `claim_interval_ms`: take over from the dead, tell the backlog."""

    @abstractmethod
    def _next_due(self) -> float | None:
        """When a released record or a lease is due."""

    @abstractmethod
    async def _leave(self) -> None:
        """Give what is ours to others at once."""

    async def _repaired(self, loop: str, error: BaseException) -> bool:
        """Whether what `error` says is missing was made again."""
        return False

    def watch(self, sink_fault: Callable[[], str | None]) -> None:
        """While it names a fault nothing new is taken: its reply could not be written."""
        self._sink_fault = sink_fault

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `actors.ports.Source`."""
        if self.facts is None:
            self.facts = await self._survey()
            self._state = ""
            self._health.opened()

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._read_forever(), self._keep_house()

    async def flush(self, deadline: Deadline) -> None:
        """See `actors.ports.Source`."""
        while self._settled and not deadline.expired:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._settle_batch()
            except TROUBLE as error:
                if not await self._repaired("flush", error):
                    await asyncio.sleep(min(_RETRY_FIRST_S, deadline.remaining_s()))
        if self._settled:
            log.warning("redis_flush_incomplete", entries=len(self._settled))

    async def aclose(self) -> None:
        """See `actors.ports.Source`."""
        self.stop_intake()
        bound_s = self._queue.close_timeout_s
        await self._end_loops(bound_s)
        try:
            async with asyncio.timeout(bound_s):
                if self.facts is not None:
                    while self._settled:
                        await self._settle_batch()
                    await self._leave()
        except TROUBLE as error:
            log.warning("redis_leave_failed", error=describe(error))
        self._state = "closed"
        await close_client(self._reader, bound_s)
        await close_client(self._client, bound_s)

    @abstractmethod
    def stop_intake(self) -> None:
        """See `actors.ports.Source`."""

    def status(self) -> SourceStatus:
        """See `actors.ports.Source`."""
        return self._status(self._fault(), held=self._in_hand())

    def _fault(self) -> str:
        return self._state or self._health.fault() or self._sink_fault() or ""

    async def _failed(self, loop: str, client: Any, error: BaseException) -> None:
        self._health.failed(loop, error)
        with contextlib.suppress(*TROUBLE):
            await reconnect_if_wrong(client, error)

    # --- reading --------------------------------------------------------------------------------

    async def _read_forever(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while not self._closing.is_set():
            try:
                await self._read_once()
            except TROUBLE as error:
                if await self._repaired("read", error):
                    continue
                self._doubt()
                await self._failed("read", self._reader, error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._closing.wait()
            else:
                backoff.reset()

    async def _read_once(self) -> None:
        self._wake.clear()
        if self._health.is_wrong("read"):
            await self._prove(self._reader)
            self._health.works("read")
        room = self._room()
        if room:
            await self._read(room)
            for _ in range(STATIONS_FIRST):
                await asyncio.sleep(0)
        else:
            await self._woken(self._queue.block_ms / 1000)

    def _room(self) -> int:
        full = self._in_hand_bytes() >= self._queue.max_in_flight_bytes
        if self._hand_off.paused or self._hand_off.closed or full or self._sink_fault():
            return 0
        room = self._queue.max_in_flight - self._in_hand() - len(self._settled)
        return max(0, min(room, self._queue.max_receive))

    # --- housekeeping ---------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        interval_s = self._queue.claim_interval_ms / 1000
        next_claim = self._clock.monotonic()
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while True:
            self._tick.clear()
            self._gathered.clear()
            try:
                if self._health.is_wrong("house"):
                    await self._prove(self._client)
                await self._look_after()
                await self._settle_batch()
                if self._clock.monotonic() >= next_claim:
                    next_claim = self._clock.monotonic() + interval_s
                    await self._claim()
                self._health.works("house")
            except TROUBLE as error:
                if not await self._repaired("house", error):
                    await self._failed("house", self._client, error)
                    self._doubt()
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            await self._rest(next_claim)

    async def _rest(self, next_claim: float) -> None:
        """Until a settle or release comes, or the next lease, redelivery or claim is due."""
        if len(self._settled) >= self._enough:
            return
        if not self._settled:
            due = self._next_due()
            due = next_claim if due is None else min(due, next_claim)
            try:
                async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                    await self._tick.wait()
            except TimeoutError:
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._queue.settle_interval_ms / 1000):
                await self._gathered.wait()

    def _settle_waits(self) -> None:
        """`_settled` has got longer: they gather for a moment, or until they are enough."""
        if len(self._settled) >= self._enough:
            self._gathered.set()
        self._tick.set()

"""Requests from a Redis stream through a consumer group: leases, take-over, recovery.

Who calls it: the registry; ingress receives from it.
What must stay true: an entry leaves the group only by a settle (XACK and XDEL together); ours are
renewed at half of `claim_idle_ms` while we live; what a dead consumer held is taken over; stream or
group vanishing (FLUSHALL, restart without data) is repaired within one cycle and counted; nothing
relies on BLOCK ending in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError

from actors.ports import Clock, Delivery, Metrics
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.redis.client import (
    ServerFacts,
    create_group,
    is_nogroup,
    survey,
)
from pipeline.transports.redis.deliveries import Held, delivery_of, entry_of
from pipeline.transports.redis.errors import describe
from pipeline.transports.redis.group import Entry, GroupCommands
from pipeline.transports.redis.leases import Leases, keep
from pipeline.transports.redis.loops import SETTLE_BATCH, TROUBLE, RedisLoops
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.source import opened

log = structlog.get_logger(__name__)

_CLAIM_BATCH = 100
_CLEAN_EVERY_CLAIMS = 12
_DEAD_AFTER_IDLES = 10
"""A consumer without pending entries is removed once idle for this many `claim_idle_ms`."""


class RedisSource(RedisLoops):
    """`actors.ports.Source` over one stream and one consumer group."""

    kind = "redis"

    def __init__(
        self, options: RedisOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self.consumer = options.consumer or self.consumer
        self._commands = GroupCommands(self._client, options, self.consumer)
        self._reads = GroupCommands(self._reader, options, self.consumer)
        self._leases = Leases(options.claim_idle_ms / 1000)
        self._epoch = 0  # grows when the stream vanished: its ids may then be given again
        self._held = Held()
        self._gone: deque[str] = deque(maxlen=1024)  # told a moment ago
        self._settled: dict[str, None] = {}  # waiting for XACK and XDEL, oldest first
        self._replay_from: str | None = "0"  # our own pending entries come before new ones
        self._claim_cursor = "0-0"
        self._claims = 0

    # --- life -----------------------------------------------------------------------------------

    async def _survey(self) -> ServerFacts:
        return await survey(self._client, self._options)

    def _in_hand(self) -> int:
        return len(self._held)

    def _in_hand_bytes(self) -> int:
        return self._held.size_bytes

    def stop_intake(self) -> None:
        for delivery in [*self._hand_off.close(), *self._redelivery.clear()]:
            self._let_go(delivery)  # the lease is given away in `_leave`, or runs out
        self._wake.set()

    async def _leave(self) -> None:
        await self._commands.leave()

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 1)

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 0)

    async def _write_counts(self, deliveries: Sequence[Delivery], more: int) -> None:
        """The server's delivery count of an entry is the number of its next attempt."""
        held = [d for d in deliveries if isinstance(d, HeldDelivery) and d.epoch == self._epoch]
        try:
            await self._commands.set_counts({entry_of(d): d.attempt + more for d in held})
        except TROUBLE as error:
            log.warning("attempts_not_counted", entries=len(held), error=describe(error))

    # --- outcomes -------------------------------------------------------------------------------

    def on_settle(self, delivery: HeldDelivery) -> None:
        self._let_go(delivery)
        if delivery.epoch == self._epoch:
            # Even when the lease was lost: the reply is out, nobody needs to do it again.
            self._settled[entry_of(delivery)] = None
        self._settle_waits()
        self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        if delivery not in self._held:
            return
        self._metrics.count("source_released_total", transport="redis")
        if self._hand_off.closed:
            self._let_go(delivery)
        else:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._tick.set()

    def _let_go(self, delivery: HeldDelivery) -> None:
        if delivery.epoch == self._epoch:
            self._leases.drop(entry_of(delivery))
        self._held.drop(delivery)

    def _knows(self, entry: str) -> bool:
        """In our hands, or settled and about to be acknowledged."""
        return self._held.has(self._epoch, entry) or entry in self._settled

    # --- reading --------------------------------------------------------------------------------

    async def _prove(self, client: Any) -> None:
        await (self._reads if client is self._reader else self._commands).prove()

    def _doubt(self) -> None:
        self._replay_from = "0"

    async def _read(self, room: int) -> None:
        if self._replay_from is not None:
            await self._replay(room)
            return
        entries = await self._reads.read_new(room)
        self._hand_out([(entry, 1) for entry in entries])

    async def _replay(self, room: int) -> None:
        """Entries that are pending for us and not in our hands, oldest first, a page at a time."""
        assert self._replay_from is not None
        page = await self._commands.own_pending(self._replay_from, room)
        if not page:
            self._replay_from = None
            return
        self._replay_from = page[-1]
        await self._take_over([entry for entry in page if not self._knows(entry)])

    async def _take_over(self, ids: list[str]) -> None:
        """Hand out entries that are pending for us; one deleted from the stream only needs its XACK."""
        if not ids:
            return
        entries, counts = await self._commands.fetch(ids)
        gone = [entry.id for entry in entries if entry.fields is None]
        self._settled.update(dict.fromkeys(gone))
        self._note_gone(gone)
        there = [(entry, counts[entry.id]) for entry in entries if entry.fields is not None]
        self._hand_out(there, redelivered=True)

    def _note_gone(self, entries: list[str]) -> None:
        """Requests that somebody deleted or trimmed before they were answered; each is told once, though
        a look at what is ours and one at what is idle may both come upon it before its XACK."""
        new = [entry for entry in entries if entry not in self._gone]
        self._gone.extend(new)
        if new:
            self._tick.set()
            self._metrics.count("source_records_gone_total", len(new), transport="redis")
            fields = {"entries": len(new), "first": new[0]}
            log.warning("redis_entries_gone", stream=self._options.stream, **fields)

    def _hand_out(self, entries: list[tuple[Entry, int]], *, redelivered: bool = False) -> None:
        if not entries:
            return
        now = self._clock.monotonic()
        stream, epoch = self._options.stream, self._epoch
        deliveries = [
            delivery_of(self, stream, entry, attempt, now, epoch=epoch, again=redelivered)
            for entry, attempt in entries
            if not self._knows(entry.id)  # the other loop took it over while we asked for its count
        ]
        for delivery in deliveries:
            self._held.add(delivery)
        self._leases.hold([entry_of(delivery) for delivery in deliveries], now)
        self._metrics.count("source_records_total", len(deliveries), transport="redis")
        self._hand_off.put(deliveries)
        if self._hand_off.closed:  # they came while intake was being stopped
            for delivery in deliveries:
                self._let_go(delivery)

    async def _repaired(self, loop: str, error: BaseException) -> bool:
        """Make stream and group again. From `0`: what was added since must not be skipped."""
        if not (isinstance(error, RedisError) and is_nogroup(error)):
            return False
        try:
            made = await create_group(self._client, self._options, "0")
        except TROUBLE as failed:
            await self._failed(loop, self._client, failed)
            return False
        self._doubt()
        if made:
            # What we hold is still answered, but there is nothing left to acknowledge for it.
            self._epoch += 1
            self._settled.clear()
            self._leases.clear()
            log.warning("redis_group_recreated", stream=self._options.stream)
            self._metrics.count("source_group_recreated_total", transport="redis")
        return True

    # --- housekeeping ---------------------------------------------------------------------------

    async def _look_after(self) -> None:
        await self._redeliver()
        for entry in await keep(self._leases, self._commands, self._clock.monotonic()):
            self._metrics.count("source_leases_lost_total", transport="redis")
            log.warning("redis_lease_lost", stream=self._options.stream, id=entry)

    def _next_due(self) -> float | None:
        dues = [self._leases.next_due(), self._redelivery.next_due()]
        return min((at for at in dues if at is not None), default=None)

    async def _settle_batch(self) -> None:
        batch = list(self._settled)[:SETTLE_BATCH]
        if not batch:
            return
        await self._commands.settle(batch)
        for entry in batch:
            self._settled.pop(entry, None)
        self._wake.set()

    async def _redeliver(self) -> None:
        released = self._redelivery.pop_due(self._clock.monotonic())
        again = [d.again(self._clock.monotonic()) for d in released if d in self._held]
        if not again:
            return
        for delivery in again:
            self._held.add(delivery)
        self._hand_off.put(again)
        # Kept on the server too, so that attempts survive our death.
        current = {entry_of(d): d.attempt for d in again if d.epoch == self._epoch}
        await self._commands.set_counts(current)

    async def _claim(self) -> None:
        self._claims += 1
        await self._take_from_silent()
        await self._tell_backlog()
        if self._claims % _CLEAN_EVERY_CLAIMS == 0:
            await self._remove_dead_consumers()

    async def _take_from_silent(self) -> None:
        """Take over what its owner has not renewed for `claim_idle_ms`."""
        room = min(self._room(), _CLAIM_BATCH)
        if not room:
            return
        self._claim_cursor, ids, gone = await self._commands.claim_idle(self._claim_cursor, room)
        self._note_gone(gone)
        lost = [entry for entry in ids if not self._knows(entry)]
        if not lost:
            return
        self._metrics.count("source_claimed_total", len(lost), transport="redis")
        log.info("redis_claimed", stream=self._options.stream, entries=len(lost))
        await self._take_over(lost)

    async def _tell_backlog(self) -> None:
        backlog = await self._commands.backlog()
        if backlog is not None:
            place = {"topic": self._options.stream, "partition": "0"}
            self._metrics.gauge("source_lag_records", backlog, **place)

    async def _remove_dead_consumers(self) -> None:
        idle_ms = max(_DEAD_AFTER_IDLES * self._options.claim_idle_ms, 3 * self._options.block_ms)
        removed, left = await self._commands.remove_dead_consumers(idle_ms)
        self._metrics.gauge("source_group_consumers", left, transport="redis")
        if removed:
            log.info("redis_consumers_removed", removed=removed, left=left)


async def open_source(options: RedisOptions, *, clock: Clock, metrics: Metrics) -> RedisSource:
    """A connected source. Raises `ConnectionError`; nothing stays open then."""
    return await opened(RedisSource(options, clock=clock, metrics=metrics))

"""Requests from a Redis stream through a consumer group: leases, take-over, recovery.

Who calls it: the registry; ingress receives from it.
What must stay true: an entry leaves the group only by a settle (XACK and XDEL together); ours are
renewed at half of `claim_idle_ms` while we live; what a dead consumer held is taken over; stream or
group vanishing (FLUSHALL, restart without data) is repaired within one cycle and counted; nothing
relies on BLOCK ending in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError

from actors.backoff import Backoff
from actors.ports import Clock, Deadline, Delivery, Metrics, SourceStatus
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.redis.client import (
    ServerFacts,
    close_client,
    create_group,
    is_nogroup,
    look,
    make_client,
    reconnect_if_wrong,
    survey,
)
from pipeline.transports.redis.deliveries import Held, delivery_of, entry_of
from pipeline.transports.redis.errors import describe
from pipeline.transports.redis.group import Entry, GroupCommands
from pipeline.transports.redis.health import Health
from pipeline.transports.redis.leases import Leases, keep
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.source import BrokerSource, opened

log = structlog.get_logger(__name__)

_RETRY_FIRST_S = 0.1
_RETRY_LONGEST_S = 2.0
_SETTLE_BATCH = 500
_CLAIM_BATCH = 100
_CLEAN_EVERY_CLAIMS = 12
_DEAD_AFTER_IDLES = 10
"""A consumer without pending entries is removed once idle for this many `claim_idle_ms`."""
_TROUBLE = (RedisError, OSError, TimeoutError)


class RedisSource(BrokerSource):
    """`actors.ports.Source` over one stream and one consumer group."""

    kind = "redis"

    def __init__(
        self, options: RedisOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self.consumer = options.consumer or (
            f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        )
        self._reader = make_client(options, connections=1)
        self._client = make_client(options, connections=2)
        self._commands = GroupCommands(self._client, options, self.consumer)
        self._reads = GroupCommands(self._reader, options, self.consumer)
        self._leases = Leases(options.claim_idle_ms / 1000)
        self._epoch = 0  # grows when the stream vanished: its ids may then be given again
        self._held = Held()
        self._settled: dict[str, None] = {}  # waiting for XACK and XDEL, oldest first
        self._replay_from: str | None = "0"  # our own pending entries come before new ones
        self._claim_cursor = "0-0"
        self._health = Health(options.address, self._metrics)
        self._state = "not open"  # empty while it is
        self.facts: ServerFacts | None = None

    # --- life -----------------------------------------------------------------------------------

    async def open(self) -> None:
        if self.facts is None:
            self.facts = await survey(self._client, self._options)
            self._state = ""
            self._health.opened()

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._read_forever(), self._keep_house()

    def stop_intake(self) -> None:
        for delivery in [*self._hand_off.close(), *self._redelivery.clear()]:
            self._let_go(delivery)  # the lease is given away in `aclose`, or runs out
        self._wake.set()

    async def flush(self, deadline: Deadline) -> None:
        while self._settled and not deadline.expired:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._settle_batch()
            except _TROUBLE as error:
                if isinstance(error, RedisError) and is_nogroup(error):
                    self._settled.clear()  # nothing is left that could be delivered again
                else:
                    await asyncio.sleep(min(_RETRY_FIRST_S, deadline.remaining_s()))
        if self._settled:
            log.warning("redis_flush_incomplete", entries=len(self._settled))

    async def aclose(self) -> None:
        self.stop_intake()
        bound_s = self._options.close_timeout_s
        await self._end_loops(bound_s)
        try:
            async with asyncio.timeout(bound_s):
                if self.facts is not None:
                    while self._settled:
                        await self._settle_batch()
                    await self._commands.leave()
        except _TROUBLE as error:
            log.warning("redis_leave_failed", error=describe(error))
        self._state = "closed"
        await close_client(self._reader, bound_s)
        await close_client(self._client, bound_s)

    def status(self) -> SourceStatus:
        return self._status(self._state or self._health.fault(), held=len(self._held))

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 1)

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 0)

    async def _write_counts(self, deliveries: Sequence[Delivery], more: int) -> None:
        """The server's delivery count of an entry is the number of its next attempt."""
        held = [d for d in deliveries if isinstance(d, HeldDelivery) and d.epoch == self._epoch]
        try:
            await self._commands.set_counts({entry_of(d): d.attempt + more for d in held})
        except _TROUBLE as error:
            log.warning("attempts_not_counted", entries=len(held), error=describe(error))

    # --- outcomes -------------------------------------------------------------------------------

    def on_settle(self, delivery: HeldDelivery) -> None:
        self._let_go(delivery)
        if delivery.epoch == self._epoch:
            # Even when the lease was lost: the reply is out, nobody needs to do it again.
            self._settled[entry_of(delivery)] = None
        self._tick.set()
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

    async def _read_forever(self) -> None:
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while not self._closing.is_set():
            try:
                await self._read_once()
            except _TROUBLE as error:
                gone = isinstance(error, RedisError) and is_nogroup(error)
                if gone and await self._repair_group("read"):
                    continue
                # An answer may have been lost on the way: its entries are ours and not in our hands.
                self._replay_from = "0"
                await self._failed("read", self._reader, error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._closing.wait()
            else:
                backoff.reset()

    async def _failed(self, loop: str, client: Any, error: BaseException) -> None:
        self._health.failed(loop, error)
        with contextlib.suppress(*_TROUBLE):
            await reconnect_if_wrong(client, error)

    async def _read_once(self) -> None:
        self._wake.clear()
        if self._health.is_wrong("read"):
            await self._reads.prove()
            self._health.works("read")
        room = self._room()
        if not room:
            await self._woken(self._options.block_ms / 1000)
            return
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

    def _room(self) -> int:
        full = self._held.size_bytes >= self._options.max_in_flight_bytes
        if self._hand_off.paused or self._hand_off.closed or full:
            return 0
        room = self._options.max_in_flight - len(self._held) - len(self._settled)
        return max(0, min(room, self._options.max_receive))

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
        """Requests that somebody deleted or trimmed before they were answered."""
        if entries:
            self._tick.set()
            self._metrics.count("source_records_gone_total", len(entries), transport="redis")
            fields = {"entries": len(entries), "first": entries[0]}
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

    async def _repair_group(self, loop: str) -> bool:
        """Make stream and group again. From `0`: what was added since must not be skipped."""
        try:
            made = await create_group(self._client, self._options, "0")
        except _TROUBLE as error:
            await self._failed(loop, self._client, error)
            return False
        self._replay_from = "0"
        if made:
            # What we hold is still answered, but there is nothing left to acknowledge for it.
            self._epoch += 1
            self._settled.clear()
            self._leases.clear()
            log.warning("redis_group_recreated", stream=self._options.stream)
            self._metrics.count("source_group_recreated_total", transport="redis")
        return True

    # --- housekeeping ---------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        interval_s = self._options.claim_interval_ms / 1000
        next_claim = self._clock.monotonic()
        claims = 0
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while True:
            self._tick.clear()
            try:
                if self._health.is_wrong("house"):
                    await self._commands.prove()
                await self._redeliver()
                await self._settle_batch()
                for entry in await keep(self._leases, self._commands, self._clock.monotonic()):
                    self._metrics.count("source_leases_lost_total", transport="redis")
                    log.warning("redis_lease_lost", stream=self._options.stream, id=entry)
                if self._clock.monotonic() >= next_claim:
                    next_claim = self._clock.monotonic() + interval_s
                    claims += 1
                    await self._claim()
                    await self._tell_backlog()
                    if claims % _CLEAN_EVERY_CLAIMS == 0:
                        await self._remove_dead_consumers()
                self._health.works("house")
            except _TROUBLE as error:
                if isinstance(error, RedisError) and is_nogroup(error):
                    await self._repair_group("house")
                else:
                    await self._failed("house", self._client, error)
                    self._replay_from = "0"
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            await self._rest(next_claim)

    async def _rest(self, next_claim: float) -> None:
        """Until a settle or release comes, or the next lease, redelivery or claim is due."""
        if self._settled:
            return
        dues = [next_claim, self._leases.next_due(), self._redelivery.next_due()]
        due = min(at for at in dues if at is not None)
        try:
            async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                await self._tick.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._options.settle_interval_ms / 1000)  # let settles gather

    async def _settle_batch(self) -> None:
        batch = list(self._settled)[:_SETTLE_BATCH]
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


async def reach(options: RedisOptions) -> tuple[str, ...]:
    """Whether the server serves us; creates nothing. Raises `ConnectionError`."""
    client = make_client(options, connections=1)
    try:
        facts = await look(client, options)
    finally:
        await close_client(client, options.close_timeout_s)
    return facts.notices

"""Requests from a Redis list: moved to a list of our own while we work on them.

Who calls it: the registry; ingress receives from it.
What must stay true: a request leaves our processing list only by a settle; while we live our lease is
renewed at half of `claim_idle_ms`; what a silent consumer had is taken over, oldest first; an element
that was moved to us and whose answer was lost on the way is found and handed out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog

from actors.ports import Clock, Delivery, Metrics
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.redis.client import ServerFacts, inspect
from pipeline.transports.redis.errors import describe
from pipeline.transports.redis.leases import RENEW_AT
from pipeline.transports.redis.loops import SETTLE_BATCH, TROUBLE, RedisLoops
from pipeline.transports.redis.rights import Need, list_commands
from pipeline.transports.redis_list.commands import ListCommands, digest
from pipeline.transports.redis_list.options import RedisListOptions
from pipeline.transports.source import LocalSource, number, opened

log = structlog.get_logger(__name__)


class RedisListSource(LocalSource, RedisLoops):
    """`actors.ports.Source` over one list.

    `_held` has what is in our hands by its number, `_settled` the bytes of what waits to be removed;
    the two together are our processing list, but for what was lost on the way.
    """

    kind = "redis-list"

    def __init__(
        self,
        options: RedisListOptions,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self._commands = ListCommands(self._client, options, self.consumer)
        self._reads = ListCommands(self._reader, options, self.consumer)
        self._settled: dict[int, bytes] = {}
        self._counted: set[str] = set()  # digests that may stand among the attempts
        self._last = 0
        self._held_bytes = 0
        self._moving = asyncio.Lock()  # our list and what we know of it are compared, or change
        self._in_doubt = False
        self._compare_at = 0.0
        self._renew_at = 0.0

    # --- life -----------------------------------------------------------------------------------

    async def _survey(self) -> ServerFacts:
        facts = await inspect(self._client, self._options, needs_of(self._options), tell=True)
        await self._commands.renew()
        return facts

    def _in_hand(self) -> int:
        return len(self._held)

    def _in_hand_bytes(self) -> int:
        return self._held_bytes

    def _give_up(self, deliveries: list[HeldDelivery]) -> None:
        self._drop(deliveries)  # they stay in our list, which others take over

    def _drop(self, deliveries: list[HeldDelivery]) -> bool:
        """Out of our hands; False when they were not in them."""
        self._held_bytes -= sum(d.size_bytes for d in deliveries if number(d) in self._held)
        return bool(self._take(deliveries))

    async def _leave(self) -> None:
        await self._commands.leave()

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 1)

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        await self._write_counts(deliveries, 0)

    async def _write_counts(self, deliveries: Sequence[Delivery], more: int) -> None:
        counts = {digest(d.body or b""): d.attempt + more for d in deliveries}
        self._counted.update(counts)
        try:
            await self._commands.set_counts(counts)
        except TROUBLE as error:
            log.warning("attempts_not_counted", entries=len(counts), error=describe(error))

    # --- outcomes -------------------------------------------------------------------------------

    def on_settle(self, delivery: HeldDelivery) -> None:
        """See `delivery.Owner`."""
        if self._drop([delivery]):
            self._settled[number(delivery)] = delivery.body or b""
        self._settle_waits()
        self._wake.set()

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        """See `delivery.Owner`."""
        super().on_release(delivery, reason)
        self._tick.set()

    # --- reading --------------------------------------------------------------------------------

    async def _prove(self, client: Any) -> None:
        await (self._reads if client is self._reader else self._commands).renew()

    def _doubt(self) -> None:
        self._in_doubt = True

    async def _read(self, room: int) -> None:
        if self._in_doubt or self._clock.monotonic() >= self._compare_at:
            await self._find_lost()
            return
        bodies = await self._reads.take(room, self._byte_room())
        if not bodies:
            body = await self._reads.wait()
            bodies = [] if body is None else [body]
        self._hand_out([(body, 1) for body in bodies])

    def _byte_room(self) -> int:
        return self._options.max_in_flight_bytes - self._held_bytes

    async def _find_lost(self) -> None:
        """Hand out what is in our list and not in our hands: its answer was lost on the way.

        Nothing is moved meanwhile, so whatever is there more often than we know it was lost. After a
        read that failed, and every `claim_interval_ms`: the server may make a move long after the
        connection that asked for it was cut.
        """
        self._compare_at = self._clock.monotonic() + self._options.claim_interval_ms / 1000
        async with self._moving:
            known = len(self._held) + len(self._settled)
            if not self._in_doubt and await self._reads.count_ours() <= known:
                return
            there = await self._reads.ours()
            counts = await self._reads.counts([digest(body) for body in there])
            unknown = Counter(there)
            unknown.subtract(d.body or b"" for d in self._held.values())
            unknown.subtract(self._settled.values())
            self._in_doubt = False
            lost = []
            for body, attempt in zip(there, counts, strict=True):
                if unknown[body] > 0:
                    unknown[body] -= 1
                    lost.append((body, attempt))
            self._hand_out(lost, redelivered=True)

    def _hand_out(self, found: list[tuple[bytes, int]], *, redelivered: bool = False) -> None:
        now = self._clock.monotonic()
        deliveries = []
        for body, attempt in found:
            self._last += 1
            name = digest(body)
            if redelivered:
                self._counted.add(name)
            delivery = HeldDelivery(
                self,
                self._last,
                body=body,
                headers={},
                key=None,
                default_id=name,
                received_at=now,
                origin={"transport": self.kind, "list": self._options.key, "id": name},
                attempt=attempt,
                redelivered=redelivered,
            )
            self._held_bytes += delivery.size_bytes
            deliveries.append(delivery)
        self._hold(deliveries)
        if self._hand_off.closed:  # they came while intake was being stopped
            self._give_up(deliveries)

    # --- housekeeping ---------------------------------------------------------------------------

    async def _look_after(self) -> None:
        again = {digest(d.body or b""): d.attempt for d in self._redeliver()}
        self._counted.update(again)
        await self._commands.set_counts(again)  # so that attempts survive our death
        now = self._clock.monotonic()
        if now >= self._renew_at:
            await self._commands.renew()
            self._renew_at = now + RENEW_AT * self._options.claim_idle_ms / 1000

    def _next_due(self) -> float | None:
        redelivery = self._redelivery.next_due()
        return self._renew_at if redelivery is None else min(redelivery, self._renew_at)

    async def _settle_batch(self) -> None:
        async with self._moving:
            batch = dict(list(self._settled.items())[:SETTLE_BATCH])
            if not batch:
                return
            counted = {name for body in batch.values() if (name := digest(body)) in self._counted}
            gone = await self._commands.settle(list(batch.values()), counted)
            for settled in batch:
                self._settled.pop(settled, None)
            self._counted -= counted
        self._wake.set()
        if gone:  # taken over while we were stalled, or flushed: somebody may do it again
            self._metrics.count("source_leases_lost_total", gone, transport=self.kind)
            log.warning("redis_lease_lost", list=self._options.key, entries=gone)

    async def _claim(self) -> None:
        for other in await self._commands.silent():
            async with self._moving:
                room = self._room()
                if not room:
                    break
                found = await self._commands.take_over(other, room, self._byte_room())
                self._hand_out(found, redelivered=True)
            if found:
                self._metrics.count("source_claimed_total", len(found), transport=self.kind)
                log.info("redis_claimed", list=self._options.key, entries=len(found))
        backlog = await self._commands.backlog()
        if backlog is not None:
            key = self._options.key
            self._metrics.gauge("source_lag_records", backlog, topic=key, partition="0")


def needs_of(options: RedisListOptions) -> list[Need]:
    """Commands of the source and their keys."""
    ours = options.processing("me")
    return list_commands(options.key, ours, options.consumers, options.attempts)


async def open_source(
    options: RedisListOptions, *, clock: Clock, metrics: Metrics
) -> RedisListSource:
    """A connected source. Raises `ConnectionError`; nothing stays open then."""
    return await opened(RedisListSource(options, clock=clock, metrics=metrics))

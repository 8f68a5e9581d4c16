"""The commands of one consumer of a list: take, settle, renew, take over.

Who calls it: `redis_list/source.py`.
What must stay true: a request is in the list, in exactly one processing list, or gone after a settle, at
every moment; a consumer stands among the consumers before it takes anything; whatever compares a lease
with the time does it on the server, in one step with what follows from it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from redis.exceptions import NoPermissionError

from pipeline.transports.redis.script import Script
from pipeline.transports.redis_list.options import RedisListOptions

_NOW = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
"""
"""Milliseconds of the server's clock."""
_LEASE = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
"""
)
_RENEW = Script(_LEASE)
_TAKE = Script(
    _LEASE
    + """
local taken, bytes = {}, 0
while #taken < tonumber(ARGV[3]) and bytes < tonumber(ARGV[4]) do
  local one = redis.call('LMOVE', KEYS[2], KEYS[3], ARGV[5], 'LEFT')
  if not one then break end
  taken[#taken + 1], bytes = one, bytes + #one
end
return taken
"""
)
"""KEYS: consumers, list, ours. ARGV: we, lease in ms, count, bytes, end of the list."""
_SILENT = Script(
    _NOW
    + """
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
"""
)
_TAKE_OVER = Script(
    _NOW
    + """
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
local taken, counts, bytes = {}, {}, 0
if not ends or tonumber(ends) > now then return {taken, counts} end
while #taken < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local one = redis.call('LMOVE', KEYS[2], KEYS[3], 'RIGHT', 'LEFT')
  if not one then
    if tonumber(ends) + tonumber(ARGV[4]) < now then redis.call('ZREM', KEYS[1], ARGV[1]) end
    break
  end
  taken[#taken + 1], bytes = one, bytes + #one
  counts[#counts + 1] = redis.call('HGET', KEYS[4], redis.sha1hex(one)) or '1'
end
return {taken, counts}
"""
)
"""KEYS: consumers, theirs, ours, attempts. ARGV: they, count, bytes, ms after which the name goes."""
_FORGET_AFTER_LEASES = 10
"""A consumer without requests is forgotten this many leases after its own ended: a move that was under
way when it closed has long been made by then."""


def digest(body: bytes) -> str:
    """What a request is called where it has no other name: 40 hexadecimal digits."""
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()


class ListCommands:
    """Thin, typed calls. All raise `redis.exceptions.RedisError`, `OSError` or `TimeoutError`."""

    def __init__(self, client: Any, options: RedisListOptions, consumer: str) -> None:
        self._client = client
        self._options = options
        self._consumer = consumer
        self._ours = options.processing(consumer)
        self._lease_ms = options.claim_idle_ms

    async def renew(self) -> None:
        """Our lease ends `claim_idle_ms` from now. Passes only where the server takes writes."""
        await self._lease(self._lease_ms)

    async def _lease(self, for_ms: int) -> None:
        await _RENEW.run(self._client, [self._options.consumers], [self._consumer, for_ms])

    async def take(self, count: int, size_bytes: int) -> list[bytes]:
        """What is there, at most `count`, until it is `size_bytes` or more; ours from now on."""
        options = self._options
        found: list[bytes] = await _TAKE.run(
            self._client,
            [options.consumers, options.key, self._ours],
            [self._consumer, self._lease_ms, count, size_bytes, options.take_from.upper()],
        )
        return found

    async def wait(self) -> bytes | None:
        """The next request, ours from now on; None when none comes within `block_ms`."""
        options = self._options
        found: bytes | None = await self._client.execute_command(
            "BLMOVE", options.key, self._ours, options.take_from.upper(), "LEFT",
            options.block_ms / 1000,
        )  # fmt: skip
        return found

    async def ours(self) -> list[bytes]:
        """All that is ours, the oldest first."""
        found: list[bytes] = await self._client.execute_command("LRANGE", self._ours, 0, -1)
        return found[::-1]

    async def count_ours(self) -> int:
        """How many requests are ours."""
        return int(await self._client.execute_command("LLEN", self._ours))

    async def settle(self, bodies: list[bytes], counted: set[str]) -> int:
        """Remove them, and the attempts of those in `counted`; returns how many were ours no more."""
        async with self._client.pipeline(transaction=True) as pipe:
            for body in bodies:
                pipe.execute_command("LREM", self._ours, -1, body)
            if counted:
                pipe.execute_command("HDEL", self._options.attempts, *counted)
            answers: list[int] = await pipe.execute()
        return answers[: len(bodies)].count(0)

    async def counts(self, digests: list[str]) -> list[int]:
        """Number of the next attempt of each."""
        if not digests:
            return []
        found = await self._client.execute_command("HMGET", self._options.attempts, *digests)
        return [int(count or 1) for count in found]

    async def set_counts(self, counts: dict[str, int]) -> None:
        """Digest -> number of the next attempt."""
        if counts:
            words = [word for pair in counts.items() for word in pair]
            await self._client.execute_command("HSET", self._options.attempts, *words)

    async def silent(self) -> list[str]:
        """Consumers whose lease is over, but for us."""
        names = await _SILENT.run(self._client, [self._options.consumers], [])
        return [name for raw in names if (name := raw.decode()) != self._consumer]

    async def take_over(self, other: str, count: int, size_bytes: int) -> list[tuple[bytes, int]]:
        """(request, number of its attempt) from a silent consumer, the oldest first; ours from now on.

        A consumer that has none is forgotten in the end.
        """
        options = self._options
        bodies, counts = await _TAKE_OVER.run(
            self._client,
            [options.consumers, options.processing(other), self._ours, options.attempts],
            [other, count, size_bytes, _FORGET_AFTER_LEASES * self._lease_ms],
        )
        return [(body, int(n)) for body, n in zip(bodies, counts, strict=True)]

    async def backlog(self) -> int | None:
        """Requests that nobody has settled: waiting, and taken by any consumer. None: we may not ask."""
        options = self._options
        try:
            names = await self._client.execute_command("ZRANGE", options.consumers, 0, -1)
            keys = [options.key, *(options.processing(name.decode()) for name in names)]
            async with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.execute_command("LLEN", key)
                return sum(map(int, await pipe.execute()))
        except NoPermissionError:
            return None

    async def leave(self) -> None:
        """Our lease is over: what is ours can be taken over at once."""
        await self._lease(0)

"""The stream commands of one consumer in one group, with raw replies turned into plain values.

Who calls it: `redis_streams.RedisSource` alone.
What must stay true: every reply shape of Redis 6.2 to 8 and Valkey is read (XAUTOCLAIM has two or
three elements; a deleted entry has no fields); ids are text, field names lower-case text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError

from pipeline.transports.redis.options import RedisOptions

# Removing a consumer drops its pending list, so the check and the removal must be one step.
_REMOVE_DEAD = """
local removed, left = 0, 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local field = {}
  for i = 1, #consumer, 2 do field[consumer[i]] = consumer[i + 1] end
  local dead = field.name ~= ARGV[2] and field.idle > tonumber(ARGV[3])
  if ARGV[4] == 'self' then dead = field.name == ARGV[2] end
  if dead and field.pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], field.name)
    removed = removed + 1
  else
    left = left + 1
  end
end
return {removed, left}
"""
_LEAVE_PAGE = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """A stream entry; `fields` is None when it was deleted while pending."""

    id: str
    fields: dict[str, bytes] | None


def parse_entry(raw: Any) -> Entry:
    """One ``[id, [field, value, ...]]`` of a reply."""
    entry_id, flat = raw[0].decode(), raw[1]
    if flat is None:
        return Entry(entry_id, None)
    fields = {
        name.decode("utf-8", "replace").lower(): value
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
    return Entry(entry_id, fields)


def parse_read(reply: Any) -> list[Entry]:
    """Reply of XREADGROUP on one stream; None and empty mean nothing came."""
    if not reply:
        return []
    pairs = reply.items() if isinstance(reply, dict) else reply
    return [parse_entry(raw) for _, entries in pairs for raw in entries]


def parse_claim(reply: Any) -> tuple[str, list[str], list[str]]:
    """Reply of XAUTOCLAIM with JUSTID: next cursor, ids, ids already removed (none before 7.0)."""
    ids = [entry.decode() for entry in reply[1] if entry]
    return reply[0].decode(), ids, [entry.decode() for entry in reply[2]] if reply[2:] else []


class GroupCommands:
    """Thin, typed calls. All raise `redis.exceptions.RedisError`, `OSError` or `TimeoutError`."""

    def __init__(self, client: Any, options: RedisOptions, consumer: str) -> None:
        self._client = client
        self._options = options
        self._stream = options.stream
        self._group = options.group
        self._consumer = consumer

    async def read_new(self, count: int) -> list[Entry]:
        """Entries that no consumer has had; waits up to `block_ms`."""
        reply = await self._client.execute_command(
            "XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", count,
            "BLOCK", self._options.block_ms, "STREAMS", self._stream, ">",
        )  # fmt: skip
        return parse_read(reply)

    async def prove(self) -> None:
        """A write that changes nothing: passes only where and when the server takes writes."""
        await self._client.execute_command(
            "XGROUP", "CREATECONSUMER", self._stream, self._group, self._consumer
        )

    async def own_pending(self, after: str, count: int) -> list[str]:
        """Ids above `after` that are pending for us. Unlike XREADGROUP it counts no delivery."""
        rows = await self._client.execute_command(
            "XPENDING", self._stream, self._group, f"({after}", "+", count, self._consumer
        )
        return [row[0].decode() for row in rows]

    async def fetch(self, entries: list[str]) -> tuple[list[Entry], dict[str, int]]:
        """Pending entries and their counts, which this does not raise; only those still ours.

        One that was deleted from the stream has no fields.
        """
        pending = await self._pending(entries)
        counts = {e: n for e, (owner, n) in pending.items() if owner == self._consumer}
        if not counts:
            return [], {}
        async with self._client.pipeline(transaction=False) as pipe:
            for entry in counts:
                pipe.execute_command("XRANGE", self._stream, entry, entry)
            replies = await pipe.execute()
        found = [
            parse_entry(rows[0]) if rows else Entry(entry, None)
            for entry, rows in zip(counts, replies, strict=True)
        ]
        return found, counts

    async def settle(self, entries: list[str]) -> None:
        """XACK and XDEL in one transaction: acknowledged entries do not pile up."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.execute_command("XACK", self._stream, self._group, *entries)
            pipe.execute_command("XDEL", self._stream, *entries)
            await pipe.execute()

    async def renew(self, entries: list[str]) -> set[str]:
        """Reset the idle time of entries of ours; returns those that are still pending."""
        reply = await self._client.execute_command(
            "XCLAIM", self._stream, self._group, self._consumer, 0, *entries, "JUSTID"
        )
        return {entry.decode() for entry in reply}

    async def claim_idle(self, cursor: str, count: int) -> tuple[str, list[str], list[str]]:
        """Take over up to `count` entries idle for `claim_idle_ms`; their counts stay.

        Returns the next cursor, what is ours now, and the ids that the server found deleted from
        the stream and forgot by itself (Redis 7 and later).
        """
        reply = await self._client.execute_command(
            "XAUTOCLAIM", self._stream, self._group, self._consumer,
            self._options.claim_idle_ms, cursor, "COUNT", count, "JUSTID",
        )  # fmt: skip
        return parse_claim(reply)

    async def _pending(self, entries: list[str]) -> dict[str, tuple[str, int]]:
        """Entry id -> (owner, delivery count), for those still pending."""
        if not entries:
            return {}
        async with self._client.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.execute_command("XPENDING", self._stream, self._group, entry, entry, 1)
            replies = await pipe.execute()
        return {
            row[0].decode(): (row[1].decode(), max(1, int(row[3])))
            for rows in replies
            for row in rows
        }

    async def owned(self, entries: list[str]) -> set[str]:
        """Those that are still pending for us."""
        pending = await self._pending(entries)
        return {entry for entry, (owner, _) in pending.items() if owner == self._consumer}

    async def set_counts(self, counts: dict[str, int]) -> None:
        """Write delivery counts, without taking entries from another consumer that has them."""
        owned = await self.owned(list(counts))
        if not owned:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for entry in owned:
                pipe.execute_command(
                    "XCLAIM", self._stream, self._group, self._consumer, 0, entry,
                    "RETRYCOUNT", counts[entry], "JUSTID",
                )  # fmt: skip
            await pipe.execute()

    async def backlog(self) -> int | None:
        """Entries that the group has not settled: not handed out yet, and pending.

        Before Redis 7.0, and when the server has lost count, the length of the stream: settled entries
        are deleted. None: this user may not ask.
        """
        try:
            rows = await self._client.execute_command("XINFO", "GROUPS", self._stream)
            for row in rows:
                facts = dict(zip(row[::2], row[1::2], strict=True))
                lag = facts.get(b"lag")
                if facts[b"name"] == self._group.encode() and lag is not None:
                    return int(lag) + int(facts[b"pending"])
            return int(await self._client.execute_command("XLEN", self._stream))
        except NoPermissionError:
            return None

    async def leave(self) -> None:
        """Make what is pending for us claimable at once, then leave the group when that is nothing."""
        start = "-"
        while True:
            rows = await self._client.execute_command(
                "XPENDING", self._stream, self._group, start, "+", _LEAVE_PAGE, self._consumer
            )
            if not rows:
                break
            entries = [row[0].decode() for row in rows]
            idle_ms = self._options.claim_idle_ms + 1
            await self._client.execute_command(
                "XCLAIM", self._stream, self._group, self._consumer, 0, *entries,
                "IDLE", idle_ms, "JUSTID",
            )  # fmt: skip
            start = f"({entries[-1]}"
        await self._remove("self", 0)

    async def remove_dead_consumers(self, idle_ms: int) -> tuple[int, int]:
        """(removed, left): consumers without pending entries that were idle for `idle_ms`."""
        return await self._remove("others", idle_ms)

    async def _remove(self, whom: str, idle_ms: int) -> tuple[int, int]:
        try:
            removed, left = await self._client.execute_command(
                "EVAL", _REMOVE_DEAD, 1, self._stream, self._group, self._consumer, idle_ms, whom
            )
        except NoPermissionError:
            return 0, 0  # scripting is denied to this user: names stay, nothing else suffers
        return int(removed), int(left)

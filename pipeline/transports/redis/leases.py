"""Leases of Redis stream entries: when to renew, and which may have been lost.

Who calls it: `source.RedisSource`. `now` is passed in, seconds on one monotonic clock.
What must stay true: while the owner lives and reaches the server, an entry is renewed at half of its
idle limit, so nobody claims it however long its work takes; entries that could not be renewed in
time are named, so that the owner knows that a duplicate is possible.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

RENEW_AT = 0.5
"""Share of the idle limit after which a lease is renewed: one renewal may fail and be repeated."""

_RENEW_BATCH = 500


class LeaseCommands(Protocol):
    """What the server is asked, as `group.GroupCommands` asks it."""

    async def owned(self, entries: list[str]) -> set[str]: ...
    async def renew(self, entries: list[str]) -> set[str]: ...


class Leases:
    """Entry id -> time of the last renewal, oldest first."""

    def __init__(self, claim_idle_s: float) -> None:
        self._claim_idle_s = claim_idle_s
        self._held: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, entry: str) -> bool:
        return entry in self._held

    def hold(self, entries: Iterable[str], now: float) -> None:
        """Read, claimed or renewed at `now`."""
        for entry in entries:
            self._held[entry] = now
            self._held.move_to_end(entry)

    def drop(self, entry: str) -> bool:
        """No longer ours (settled, or known to be claimed by another). False when it was not."""
        return self._held.pop(entry, None) is not None

    def due(self, now: float, limit: int | None = None) -> list[str]:
        """Entries to renew now, oldest first, at most `limit`."""
        return self._older(now, self._claim_idle_s * RENEW_AT, limit)

    def overdue(self, now: float) -> list[str]:
        """Entries whose lease ran out: another consumer may hold them too."""
        return self._older(now, self._claim_idle_s, None)

    def next_due(self) -> float | None:
        """When `due` will next name an entry."""
        for renewed in self._held.values():
            return renewed + self._claim_idle_s * RENEW_AT
        return None

    def entries(self) -> list[str]:
        return list(self._held)

    def clear(self) -> None:
        self._held.clear()

    def _older(self, now: float, age_s: float, limit: int | None) -> list[str]:
        found: list[str] = []
        for entry, renewed in self._held.items():
            if now - renewed < age_s or (limit is not None and len(found) >= limit):
                break
            found.append(entry)
        return found


async def keep(leases: Leases, commands: LeaseCommands, now: float) -> list[str]:
    """Renew what is due; returns the entries that another consumer took while we were stalled."""
    lost = []
    if overdue := set(leases.overdue(now)):  # by now they may be another's, who must not be robbed
        lost = sorted(overdue - await commands.owned(sorted(overdue)))
        for entry in lost:
            leases.drop(entry)
    while due := leases.due(now, _RENEW_BATCH):
        renewed = await commands.renew(due)
        leases.hold([entry for entry in due if entry in renewed], now)
        for entry in due:
            if entry not in renewed:  # settled by somebody else, or the stream is gone
                leases.drop(entry)
    return lost

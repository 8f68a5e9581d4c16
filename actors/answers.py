"""Answers of the last moments, for whoever asks the same again.

Who calls it: `actors.publish`.
What must stay true: the first answer wins, and is given again as the same bytes; what is remembered is
bounded in bytes and in time; only what is final is remembered, because who asks again after a failure
wants an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

import msgspec

from actors.ports import Clock

Key: TypeAlias = tuple[str, str, str, bytes]
"""Request id, route, address, digest of the record."""

_ENTRY_BYTES = 400
"""What an entry takes beside its bodies."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The records of one reply, in order."""

    bodies: tuple[bytes, ...]
    size_bytes: int


class RecentAnswers:
    """Key -> answer, the oldest first. `max_age_s` 0 remembers nothing."""

    def __init__(self, max_age_s: float, max_bytes: int, *, clock: Clock) -> None:
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._held: OrderedDict[Key, tuple[float, Answer]] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Answer | None:
        """The first answer that was given within the window, if it is still held."""
        found = self._held.get(key)
        if found is None:
            return None
        self._forget_old(self._clock.monotonic())
        return found[1] if key in self._held else None

    def put(self, key: Key, bodies: tuple[bytes, ...]) -> None:
        """Remember it, unless there is an answer or it is larger than all that may be held."""
        now = self._clock.monotonic()
        self._forget_old(now)
        size_bytes = _ENTRY_BYTES + sum(map(len, bodies))
        if key in self._held or not self._max_age_s or size_bytes > self._max_bytes:
            return
        self._held[key] = (now, Answer(bodies, size_bytes))
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            self._drop_oldest()

    def _forget_old(self, now: float) -> None:
        oldest = now - self._max_age_s
        while self._held and next(iter(self._held.values()))[0] <= oldest:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, answer) = self._held.popitem(last=False)
        self._size_bytes -= answer.size_bytes

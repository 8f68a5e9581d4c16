"""Which records of a log are sent through a route once more, and how far that has come.

Who calls it: `embedstream replay` makes a `Span`; a transport that can replay reads it.
What must stay true: pure; an offset means something in one partition only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias, runtime_checkable

Point: TypeAlias = int | datetime | Literal["start", "end"]
"""An offset, a time with its zone, or an end of the log as it is now."""
_MAX_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Records of `topic` from `begin` up to and without `end`; partitions empty: all."""

    topic: str
    begin: Point
    end: Point = "end"
    partitions: tuple[int, ...] = ()

    def problem(self) -> str | None:
        """Why it means nothing; None when it does."""
        by_offset = isinstance(self.begin, int) or isinstance(self.end, int)
        if by_offset and len(self.partitions) != 1:
            return "an offset is one of a partition: name one --partition, or give times"
        if self.begin == "end" or self.end == "start":
            return "--from is before --to: nothing lies behind the end or before the start"
        begin, end = self.begin, self.end
        if isinstance(begin, int) and isinstance(end, int) and begin >= end:
            return f"--from ({begin}) is not below --to ({end}), which is not sent any more"
        if isinstance(begin, datetime) and isinstance(end, datetime) and begin >= end:
            return f"--from ({begin.isoformat()}) is not before --to ({end.isoformat()})"
        return None


def read_point(text: str) -> Point:
    """`start`, `end`, an offset, or a time as ISO 8601 with a zone. Raises `ValueError`."""
    if text == "start":
        return "start"
    if text == "end":
        return "end"
    if re.fullmatch(r"[0-9]{1,19}", text) and int(text) <= _MAX_OFFSET:
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError(
            f"{text[:40]!r} is neither start, end, an offset nor a time with its zone, such as "
            "2026-03-01T12:00:00Z"
        )
    return when


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a span is in one partition, and what has become of it.

    begin, end  offsets; `end` is not part of it
    next        all below it has its outcome
    n_settled   records with their outcome, those behind `next` too
    n_gone      offsets that were asked for and that the log does not hold any more
    """

    topic: str
    partition: int
    begin: int
    end: int
    next: int
    n_settled: int
    n_gone: int

    @property
    def is_done(self) -> bool:
        return self.next >= self.end


@runtime_checkable
class Replaying(Protocol):
    """A source that reads a span and ends."""

    def stretches(self) -> list[Stretch]:
        """How far each partition has come."""
        ...

"""Letting finished work out in the order in which it came in, one at a time per key. Pure.

Who calls it: ingress enters what it takes on an ordered route, egress finishes and leaves.
What must stay true: of one key at most one piece of work is out, and nothing overtakes; what entered
finishes and leaves exactly once; a key costs nothing once its last piece has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A place in the line of one key. `work` is set when it has finished."""

    key: str
    work: T | None = None


class KeyOrder(Generic[T]):
    """One line per key."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Ticket[T]]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def enter(self, key: str) -> Ticket[T]:
        """The last place in the line of `key`."""
        ticket: Ticket[T] = Ticket(key)
        self._lines.setdefault(key, deque()).append(ticket)
        return ticket

    def finish(self, ticket: Ticket[T], work: T) -> T | None:
        """Note that the work is ready; it is returned when it may leave now."""
        ticket.work = work
        return work if self._lines[ticket.key][0] is ticket else None

    def leave(self, ticket: Ticket[T]) -> T | None:
        """The first of the line is out for good; what waits behind it and may leave now, or None."""
        line = self._lines[ticket.key]
        first = line.popleft()
        assert first is ticket, "work left before its turn; this is a bug"
        if not line:
            del self._lines[ticket.key]
            return None
        return line[0].work

    def withdraw(self, ticket: Ticket[T]) -> T | None:
        """It will never finish; returns the work that may leave in its stead, or None."""
        line = self._lines[ticket.key]
        was_first = line[0] is ticket
        line.remove(ticket)
        if not line:
            del self._lines[ticket.key]
            return None
        return line[0].work if was_first else None

    def is_last(self, ticket: Ticket[T]) -> bool:
        """Does nothing stand behind it? Only then may it be taken back: what is behind would overtake."""
        return self._lines[ticket.key][-1] is ticket

    def waiting(self) -> Iterator[T]:
        """Work that has finished and not left."""
        for line in self._lines.values():
            for ticket in line:
                if ticket.work is not None:
                    yield ticket.work

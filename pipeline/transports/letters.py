"""Dead letters as an operator sees them, wherever they lie: read, sent again, thrown away.

Who calls it: `embedstream dead-letters`; `<kind>/letters.py` implement `Letters`.
What must stay true: a letter sent again is the original, byte for byte, under the id that it had: body,
headers, and the key it came with; ours go, so its attempts start anew. Reading changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from actors.dead_letters import ORIGINAL_BYTES, ORIGINAL_KEY
from schemas import headers as names

_OURS = frozenset((*names.DEAD_LETTER_HEADERS, ORIGINAL_BYTES, ORIGINAL_KEY))


class CannotReplay(ValueError):
    """One letter cannot be sent again; one line that says why."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """position: its place among the letters ("2-17", an entry id, a line number), to name it by."""

    position: str
    id: str
    body: bytes
    headers: Mapping[str, bytes]
    written_ms: int | None = None

    def said(self, header: str) -> str:
        """One of our headers as text; empty when it is not there."""
        return self.headers.get(header, b"").decode("utf-8", "replace")

    @property
    def kind(self) -> str:
        return self.said(names.DEAD_LETTER_KIND)

    @property
    def code(self) -> str:
        return self.said(names.DEAD_LETTER_CODE)

    @property
    def origin(self) -> dict[str, Any]:
        """Where the record came from; empty when that cannot be read."""
        try:
            found = json.loads(self.headers.get(names.DEAD_LETTER_ORIGIN, b"{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def original_headers(self) -> dict[str, bytes]:
        """Without ours."""
        return {name: value for name, value in self.headers.items() if name not in _OURS}

    @property
    def original_key(self) -> str:
        """The key that the record had; where it had none, its id."""
        return self.said(ORIGINAL_KEY) or self.id

    def check(self) -> None:
        """Raises `CannotReplay` for what is not the whole original."""
        if not self.kind:
            raise CannotReplay(f"{self.position} is no dead letter of this service")
        if ORIGINAL_BYTES in self.headers:
            raise CannotReplay(
                f"{self.position} holds the beginning of its record only: send the record again yourself"
            )
        if "last_offset" in self.origin:
            raise CannotReplay(
                f"{self.position} is a batch of the broker that could not be read, no record"
            )


class Letters(Protocol):
    """The dead letters in one place. All methods raise `ConnectionError` with a remedy."""

    forgets: bool
    """What has been sent again is gone from here, or is not read again unless it is asked for."""

    def read(self, *, again: bool = False) -> AsyncIterator[DeadLetter]:
        """From the oldest to the newest as of now. again: those that were sent again before, too."""
        ...

    async def send_again(self, letter: DeadLetter, to: str | None) -> str:
        """Where it came from, or `to`; returns the place once it is durable there. Raises `CannotReplay`."""
        ...

    async def purge(self) -> int:
        """Throw all away that is there now; returns how many."""
        ...

    async def aclose(self) -> None:
        """Disconnect, and remember what was sent again."""
        ...

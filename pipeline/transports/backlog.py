"""What a source still holds that has not been settled. Pure.

Who calls it: the transports that can tell, and `embedstream index status`.
What must stay true: a number that is not known is None, and nobody guesses it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """One log: a partition of a topic.

    source: as versions of documents name it (``topic/partition``). begin, end: offsets of the first record
    that is there, and of the next one to come. settled: where the group goes on reading; None: it has
    settled nothing.
    """

    source: str
    begin: int
    end: int
    settled: int | None

    @property
    def lag(self) -> int:
        """Records that are not settled."""
        return max(0, self.end - max(self.begin, self.settled or 0))

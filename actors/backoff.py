"""How long to wait before trying again: doubling, bounded, and never in step with others. Pure.

Who calls it: whatever tries again, in the stations and in the transports.
What must stay true: a wait is at least half of its full length and never above `longest_s`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass(slots=True)
class Backoff:
    """The n-th wait is first_s * 2**(n - 1), at most longest_s, times a random 0.5 to 1."""

    first_s: float
    longest_s: float
    tries: int = 0

    def next_s(self) -> float:
        """Seconds to wait now; the next wait is longer."""
        full_s = min(self.longest_s, self.first_s * 2.0 ** min(self.tries, _MOST_DOUBLINGS))
        self.tries += 1
        return full_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked: the next wait is the first again."""
        self.tries = 0

"""Whether the source's loops reach a server that serves them.

Who calls it: `redis/loops.py`.
What must stay true: what one loop found wrong is cleared by that loop alone, after a command of its own
passed; there is one event and one change of the gauge when the first loop fails and when the last one
works again.
"""

from __future__ import annotations

import structlog

from actors.ports import Metrics
from pipeline.transports.redis.errors import describe

log = structlog.get_logger(__name__)


class Health:
    """Loop name -> what is wrong there."""

    def __init__(self, address: str, metrics: Metrics, kind: str) -> None:
        self._address = address
        self._metrics = metrics
        self._kind = kind
        self._wrong: dict[str, str] = {}

    def fault(self) -> str:
        """One line, empty while every loop works."""
        return next(iter(self._wrong.values()), "")

    def is_wrong(self, loop: str) -> bool:
        """Whether `loop` failed last."""
        return loop in self._wrong

    def opened(self) -> None:
        """The server was found to serve us."""
        self._metrics.gauge("source_connected", 1.0, transport=self._kind)

    def failed(self, loop: str, error: BaseException) -> None:
        """A command of `loop` failed."""
        if not self._wrong:
            log.warning(
                "redis_connection", connected=False, address=self._address, error=describe(error)
            )
            self._metrics.count("source_reconnects_total", transport=self._kind)
            self._metrics.gauge("source_connected", 0.0, transport=self._kind)
        self._wrong[loop] = f"Redis at {self._address}: {describe(error)}"

    def works(self, loop: str) -> None:
        """A command of `loop` that writes passed."""
        if self._wrong.pop(loop, None) is not None and not self._wrong:
            log.info("redis_connection", connected=True, address=self._address)
            self.opened()

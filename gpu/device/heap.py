"""Memory that was freed, given back to the system: glibc keeps what lies between blocks in use.

Who calls it: `gpu.load` and `gpu.device.pages` behind a load, `gpu.executor` between batches.
What must stay true: no torch; a system without glibc is left alone. Between batches of ever other sizes free
memory grows without an end that was seen (604 to 668 MB and 683 to 844 MB over 50,000 texts, torch's and
ONNX Runtime's linears, heap in use flat); a trim takes 4 to 6 ms and holds it at some 50 MB.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

EVERY_S = 20.0


def trim_heap() -> None:
    """Give it back now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


class HeapTrim:
    """`when_due` trims once in `EVERY_S`, whichever thread comes by."""

    def __init__(
        self,
        trim: Callable[[], None] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._clock = trim, clock
        self._lock = threading.Lock()
        self._due = clock() + EVERY_S

    def when_due(self) -> None:
        """Called often: a look at the clock, nearly always."""
        if self._clock() < self._due:
            return
        with self._lock:
            if self._clock() < self._due:
                return
            self._due = self._clock() + EVERY_S
        self._trim()

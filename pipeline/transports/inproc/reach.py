"""The in-process transport is always there.

Who calls it: the registry.
What must stay true: nothing is opened.
"""

from __future__ import annotations

from pipeline.transports.inproc.options import InprocOptions


async def reach(options: InprocOptions, *, place: str | None = None) -> tuple[str, ...]:
    """As `registry.reach`."""
    return ()

"""Options of the in-process transport.

Who calls it: the registry; everything in this folder reads `InprocOptions`.
What must stay true: as in `pipeline.transports.options`.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import SplitResult

from msgspec import Meta

from pipeline.transports.address import plain
from pipeline.transports.broker_names import name_error
from pipeline.transports.options import (
    MaxInFlight,
    MaxReceive,
    Options,
    Place,
    ReleaseBackoffMaxMs,
    ReleaseBackoffMs,
    says,
    within,
)

DESTINATION_PREFIX = "inproc:"
"""How a destination names a reply box of an in-process broker."""


class InprocOptions(Options, frozen=True, kw_only=True):
    """An in-process broker: one-off CLI runs, unit tests, platforms without a packaged broker."""

    name: Annotated[str, says("Name of the broker inside the process.")] = "embedstream"
    max_queued: Annotated[
        int, within(1, 10_000_000, "Records waiting; a full queue makes `submit` wait.")
    ] = 1024
    max_in_flight: MaxInFlight = 1024
    max_receive: MaxReceive = 256
    max_kept_replies: Annotated[
        int, within(1, 10_000_000, "Replies nobody collected; the oldest go first.")
    ] = 10_000
    max_record_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=2**40)] | None, says("Largest reply taken; none: no limit.")
    ] = None
    release_backoff_ms: ReleaseBackoffMs = 50
    release_backoff_max_ms: ReleaseBackoffMaxMs = 5000

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        name = plain(parts.netloc + parts.path)
        return {"name": name} if name else {}

    def consumes(self) -> tuple[Place, ...]:
        return (Place(frozenset(["this process"]), "broker", self.name, option="name"),)

    def one_process_problem(self) -> str:
        return "its broker lives inside one process"

    def orders(self) -> tuple[str, ...]:
        return "key", "partition"

    def name_problems(self) -> list[str]:
        error = name_error(self.name, "name")
        return [] if error is None else [error]

"""Options of the file transport.

Who calls it: the registry; everything in this folder reads `FileOptions`.
What must stay true: as in `pipeline.transports.options`.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import SplitResult

from pipeline.transports.address import plain
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

STANDARD = "-"
"""Standard input or output in place of a path."""
REPLIES = "file:replies"
DEAD_LETTERS = "file:dead-letters"


class FileOptions(Options, frozen=True, kw_only=True):
    """JSONL in, JSONL out. `-` is standard input or output."""

    path: Annotated[str, says("File of requests, one a line; `-` is standard input.")] = STANDARD
    replies: Annotated[str, says("File that replies are appended to.")] = STANDARD
    dead_letters: Annotated[
        str | None,
        says("File for records that will never succeed; None counts and logs them only."),
    ] = None
    max_line_bytes: Annotated[
        int,
        within(
            16,
            2**31 - 1,
            "A longer line is handed out cut to this length and marked by the header `line-bytes`.",
        ),
    ] = 16 * 1024 * 1024
    max_in_flight: MaxInFlight = 1024
    max_receive: MaxReceive = 256
    release_backoff_ms: ReleaseBackoffMs = 50
    release_backoff_max_ms: ReleaseBackoffMaxMs = 5000

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        if parts.netloc not in ("", "localhost"):
            raise ValueError(
                f"{parts.netloc!r} is no local path: write file:///absolute/path.jsonl"
            )
        path = plain(parts.path)
        if not path:
            raise ValueError("the address names no path; use - for standard input")
        return {"path": path}

    def consumes(self) -> tuple[Place, ...]:
        return (_place(self.path, "path"),)

    def writes(self) -> tuple[Place, ...]:
        places = [_place(self.replies, "replies")]
        if self.dead_letters is not None:
            places.append(_place(self.dead_letters, "dead_letters", is_dead_letters=True))
        return tuple(place for place in places if place.name != STANDARD)

    def one_process_problem(self) -> str:
        return "the lines of a file are read and written by one process"

    def orders(self) -> tuple[str, ...]:
        return ("partition",)

    def place_at(self, destination: str) -> Place:
        return _place(self.replies)

    @classmethod
    def destination_values(cls, parts: SplitResult) -> tuple[dict[str, Any], str]:
        return {"replies": cls.address_values(parts)["path"]}, REPLIES


def _place(path: str, option: str = "", *, is_dead_letters: bool = False) -> Place:
    return Place(
        frozenset(["this machine"]), "file", path, option=option, is_dead_letters=is_dead_letters
    )

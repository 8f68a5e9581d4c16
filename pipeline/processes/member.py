"""One of several processes of a service, seen from inside: settings from the parent, and its end noticed.

Who calls it: `embedstream serve --member`, which the parent alone starts.
What must stay true: settings come through standard input, so that no secret stands in a list of
processes and a file that was edited meanwhile changes nothing; the pipe stays open as long as the
parent lives, and when it closes this process drains as after a SIGTERM, whatever became of the parent.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import msgspec

from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.settings.records import Settings

_LENGTH_BYTES = 8
BEYOND_BUDGET_S = 10.0
"""After the drain budget: groups are left and connections closed, then the process ends anyway."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has to know. cores: numbers, empty where none can be chosen; health: number of
    the inherited socket on which the parent asks."""

    number: int
    of: int
    cores: tuple[int, ...]
    health: int


def packed(settings: Settings) -> bytes:
    """What the parent writes to standard input."""
    body = msgspec.msgpack.encode(settings)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def join(text: str) -> tuple[Member, Settings, socket.socket]:
    """Take this process's place: its cores, its settings, its socket.

    Raises `OperatorError` when nobody started it who could be its parent.
    """
    try:
        member = msgspec.json.decode(text, type=Member)
        if member.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, member.cores)
        length = int.from_bytes(_read(_LENGTH_BYTES), "big")
        settings = msgspec.msgpack.decode(_read(length), type=Settings)
        listener = socket.socket(fileno=member.health)
    except (msgspec.DecodeError, OSError) as error:
        raise OperatorError(
            f"--member is for processes that serve --processes starts ({type(error).__name__})",
            exit_status=ExitStatus.USAGE,
        ) from error
    watch = threading.Thread(
        target=_drain_with_parent, args=(settings.lifecycle.drain_budget_s,), daemon=True
    )
    watch.start()
    return member, settings, listener


def _read(length: int) -> bytes:
    found = b""
    while len(found) < length:
        part = os.read(0, min(length - len(found), 1 << 16))
        if not part:
            raise ConnectionError("the parent process is gone")
        found += part
    return found


def _drain_with_parent(budget_s: float) -> None:
    while os.read(0, 1):  # nothing is ever sent: it ends when the parent does
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(budget_s + BEYOND_BUDGET_S)
    os._exit(ExitStatus.DRAIN_EXCEEDED)

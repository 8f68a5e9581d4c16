"""Ctrl-C and SIGTERM at any moment of a command: one line, the documented status, within two seconds.

    imports            nothing has begun: the process ends in the handler
    a command          raised as `KeyboardInterrupt`, so that every `with` and `finally` runs
    a coroutine        cancels it, for the same reason
    `serve`, `up`      `pipeline.lifecycle.watch_signals` takes over: the service drains

Who calls it: `pipeline.__main__` before anything else is imported; `pipeline.cli.console.run_async`.
What must stay true: imports nothing but the standard library's light modules; only handlers on the main
thread; a second signal, or `GRACE_S` after the first, ends the process whatever still blocks. Threads
may sit in native code then, and C++ aborts a process that ends in order around them, so that the end is
always `os._exit`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE_S = 1.5
"""From the first signal: time to remove what is half done and to stop what was started."""
_AGAIN_S = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """What the handlers need; there is one process and one main thread."""

    received: int | None = None
    may_unwind = False
    lost = False
    cancel: Callable[[], object] | None = None


def watch() -> None:
    """Set the handlers. Before `started` is called they end the process at once."""
    for number in _SIGNALS:
        signal.signal(number, _on_signal)
    sys.unraisablehook = _on_unraisable


def started() -> None:
    """The command line is imported: from here on a signal unwinds what runs."""
    _State.may_unwind = True


def status(otherwise: int) -> int:
    """The exit status: 128 and the signal's number once one was received."""
    return otherwise if _State.received is None else 128 + _State.received


@contextmanager
def cancels(cancel: Callable[[], object]) -> Iterator[None]:
    """While the block runs, the first signal calls `cancel` instead of raising."""
    outer, _State.cancel = _State.cancel, cancel
    try:
        yield
    finally:
        _State.cancel = outer


def leave(status: int) -> NoReturn:
    """End the process: what was registered for its end runs, unless threads are left that it would be run
    under the feet of. The interpreter is not taken apart: after torch that takes half a second for nothing."""
    _State.may_unwind = False
    if threading.active_count() == 1:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader went away, or the disk is full: said already
            _discard(stream)
    os._exit(status)


def _discard(stream: object) -> None:
    """Keep the interpreter from flushing into a stream that takes nothing any more."""
    if stream is sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _on_unraisable(event: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised inside a finalizer or a weak reference's callback, ours too: again."""
    if _State.received is None or not isinstance(event.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(event)
        return
    _State.lost = True
    timer = threading.Timer(_AGAIN_S, os.kill, args=(os.getpid(), _State.received))
    timer.daemon = True
    timer.start()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if _State.lost:
        _State.lost = False
        raise KeyboardInterrupt
    if not _State.may_unwind or _State.received is not None:
        _end_now(signum)
    _State.received = signum
    timer = threading.Timer(GRACE_S, _end_now, args=(signum,))
    timer.daemon = True
    timer.start()
    if _State.cancel is None:
        raise KeyboardInterrupt
    _State.cancel()


def _end_now(signum: int) -> None:
    os.write(2, b"embedstream: interrupted\n")
    os._exit(128 + signum)

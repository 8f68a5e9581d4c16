"""A file that somebody named for a result: whole or untouched, with its mode; a pipe is written through.

Who calls it: `--out` of the one-off commands, `--ready-file` of `up`; `append_line` also stdout and the
sink of files.
What must stay true: a regular file (behind links, too) is replaced in one step with its mode kept, and
only by `keep`; whatever else stands there (a FIFO, a device) is written as it is; whatever happens,
nothing half-written and no temporary file is left; every failure names the file and the option.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.lifecycle import OperatorError


class NoReader(Exception):
    """A FIFO that nobody reads."""


class WholeFile:
    """Opened at once, so that a name that cannot be written is told before any work. Use with `with`.

    Args:
        path: as the person wrote it. option: what they wrote it after, for the message.
        waits: for somebody to read a FIFO, deaf to everything else meanwhile.

    Raises:
        OperatorError: it cannot be opened or, later, written.
        NoReader: nobody reads the FIFO, and `waits` is false.
    """

    def __init__(self, path: Path, option: str, *, waits: bool = True) -> None:
        self._named, self._option, self._waits = path, option, waits
        self._target = Path(os.path.realpath(path))
        self._beside: Path | None = None
        try:
            self._file = os.fdopen(self._open(), "wb")
        except OSError as error:
            raise self._refused(error) from None

    def _open(self) -> int:
        try:
            mode = self._target.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            return self._open_through()
        if mode is not None and not os.access(self._target, os.W_OK):
            raise PermissionError(0, "it is write-protected")
        beside = self._target.parent / f".embedstream-{uuid.uuid4().hex}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(beside, flags, 0o666)  # a new file's mode is up to the umask
        self._beside = beside
        if mode is not None:
            os.fchmod(descriptor, stat.S_IMODE(mode))
        return descriptor

    def _open_through(self) -> int:
        # Not opened to look, closed and opened again: a reader would see an end in between, and leave.
        try:
            descriptor = os.open(self._target, os.O_WRONLY | (0 if self._waits else os.O_NONBLOCK))
        except OSError as error:
            if error.errno == errno.ENXIO and self._target.is_fifo():
                raise NoReader from None
            raise
        os.set_blocking(descriptor, True)
        return descriptor

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes | memoryview) -> None:
        """More of the content. Raises `OperatorError`."""
        try:
            self._file.write(data)
            if self._beside is None:
                self._file.flush()  # somebody reads along
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._refused(error) from None

    def keep(self) -> None:
        """The content is all there: put it in place. Raises `OperatorError`."""
        try:
            self._file.flush()
            if self._beside is not None:
                os.fsync(self._file.fileno())  # some disks tell only now that they are full
                os.replace(self._beside, self._target)
                self._beside = None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._refused(error) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:  # what did not fit before: told already
            pass
        finally:
            if self._beside is not None:
                self._beside.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> OperatorError:
        return OperatorError(
            f"{self._named} cannot be written ({error.strerror or type(error).__name__}): "
            f"name another file with {self._option}"
        )


def append_line(descriptor: int, line: bytes) -> None:
    """Write all of `line`; of a regular file that has no room for it, what went in is taken out again.

    Raises `OSError` as `os.write`. Nobody else may write to the file meanwhile.
    """
    start = _position(descriptor)
    try:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # a terminal that is our stdin, too
                select.select([], [descriptor], [])
    except OSError:
        if start is not None:
            os.ftruncate(descriptor, start)
        raise


def _position(descriptor: int) -> int | None:
    """Where the next line begins in a regular file; None for a terminal or a pipe."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    append = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    return os.lseek(descriptor, 0, os.SEEK_END if append else os.SEEK_CUR)

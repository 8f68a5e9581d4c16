"""Replies as JSON lines to a file or standard output, in the order of completion.

Who calls it: the registry; egress publishes through it.
What must stay true: a line is written whole or not begun.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Mapping

import structlog

from actors.ports import Metrics, NoMetrics, PublishError, Source
from pipeline.transports.files.options import DEAD_LETTERS, REPLIES, STANDARD, FileOptions
from pipeline.whole_file import append_line

log = structlog.get_logger(__name__)

_STDOUT = 1


class FileSink:
    """`actors.ports.Sink` that appends lines. Only its own two destinations exist."""

    max_record_bytes: int | None = None
    dead_letter_destination = DEAD_LETTERS

    def __init__(self, options: FileOptions, *, metrics: Metrics | None = None) -> None:
        self._options = options
        self._metrics = metrics or NoMetrics()
        self._fds: dict[str, int] = {}
        self._line_lock = threading.Lock()

    async def open(self) -> None:
        """Open the outputs. Raises `ConnectionError`."""
        self._open_output(REPLIES, self._options.replies)
        if self._options.dead_letters is not None:
            self._open_output(DEAD_LETTERS, self._options.dead_letters)

    def _open_output(self, destination: str, path: str) -> None:
        if path == STANDARD:
            self._fds[destination] = _STDOUT
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fds[destination] = os.open(path, flags, 0o644)
        except OSError as error:
            raise ConnectionError(f"{path} cannot be written ({error.strerror})") from None

    def default_destination(self, request_id: str) -> str:
        return REPLIES

    def check_destination(self, destination: str) -> str | None:
        if destination == REPLIES:
            return None
        return "replies of a file go to its one output: leave reply_to away"

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        if destination == DEAD_LETTERS:
            self._metrics.count("sink_dead_letters_total", transport="file")
            log.warning("dead_letter", id=key, size_bytes=len(body))
            if destination not in self._fds:
                return
            body = _dead_letter(key, body, headers)
        fd = self._fds.get(destination)
        if fd is None:
            raise PublishError(f"no file output is named {destination[:80]!r}", retryable=False)
        # JSON strings hold no raw line end, so any that is here is mere layout.
        line = body.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"
        try:
            await asyncio.to_thread(self._write, fd, line)
        except BrokenPipeError:
            raise PublishError("the reader of the output has gone away", retryable=False) from None
        except OSError as error:
            raise PublishError(f"output: {error.strerror}", retryable=True) from None
        self._metrics.count("sink_records_total", transport="file")

    def _write(self, fd: int, line: bytes) -> None:
        # In a thread, which a cancelled publish does not stop: a line is written whole or not begun.
        with self._line_lock:
            append_line(fd, line)

    async def aclose(self) -> None:
        for fd in self._fds.values():
            if fd != _STDOUT:
                os.close(fd)
        self._fds.clear()


def _dead_letter(key: str, body: bytes, headers: Mapping[str, bytes]) -> bytes:
    record: dict[str, object] = {
        "id": key,
        "headers": {name: value.decode("utf-8", "replace") for name, value in headers.items()},
    }
    try:
        record["body"] = body.decode("utf-8")
    except UnicodeDecodeError:
        record["body_base64"] = base64.b64encode(body).decode()
    return json.dumps(record).encode()


async def open_sink(options: FileOptions, *, beside: Source | None, metrics: Metrics) -> FileSink:
    """A sink whose outputs are open. Raises `ConnectionError`."""
    sink = FileSink(options, metrics=metrics)
    try:
        await sink.open()
    except BaseException:
        await sink.aclose()
        raise
    return sink

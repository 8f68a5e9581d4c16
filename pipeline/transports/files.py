"""JSONL from a file or standard input, replies as JSON lines to a file or standard output.

Who calls it: `embedstream embed -`, batch runs over a file, demos without a broker.
What must stay true: memory is bounded whatever the input (an endless line is cut, reading stops at
`max_in_flight`); replies are whole lines in the order of completion; the source is exhausted only
when every line it handed out is settled, so a released one can come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import threading
from collections.abc import Mapping

import structlog

from actors.ports import (
    Clock,
    Deadline,
    Delivery,
    Metrics,
    NoMetrics,
    PublishError,
    SourceStatus,
    SystemClock,
)
from pipeline.transports import names
from pipeline.transports.intake import HandOff, HeldDelivery, Redelivery, UncountedAttempts
from pipeline.transports.options import FileOptions

log = structlog.get_logger(__name__)

_CHUNK_BYTES = 64 * 1024
_STDIN, _STDOUT = 0, 1


class LineSplitter:
    """Chunks in, lines out. Pure. Holds at most `max_line_bytes` + 1 bytes of an unfinished line.

    A longer line comes out cut to `max_line_bytes` + 1 bytes: one too many, so that whoever checks
    the limit sees that it is exceeded.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._keep = max_line_bytes + 1
        self._held = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Lines that end in this chunk, without their line ends."""
        lines = []
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._append(piece)
            lines.append(self._take())
        self._append(rest)
        return lines

    def end(self) -> list[bytes]:
        """The last line, when the input does not end with a line end."""
        return [self._take()] if self._held else []

    def _append(self, piece: bytes) -> None:
        self._held += piece[: self._keep - len(self._held)]

    def _take(self) -> bytes:
        line = bytes(self._held)
        self._held.clear()
        return line.removesuffix(b"\r")


class FileSource(UncountedAttempts):
    """`actors.ports.Source` over the lines of one file, pipe or standard input."""

    def __init__(
        self,
        options: FileOptions,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._metrics = metrics or NoMetrics()
        self._hand_off = HandOff(options.max_receive)
        self._redelivery = Redelivery(
            options.release_backoff_ms / 1000, options.release_backoff_max_ms / 1000
        )
        self._splitter = LineSplitter(options.max_line_bytes)
        self._fd: int | None = None
        self._regular = False
        self._exhausted = False
        self._closed = False
        self._running = False
        self._line_number = 0
        self._waiting: list[bytes] = []  # lines of the last chunk, not yet handed out
        self._held: dict[int, HeldDelivery] = {}
        self._wake = asyncio.Event()

    async def open(self) -> None:
        if self._fd is not None:
            return
        path = self._options.path
        if path == "-":
            self._fd = _STDIN
        else:
            try:
                # Without O_NONBLOCK, opening a named pipe waits for its first writer.
                self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise ConnectionError(
                    f"{path} cannot be read ({error.strerror}): check the path"
                ) from None
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISDIR(mode):
            self._close_file()
            raise ConnectionError(f"{path} is a folder: name a file with one JSON record per line")
        self._regular = stat.S_ISREG(mode)

    async def run(self) -> None:
        self._running = True
        try:
            await self._run()
        finally:
            self._running = False
            if self._closed:
                self._close_file()

    async def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            self._redeliver()
            self._hand_out()
            room = self._options.max_in_flight - len(self._held)
            intake = not (self._hand_off.paused or self._hand_off.closed)
            if room > 0 and intake and not self._waiting and not self._exhausted:
                await self._read()
                continue
            if self._exhausted and not self._waiting and not self._held:
                self._hand_off.end()
            due = self._redelivery.next_due()
            with contextlib.suppress(TimeoutError):
                wait_s = None if due is None else max(0.0, due - self._clock.monotonic())
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _read(self) -> None:
        """One chunk. Returns early, with nothing read, when something else needs the loop."""
        fd = self._fd
        assert fd is not None
        try:
            if self._regular:
                chunk = await asyncio.to_thread(os.read, fd, _CHUNK_BYTES)
            elif await self._readable(fd):
                chunk = os.read(fd, _CHUNK_BYTES)
            else:
                return
        except BlockingIOError:
            return
        if chunk:
            self._waiting.extend(self._splitter.feed(chunk))
        else:
            self._waiting.extend(self._splitter.end())
            self._exhausted = True

    async def _readable(self, fd: int) -> bool:
        """Waits for data or for `_wake`; True when there is data. Also works on a blocking fd."""
        loop = asyncio.get_running_loop()
        ready = False

        def on_data() -> None:
            nonlocal ready
            ready = True
            self._wake.set()

        loop.add_reader(fd, on_data)
        try:
            due = self._redelivery.next_due()
            wait_s = None if due is None else max(0.0, due - self._clock.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        finally:
            loop.remove_reader(fd)
        return ready

    def _hand_out(self) -> None:
        room = self._options.max_in_flight - len(self._held)
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        now = self._clock.monotonic()
        deliveries = []
        for line in taken:
            self._line_number += 1
            if not line.strip():
                continue
            delivery = HeldDelivery(
                self,
                self._line_number,
                body=line,
                headers={"content-type": b"application/json"},
                key=None,
                default_id=f"line-{self._line_number}",
                received_at=now,
                origin={
                    "transport": "file",
                    "stream": self._options.path,
                    "id": self._line_number,
                },
            )
            self._held[self._line_number] = delivery
            deliveries.append(delivery)
        if deliveries:
            self._metrics.count("source_records_total", len(deliveries), transport="file")
            self._hand_off.put(deliveries)
        if taken:
            self._wake.set()

    def _redeliver(self) -> None:
        now = self._clock.monotonic()
        for released in self._redelivery.pop_due(now):
            delivery = released.again(now)
            assert isinstance(delivery.token, int)
            self._held[delivery.token] = delivery
            self._hand_off.put([delivery])

    async def receive(self) -> list[Delivery]:
        return await self._hand_off.take()

    def pause(self) -> None:
        self._hand_off.pause()

    def resume(self) -> None:
        self._hand_off.resume()
        self._wake.set()

    def stop_intake(self) -> None:
        for delivery in [*self._hand_off.close(), *self._redelivery.clear()]:
            self._drop(delivery)
        self._wake.set()

    async def flush(self, deadline: Deadline) -> None:
        """A file keeps no position: there is nothing to make durable."""

    async def aclose(self) -> None:
        self.stop_intake()
        self._closed = True
        self._wake.set()
        if not self._running:  # else `run` closes it: a thread may be reading right now
            self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None and self._fd != _STDIN:
            os.close(self._fd)
        self._fd = None

    def status(self) -> SourceStatus:
        buffered = len(self._hand_off)
        return SourceStatus(
            self._fd is not None and not self._closed,
            "" if self._fd is not None else f"{self._options.path} is closed",
            in_flight=max(0, len(self._held) - buffered - len(self._redelivery)),
            buffered=buffered + len(self._waiting),
        )

    def on_settle(self, delivery: HeldDelivery) -> None:
        self._drop(delivery)

    def on_release(self, delivery: HeldDelivery, reason: str) -> None:
        self._metrics.count("source_released_total", transport="file")
        if self._hand_off.closed:
            self._drop(delivery)
        else:
            self._redelivery.add(delivery, self._clock.monotonic())
        self._wake.set()

    def _drop(self, delivery: HeldDelivery) -> None:
        assert isinstance(delivery.token, int)
        self._held.pop(delivery.token, None)
        self._wake.set()


class FileSink:
    """`actors.ports.Sink` that appends lines. Only its own two destinations exist."""

    max_record_bytes: int | None = None
    dead_letter_destination = names.FILE_DEAD_LETTERS

    def __init__(self, options: FileOptions, *, metrics: Metrics | None = None) -> None:
        self._options = options
        self._metrics = metrics or NoMetrics()
        self._fds: dict[str, int] = {}
        self._line_lock = threading.Lock()

    async def open(self) -> None:
        """Open the outputs. Raises `ConnectionError`."""
        self._open_output(names.FILE_REPLIES, self._options.replies)
        if self._options.dead_letters is not None:
            self._open_output(names.FILE_DEAD_LETTERS, self._options.dead_letters)

    def _open_output(self, destination: str, path: str) -> None:
        if path == "-":
            self._fds[destination] = _STDOUT
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fds[destination] = os.open(path, flags, 0o644)
        except OSError as error:
            raise ConnectionError(f"{path} cannot be written ({error.strerror})") from None

    def default_destination(self, request_id: str) -> str:
        return names.FILE_REPLIES

    def check_destination(self, destination: str) -> str | None:
        if destination == names.FILE_REPLIES:
            return None
        return "replies of a file go to its one output: leave reply_to away"

    async def publish(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        if destination == names.FILE_DEAD_LETTERS:
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
            view = memoryview(line)
            while view:
                view = view[os.write(fd, view) :]

    async def aclose(self) -> None:
        for fd in self._fds.values():
            if fd != _STDOUT:
                os.close(fd)
        self._fds.clear()


def _dead_letter(key: str, body: bytes, headers: Mapping[str, bytes]) -> bytes:
    record = {
        "id": key,
        "headers": {name: value.decode("utf-8", "replace") for name, value in headers.items()},
        "body": body.decode("utf-8", "backslashreplace"),
    }
    return json.dumps(record).encode()

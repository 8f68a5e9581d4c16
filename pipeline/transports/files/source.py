"""Requests from the lines of a file, a pipe or standard input, one JSON record each.

Who calls it: the registry; ingress receives from it.
What must stay true: memory is bounded whatever the input (an endless line is cut, reading stops at
`max_in_flight`); the source is exhausted only when every line it handed out is settled, so a
released one can come again.
"""

from __future__ import annotations

import asyncio
import os
import stat

from actors.ports import Clock, Deadline, Metrics, SourceStatus
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.files.lines import LineSplitter
from pipeline.transports.files.options import STANDARD, FileOptions
from pipeline.transports.source import LocalSource

_CHUNK_BYTES = 64 * 1024
_STDIN = 0


class FileSource(LocalSource):
    """`actors.ports.Source` over the lines of one file, pipe or standard input."""

    kind = "file"

    def __init__(
        self, options: FileOptions, *, clock: Clock | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, clock=clock, metrics=metrics)
        self._options = options
        self._splitter = LineSplitter(options.max_line_bytes)
        self._fd: int | None = None
        self._regular = False
        self._exhausted = False
        self._running = False
        self._line_number = 0
        self._waiting: list[bytes] = []  # lines of the last chunk, not yet handed out

    async def open(self) -> None:
        if self._fd is not None:
            return
        path = self._options.path
        if path == STANDARD:
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
            await self._woken(self._until_due_s())

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
            await self._woken(self._until_due_s())
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
            deliveries.append(delivery)
        self._hold(deliveries)
        if taken:
            self._wake.set()

    def _give_up(self, deliveries: list[HeldDelivery]) -> None:
        self._take(deliveries)

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
        is_open = self._fd is not None and not self._closed
        fault = "" if is_open else f"{self._options.path} is closed"
        return self._status(fault, held=len(self._held), waiting=len(self._waiting))

    def on_settle(self, delivery: HeldDelivery) -> None:
        self._take([delivery])
        self._wake.set()


async def open_source(options: FileOptions, *, clock: Clock, metrics: Metrics) -> FileSource:
    """A source whose file is open. Raises `ConnectionError`."""
    source = FileSource(options, clock=clock, metrics=metrics)
    await source.open()
    return source

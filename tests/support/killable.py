"""A subprocess whose lines are awaited and which is killed by pid, and a TCP proxy to break.

Who calls it: crash and connection tests. What must stay true: both are gone when the block ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Killable:
    """A running `consume_process.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self, timeout_s: float = 30.0) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        assert line, "the process ended"
        return line.decode().strip()

    async def got(self, count: int) -> list[str]:
        """Bodies of the next `count` records."""
        found = []
        while len(found) < count:
            words = (await self.line()).split()
            if words[0] == "GOT":
                found.append(words[1])
        return found

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def consumer_process(url: str, settle: str) -> AsyncIterator[Killable]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests" / "support" / "consume_process.py"),
        url,
        settle,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    killable = Killable(process)
    try:
        yield killable
    finally:
        await killable.kill()
        process._transport.close()  # type: ignore[attr-defined]


class Proxy:
    """Forwards one port to another; `cut` drops all connections, `hold` swallows what is sent."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self.refuse = False
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.release()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def lead_to(self, host: str, port: int) -> None:
        """New connections go there; those that are open stay where they are."""
        self._target = (host, port)

    def hold(self) -> None:
        """Connections stay open, nothing goes through: a half-open connection."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self.refuse:
                return
            back, other = await asyncio.open_connection(*self._target)
            self._writers.add(other)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, other))
                group.create_task(self._pump(back, writer))
        except (OSError, ExceptionGroup):
            return
        finally:
            self._tasks.discard(task)
            for end in (writer, other):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()
        writer.close()


class CountingMetrics:
    """Metrics that remember: `counts[name]`, `gauges[name]`."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.changed = asyncio.Event()

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + value
        self.changed.set()

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[name] = value
        self.changed.set()

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Not remembered."""

    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None:
        """Not remembered."""

    async def reached(self, name: str, value: float) -> None:
        """Waits until the counter is at least `value`."""
        async with asyncio.timeout(30):
            while self.counts.get(name, 0) < value:
                self.changed.clear()
                await self.changed.wait()

"""A TCP proxy in front of a Kafka broker that can hold back the acknowledgements of writes.

Who calls it: the fault laboratory.
What must stay true: only answers to Produce requests are late; they come in the order and with the bytes that
the broker gave them. The broker advertises the proxy's address to whoever comes through it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pipeline.local.kafka import ApacheKafka
from pipeline.local.server import free_port
from tests.support.servers import new_apache, start_now

_PRODUCE = 0


class LateAcks:
    """delay_s: how late acknowledgements are from now on; n_late: how many were."""

    def __init__(self, broker_port: int, port: int) -> None:
        self._broker_port = broker_port
        self.port = port
        self.delay_s = 0.0
        self.n_late = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LateAcks]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        self._writers.add(writer)
        try:
            back, other = await asyncio.open_connection("127.0.0.1", self._broker_port)
            ends.append(other)
            self._writers.add(other)
            writes: set[int] = set()  # correlation ids that are not answered yet
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests(reader, other, writes))
                both.create_task(self._answers(back, writer, writes))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one of the two has gone
        finally:
            self._tasks.discard(task)
            self._writers.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writes: set[int]
    ) -> None:
        while True:
            frame = await _frame(reader)
            api_key, _, number = struct.unpack_from(">hhi", frame, 4)
            if api_key == _PRODUCE:
                writes.add(number)
            writer.write(frame)
            await writer.drain()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writes: set[int]
    ) -> None:
        while True:
            frame = await _frame(reader)
            (number,) = struct.unpack_from(">i", frame, 4)
            if number in writes:
                writes.discard(number)
                if self.delay_s:
                    self.n_late += 1
                    await asyncio.sleep(self.delay_s)
            writer.write(frame)
            await writer.drain()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(struct.unpack(">i", head)[0])


@contextmanager
def behind_a_proxy() -> Iterator[tuple[ApacheKafka, LateAcks]]:
    """A broker with a second listener for those who come through the proxy."""
    port, inner, outer = free_port(), free_port(), free_port()
    server = new_apache(
        port=port,
        **{
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},LATE://127.0.0.1:{outer}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LATE:PLAINTEXT",
        },
    )
    controller = f"CONTROLLER://127.0.0.1:{server.controller_port}"
    server.properties["listeners"] = (
        f"PLAINTEXT://127.0.0.1:{port},{controller},LATE://127.0.0.1:{inner}"
    )
    start_now(server)
    try:
        yield server, LateAcks(inner, outer)
    finally:
        server.close()

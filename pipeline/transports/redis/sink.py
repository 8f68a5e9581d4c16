"""Replies and dead letters to Redis: lists and streams, each with a time to live.

Who calls it: egress, many publishes at a time.
What must stay true: a record and the TTL of its key are written in one MULTI; every key written has
a TTL and a bounded length; publishes that run together share few connections, because one waiting
publisher sends for all that wait; one bad destination fails alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import (
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from actors.ports import Metrics, NoMetrics, PublishError, RecordTooLargeForBroker, Source
from pipeline.transports.broker_names import reply_to_error
from pipeline.transports.redis.client import close_client, make_client, ping
from pipeline.transports.redis.options import (
    DATA_FIELD,
    LIST_PREFIX,
    REPLY_LIST,
    STREAM_PREFIX,
    RedisOptions,
)

_PIPELINES = 2
_BATCH_RECORDS = 128
_BATCH_BYTES = 8 * 1024 * 1024


@dataclass(eq=False, slots=True)
class _Waiting:
    """One publish. `woken` is set when it was appointed to send (`leads`) or has its outcome."""

    commands: list[tuple[Any, ...]]
    size_bytes: int
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    leads: bool = False
    done: bool = False
    gone: bool = False  # its publisher was cancelled: nobody would wake
    error: PublishError | None = None

    def resolve(self, error: PublishError | None) -> None:
        self.done, self.error = True, error
        self.woken.set()


class RedisSink:
    """`actors.ports.Sink` over a few pipelined connections."""

    def __init__(self, options: RedisOptions, *, metrics: Metrics | None = None) -> None:
        self._options = options
        self._metrics = metrics or NoMetrics()
        self._client = make_client(options, connections=_PIPELINES)
        self._queue: deque[_Waiting] = deque()  # bounded by the publishers, each waits for its own
        self._leaders = 0
        self.max_record_bytes: int | None = options.max_record_bytes
        self.dead_letter_destination = STREAM_PREFIX + options.dead_letter_stream

    async def open(self) -> None:
        """Connect. Raises `ConnectionError`."""
        await ping(self._client, self._options)

    def default_destination(self, request_id: str) -> str:
        return f"{LIST_PREFIX}{REPLY_LIST}{request_id}"

    def check_destination(self, destination: str) -> str | None:
        kind, name = split_destination(destination)
        if kind is None:
            return "reply_to must be list:NAME or stream:NAME"
        return reply_to_error(
            name,
            prefixes=self._options.reply_prefixes,
            sources=(self._options.stream, *map(bare_name, self._options.refuse_destinations)),
            dead_letters=self._options.dead_letter_stream,
        )

    async def publish(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        size = len(body) + sum(len(name) + len(value) for name, value in headers.items())
        if self.max_record_bytes is not None and size > self.max_record_bytes:
            raise RecordTooLargeForBroker(
                f"a record of {size} bytes exceeds max_record_bytes ({self.max_record_bytes})",
                limit_bytes=self.max_record_bytes,
                given_bytes=size,
            )
        mine = _Waiting(self._commands(destination, key, body, headers), size)
        self._queue.append(mine)
        self._appoint()
        try:
            while not mine.done:
                await mine.woken.wait()
                mine.woken.clear()
                if mine.leads and not mine.done:
                    await self._send_batch()
                    self._step_down(mine)
        finally:
            mine.gone = True
            if mine in self._queue:
                self._queue.remove(mine)
            if mine.leads:
                self._step_down(mine)
        if mine.error is not None:
            raise mine.error
        self._metrics.count("sink_records_total", transport="redis")

    async def aclose(self) -> None:
        await close_client(self._client, self._options.close_timeout_s)

    # --- one publisher sends for all that wait --------------------------------------------------

    def _appoint(self) -> None:
        """Let the first waiting publisher send, while a connection is free."""
        if self._leaders >= _PIPELINES:
            return
        for waiting in self._queue:
            if not waiting.leads:
                waiting.leads = True
                self._leaders += 1
                waiting.woken.set()
                return

    def _step_down(self, mine: _Waiting) -> None:
        mine.leads = False
        self._leaders -= 1
        self._appoint()

    async def _send_batch(self) -> None:
        batch: list[_Waiting] = []
        size = 0
        while self._queue and len(batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
            waiting = self._queue.popleft()
            batch.append(waiting)
            size += waiting.size_bytes
        if not batch:
            return
        try:
            await self._write(batch)
        except BaseException:
            # Cancelled in between: whether it arrived is unknown, so the others send theirs again.
            self._queue.extendleft(w for w in reversed(batch) if not (w.done or w.gone))
            raise

    async def _write(self, batch: list[_Waiting]) -> None:
        try:
            results = await self._execute(batch)
        except ResponseError as error:
            # The server refused the transaction as a whole; send each alone to find out whose
            # fault it is.
            if len(batch) == 1:
                batch[0].resolve(self._typed(error))
                return
            for waiting in batch:
                await self._write([waiting])
            return
        except (RedisError, OSError, TimeoutError) as error:
            for waiting in batch:
                waiting.resolve(self._typed(error))
            return
        position = 0
        for waiting in batch:
            answers = results[position : position + len(waiting.commands)]
            position += len(waiting.commands)
            failed = next((answer for answer in answers if isinstance(answer, Exception)), None)
            waiting.resolve(None if failed is None else self._typed(failed))

    async def _execute(self, batch: list[_Waiting]) -> list[Any]:
        async with self._client.pipeline(transaction=True) as pipe:
            for waiting in batch:
                for command in waiting.commands:
                    pipe.execute_command(*command)
            return list(await pipe.execute(raise_on_error=False))

    def _typed(self, error: Exception) -> PublishError:
        where = self._options.address
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
            self._metrics.count("sink_out_of_memory_total", transport="redis")
            return PublishError(
                f"Redis at {where} is at its maxmemory: raise it or let clients read their replies",
                retryable=True,
            )
        if isinstance(error, NoPermissionError) or str(error).startswith("WRONGTYPE"):
            return PublishError(f"Redis at {where}: {str(error)[:200]}", retryable=False)
        return PublishError(
            f"Redis at {where}: {type(error).__name__} {str(error)[:200]}".rstrip(), retryable=True
        )

    # --- commands -------------------------------------------------------------------------------

    def _commands(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> list[tuple[Any, ...]]:
        options = self._options
        kind, name = split_destination(destination)
        if kind is None:
            raise PublishError(
                f"{destination[:80]!r} is no Redis destination: list:NAME or stream:NAME",
                retryable=False,
            )
        ttl_s, length = options.reply_ttl_s, options.reply_stream_maxlen
        if destination == self.dead_letter_destination:
            ttl_s, length = options.dead_letter_ttl_s, options.dead_letter_maxlen
        if kind == LIST_PREFIX:
            return [
                ("RPUSH", name, body),
                ("LTRIM", name, -length, -1),
                ("EXPIRE", name, ttl_s),
            ]
        fields: list[str | bytes] = [DATA_FIELD, body]
        if "request-id" not in headers:
            fields += ["request-id", key]
        for header, value in headers.items():
            if header != DATA_FIELD:
                fields += [header, value]
        return [
            ("XADD", name, "MAXLEN", "~", length, "*", *fields),
            ("EXPIRE", name, ttl_s),
        ]


def split_destination(destination: str) -> tuple[str | None, str]:
    """(`list:` or `stream:`, NAME); (None, destination) when it is neither."""
    for prefix in (LIST_PREFIX, STREAM_PREFIX):
        if destination.startswith(prefix):
            return prefix, destination.removeprefix(prefix)
    return None, destination


def bare_name(destination: str) -> str:
    """NAME without `list:` or `stream:`."""
    return split_destination(destination)[1]


async def open_sink(options: RedisOptions, *, beside: Source | None, metrics: Metrics) -> RedisSink:
    """A connected sink. Raises `ConnectionError`; nothing stays open then."""
    sink = RedisSink(options, metrics=metrics)
    try:
        await sink.open()
    except BaseException:
        await sink.aclose()
        raise
    return sink

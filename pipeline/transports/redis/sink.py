"""Replies and dead letters to Redis: lists and streams, each with a time to live.

Who calls it: egress, many publishes at a time.
What must stay true: a record and the TTL of its key are one step on the server (`redis/append.py`);
every key that we make has a TTL and a bounded length, and a key that we did not make is never touched
on a sender's word; publishes that run together share few connections, because one waiting publisher
sends for all that wait; one bad destination fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from actors.ports import (
    Metrics,
    NoMetrics,
    PublishError,
    Record,
    RecordTooLargeForBroker,
    Source,
    Told,
)
from pipeline.transports.broker_names import reply_to_error
from pipeline.transports.redis.append import (
    MAX_FIELDS,
    REFUSALS,
    SCRIPT,
    SHA,
    Append,
    append,
    call_of,
    entry,
    only_look,
)
from pipeline.transports.redis.connect import (
    call_all,
    close_client,
    make_writer,
    reconnect_if_wrong,
)
from pipeline.transports.redis.errors import WRONG_SERVER, code_of, describe
from pipeline.transports.redis.loops import RedisLoops
from pipeline.transports.redis.options import (
    LIST_PREFIX,
    OWN_REPLIES,
    REPLY_LIST,
    STREAM_PREFIX,
    RedisQueueOptions,
)
from pipeline.transports.redis.shared_writes import PIPELINES, Publisher, SharedWrites, Waiting

_FAULT_AFTER = 3
_FAULT_FOR_S = 12.0
"""Above egress' longest wait between two tries: a fault lasts as long as tries fail."""


class RedisSink:
    """`actors.ports.Sink` over a few pipelined connections.

    `one_place`: what is written here goes where the settings say, never where a request says.
    """

    def __init__(
        self, options: RedisQueueOptions, *, metrics: Metrics | None = None, one_place: bool = False
    ) -> None:
        self._options = options
        self._one_place = one_place
        self._metrics = metrics or NoMetrics()
        self._client = make_writer(options, connections=PIPELINES)
        self._shared = SharedWrites(self._write_by_node)
        self._n_failures, self._failure, self._last_failure_at = 0, "", 0.0
        self.max_record_bytes: int | None = options.max_record_bytes
        self.dead_letter_destination = STREAM_PREFIX + options.dead_letter_stream

    async def open(self) -> None:
        """Connect. Raises `ConnectionError`."""
        try:
            await self._client.execute_command(
                "EVAL", SCRIPT, *only_look(self._options.dead_letter_stream)
            )
        except (RedisError, OSError, TimeoutError) as error:
            if code_of(error) == "NOPERM":
                raise ConnectionError(self._no_scripts()) from None
            raise ConnectionError(
                f"Redis at {self._options.address} cannot be used: {describe(error)}: "
                "check that it runs, and the address, user and password"
            ) from None

    def _no_scripts(self) -> str:
        return (
            f"Redis at {self._options.address}: this user may not run the script that writes replies: "
            f"grant it eval, evalsha, type and pttl on {self._options.dead_letter_stream} and on the "
            "reply keys"
        )

    def default_destination(self, request_id: str) -> str:
        return f"{LIST_PREFIX}{REPLY_LIST}{request_id}"

    def check_destination(self, destination: str) -> str | None:
        kind, name = split_destination(destination)
        if kind is None:
            return "reply_to must be list:NAME or stream:NAME"
        own = self._options.own_prefix
        if own is not None and name.startswith(own):
            return "reply_to names a key that the source keeps for itself"
        return reply_to_error(
            name,
            prefixes=self._options.reply_prefixes,
            sources=(self._options.requests, *map(bare_name, self._options.refuse_destinations)),
            dead_letters=self._options.dead_letter_stream,
        )

    def fault(self) -> str | None:
        """Why nothing can be written to the places that are the operator's; None when it can.

        Said after `_FAULT_AFTER` failures in a row, and forgotten when nothing fails any more.
        """
        fresh = time.monotonic() < self._last_failure_at + _FAULT_FOR_S
        return self._failure if fresh and self._n_failures >= _FAULT_AFTER else None

    def _is_ours(self, destination: str, name: str) -> bool:
        """Is it the operator's to make it writable, rather than a sender's to name another?"""
        if name.startswith(OWN_REPLIES) or self._one_place:
            return True
        return destination == self.dead_letter_destination

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        errors: list[PublishError | None] = []
        record = Record(destination, key, body, headers)
        await self.publish_all([record], lambda _, error: errors.append(error))
        if errors[0] is not None:
            raise errors[0]

    async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
        """See `actors.ports.ListSink`."""
        publisher = Publisher(len(records), tell)
        waiting = []
        for number, record in enumerate(records):
            try:
                waiting.append(self._waiting(publisher, number, record))
            except PublishError as error:
                publisher.left -= 1
                tell(number, error)
        await self._shared.send(publisher, waiting)

    def _waiting(self, publisher: Publisher, number: int, record: Record) -> Waiting:
        size, limit = record.size_bytes, self.max_record_bytes
        if limit is not None and size > limit:
            raise RecordTooLargeForBroker(
                f"a record of {size} bytes exceeds max_record_bytes ({limit})",
                limit_bytes=limit,
                given_bytes=size,
            )
        kind, name = split_destination(record.destination)
        append = self._append_of(record, kind, name)
        return Waiting(publisher, number, append, size, self._is_ours(record.destination, name))

    async def aclose(self) -> None:
        await close_client(self._client, self._options.close_timeout_s)

    async def _write_by_node(self, batch: list[Waiting]) -> None:
        """One node of a cluster that fails holds up no reply on another."""
        if not self._options.cluster:
            return await self._write(batch)
        parts: dict[str, list[Waiting]] = {}
        for waiting in batch:
            parts.setdefault(await self._node_of(waiting), []).append(waiting)
        async with asyncio.TaskGroup() as group:
            for part in parts.values():
                group.create_task(self._write(part))

    async def _node_of(self, waiting: Waiting) -> str:
        try:
            await self._client.initialize()
            return str(self._client.get_node_from_key(waiting.append.key).name)
        except (RedisError, OSError, TimeoutError):
            return ""  # the write itself says what is wrong

    async def _write(self, batch: list[Waiting]) -> None:
        calls = self._calls_of(batch)
        try:
            answers = await self._execute(calls)
        except (RedisError, OSError, TimeoutError) as error:
            answers = [error] * len(calls)
        failed: list[Exception] = []
        for call, answer in zip(calls, answers, strict=True):
            about_one = isinstance(answer, ResponseError) and code_of(answer) not in WRONG_SERVER
            if about_one and len(call) > 1:
                # The server refused the call as a whole; send each alone to find out whose fault it is.
                for waiting in call:
                    await self._write([waiting])
                continue
            told = [answer] * len(call) if isinstance(answer, Exception) else answer
            failed += [one for one in told if isinstance(one, Exception)]
            written = 0
            for waiting, one in zip(call, told, strict=True):
                failure = self._outcome(one, waiting.is_ours)
                written += failure is None
                waiting.resolve(failure)
            self._metrics.count("sink_records_total", written, transport="redis")
        for wrong in {code_of(error): error for error in failed}.values():
            with contextlib.suppress(RedisError, OSError):
                await reconnect_if_wrong(self._client, wrong)

    def _calls_of(self, batch: list[Waiting]) -> list[list[Waiting]]:
        """What one call of the script writes: what it treats alike; in a cluster, where its keys must
        lie together, one record."""
        if self._options.cluster:
            return [[waiting] for waiting in batch]
        alike: dict[tuple[Any, ...], list[Waiting]] = {}
        for waiting in batch:
            alike.setdefault(waiting.append.head, []).append(waiting)
        return list(alike.values())

    async def _execute(self, calls: list[list[Waiting]]) -> list[Any]:
        """One answer per call; those of a server that does not know the script yet are sent again."""
        answers = await self._run(calls, "EVALSHA", SHA)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = await self._run([calls[i] for i in unknown], "EVAL", SCRIPT)
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        return answers

    async def _run(self, calls: list[list[Waiting]], command: str, script: str) -> list[Any]:
        words = [call_of([waiting.append for waiting in call]) for call in calls]
        return await call_all(self._client, [(command, script, *one) for one in words])

    def _outcome(self, answer: object, is_ours: bool) -> PublishError | None:
        if isinstance(answer, Exception):
            error = self._typed(answer, is_ours)
            if is_ours:
                self._n_failures += 1
                self._failure, self._last_failure_at = str(error), time.monotonic()
            return error
        if is_ours:
            self._n_failures = 0
        if isinstance(answer, bytes) and answer in REFUSALS:
            return PublishError(
                f"Redis at {self._options.address}: {REFUSALS[answer]}; nothing was written",
                retryable=False,
            )
        return None

    def _typed(self, error: Exception, is_ours: bool) -> PublishError:
        where, code = self._options.address, code_of(error)
        if code == "OOM" or "OOM command not allowed" in str(error):
            self._metrics.count("sink_out_of_memory_total", transport="redis")
            return PublishError(
                f"Redis at {where} is at its maxmemory: raise it or let clients read their replies",
                retryable=True,
            )
        if code == "NOPERM" and is_ours:
            return PublishError(
                f"Redis at {where}: this user may not write there (NOPERM): grant it what "
                "docs/delivery.md lists",
                retryable=True,
            )
        return PublishError(
            f"Redis at {where}: {describe(error)}", retryable=code not in ("NOPERM", "WRONGTYPE")
        )

    def _append_of(self, record: Record, kind: str | None, name: str) -> Append:
        options, destination = self._options, record.destination
        if kind is None:
            raise PublishError(
                f"{destination[:80]!r} is no Redis destination: list:NAME or stream:NAME",
                retryable=False,
            )
        if len(record.headers) > MAX_FIELDS:
            raise PublishError(
                f"a record of {len(record.headers)} headers: at most {MAX_FIELDS} are written",
                retryable=False,
            )
        ttl_s, length, chosen = options.reply_ttl_s, options.reply_stream_maxlen, True
        if destination == self.dead_letter_destination:
            ttl_s, length, chosen = options.dead_letter_ttl_s, options.dead_letter_maxlen, False
        return append(
            kind,
            name,
            [record.body]
            if kind == LIST_PREFIX
            else entry(record.key, record.body, record.headers),
            chosen=chosen and not self._one_place,
            ttl_s=ttl_s,
            length=length,
        )


def split_destination(destination: str) -> tuple[str | None, str]:
    """(`list:` or `stream:`, NAME); (None, destination) when it is neither."""
    for prefix in (LIST_PREFIX, STREAM_PREFIX):
        if destination.startswith(prefix):
            return prefix, destination[len(prefix) :]
    return None, destination


def bare_name(destination: str) -> str:
    """NAME without `list:` or `stream:`."""
    return split_destination(destination)[1]


async def open_sink(
    options: RedisQueueOptions, *, beside: Source | None, metrics: Metrics
) -> RedisSink:
    """A connected sink; beside no source it is a route's one place. Raises `ConnectionError`; nothing
    stays open then.
    """
    sink = RedisSink(options, metrics=metrics, one_place=beside is None)
    if isinstance(beside, RedisLoops):
        beside.watch(sink.fault)
    try:
        await sink.open()
    except BaseException:
        await sink.aclose()
        raise
    return sink

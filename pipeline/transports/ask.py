"""Ask a running service over its own broker: put a request, wait for its reply.

Who calls it: the CLI's `--via`; the demo.
What must stay true: a reply for nobody is counted and dropped (bug log D11); every wait has a bound;
an asker reads only its own replies and takes nothing away from others; failures to reach the broker
are `ConnectionError`s of one line that end in the remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from typing import Any, Protocol

import msgspec

from pipeline.transports import names
from pipeline.transports.options import FileOptions, KafkaOptions, RedisOptions
from pipeline.transports.urls import parse_url
from schemas.codec import decode_reply, join_parts
from schemas.errors import ContentType, EmbedstreamError
from schemas.headers import CONTENT_TYPE, DEADLINE_MS, REPLY_TO, REQUEST_ID
from schemas.results import FailureReply, Reply

MAX_CONCURRENT = 32
"""Questions in flight per asker. Each holds one Redis connection; more gain nothing, because the
service batches across askers anyway."""
_BLOCK_S = 1.0  # one BLPOP; far below any socket time-out


class Asker(Protocol):
    """One way to ask. Start `run` as a task, then call `ask`, at most `MAX_CONCURRENT` at once."""

    unknown_replies: int
    """Replies that belonged to nobody here."""

    async def run(self) -> None:
        """Read replies until cancelled."""
        ...

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        """Send one record and wait for its reply, parts joined.

        The record's own id must be `request_id`, and no other question in flight may have it.

        Raises:
            TimeoutError: no complete reply in time.
            ConnectionError: the broker went away.
        """
        ...

    async def aclose(self) -> None: ...


async def open_asker(url: str, *, timeout_s: float = 10.0) -> Asker:
    """Connect to the service behind `url` (`redis://host:port/stream`, `kafka://host:port/topic`).

    Raises `ValueError` for an address nobody can ask and `ConnectionError` for a broker out of
    reach.
    """
    options = parse_url(url)
    if isinstance(options, RedisOptions):
        return await _open_redis(options)
    if isinstance(options, KafkaOptions):
        return await _open_kafka(options, timeout_s)
    raise ValueError("a running service is asked over redis:// or kafka://")


async def reach(url: str) -> tuple[str, ...]:
    """Whether the broker behind a source can be used; joins no group and creates nothing.

    Returns one line per thing that works but should be looked at (a topic that does not exist yet).
    Raises `ConnectionError` or `ValueError` with one line and the remedy.
    """
    options = parse_url(url)
    if isinstance(options, RedisOptions):
        asker = await _open_redis(options)
        await asker.aclose()
    elif isinstance(options, KafkaOptions):
        from pipeline.transports.kafka.cluster import survey

        return (await survey(msgspec.structs.replace(options, auto_create=False))).notices
    elif isinstance(options, FileOptions) and not (
        options.path == "-" or os.access(options.path, os.R_OK)
    ):
        raise ConnectionError(f"{options.path} cannot be read: check the path of the source")
    return ()


def _headers(
    request_id: str, content_type: ContentType, reply_to: str, timeout_s: float
) -> dict[str, bytes]:
    # The service need not compute what nobody waits for any more.
    deadline_ms = time.time_ns() // 1_000_000 + int(timeout_s * 1000)
    return {
        CONTENT_TYPE: content_type.encode(),
        REQUEST_ID: request_id.encode(),
        REPLY_TO: reply_to.encode(),
        DEADLINE_MS: b"%d" % deadline_ms,
    }


class _Parts:
    """Collects the parts of one reply; a part that comes twice counts once."""

    def __init__(self) -> None:
        self._parts: dict[int, Reply] = {}

    def add(self, record: Reply | FailureReply) -> Reply | FailureReply | None:
        """The whole reply once it is there."""
        if isinstance(record, FailureReply) or record.part is None or record.parts is None:
            return record
        self._parts[record.part] = record
        if len(self._parts) < record.parts:
            return None
        try:
            return join_parts([self._parts[i] for i in sorted(self._parts)])
        except EmbedstreamError:
            self._parts.clear()  # parts of two different replies: the delivery comes again
            return None


# --- Redis -------------------------------------------------------------------------------------------


async def _open_redis(options: RedisOptions) -> RedisAsker:
    import redis.asyncio as redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    client = redis.Redis(
        host=options.host,
        port=options.port,
        db=options.db,
        username=options.username,
        password=options.password,
        ssl=options.tls,
        ssl_ca_certs=options.ssl_cafile,
        socket_connect_timeout=options.connect_timeout_s,
        socket_timeout=max(options.socket_timeout_s, 2 * _BLOCK_S),
        retry=Retry(NoBackoff(), 0),
        max_connections=MAX_CONCURRENT + 1,
        protocol=2,
    )
    try:
        await client.ping()
    except (redis.RedisError, OSError) as error:
        await client.aclose()
        raise ConnectionError(
            f"Redis at {options.address} cannot be used ({type(error).__name__}: {error}): "
            "check that it runs, and the address, user and password"
        ) from None
    return RedisAsker(options, client)


class RedisAsker:
    """XADD to the request stream, BLPOP on a reply list of its own per question."""

    def __init__(self, options: RedisOptions, client: Any) -> None:
        self._options = options
        self._client = client
        self.unknown_replies = 0

    async def run(self) -> None:
        """Nothing to do: every question reads its own list."""

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        import redis.exceptions

        key = f"{names.REDIS_REPLY_LIST}{request_id}"
        headers = _headers(request_id, content_type, names.REDIS_LIST_PREFIX + key, timeout_s)
        parts = _Parts()
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.xadd(
                    self._options.stream, {names.REDIS_DATA_FIELD: body, **headers}
                )
                while True:
                    popped = await self._client.blpop([key], timeout=_BLOCK_S)
                    if popped is None:
                        continue
                    record = _decode(popped[1], request_id)
                    if record is None:
                        self.unknown_replies += 1
                    elif (whole := parts.add(record)) is not None:
                        return whole
        except TimeoutError:
            raise TimeoutError(
                f"no reply within {timeout_s:g} s from stream {self._options.stream} at "
                f"{self._options.address}: {await self._why_silent()}"
            ) from None
        except redis.exceptions.RedisError as error:
            raise ConnectionError(
                f"Redis at {self._options.address} failed ({type(error).__name__}): "
                "check that it still runs, and ask again"
            ) from None

    async def _why_silent(self) -> str:
        """What a person should look at: nobody listens, or somebody is busy."""
        import redis.exceptions

        with contextlib.suppress(TimeoutError, redis.exceptions.RedisError):
            async with asyncio.timeout(2.0):
                groups = await self._client.xinfo_groups(self._options.stream)
            if not any(group["consumers"] for group in groups):
                return "no service reads that stream; start one with `embedstream serve`"
        return "ask again with a longer --timeout, or look at the service's log"

    async def aclose(self) -> None:
        """Disconnect, in bounded time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.close_timeout_s):
                await self._client.aclose()


def _decode(body: bytes, request_id: str) -> Reply | FailureReply | None:
    """The reply record, or None when it is none, or somebody else's."""
    try:
        record = decode_reply(body)
    except EmbedstreamError:
        return None
    return record if record.id == request_id else None


# --- Kafka -------------------------------------------------------------------------------------------


async def _open_kafka(options: KafkaOptions, timeout_s: float) -> KafkaAsker:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
    from aiokafka.errors import KafkaError

    from pipeline.transports.kafka.cluster import client_settings

    settings = client_settings(options)
    producer = AIOKafkaProducer(**settings, acks="all", max_request_size=options.max_request_size)
    consumer = AIOKafkaConsumer(
        **settings,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="latest",
        fetch_max_wait_ms=options.fetch_max_wait_ms,
        max_partition_fetch_bytes=options.max_partition_fetch_bytes,
    )
    asker = KafkaAsker(options, producer, consumer)
    try:
        async with asyncio.timeout(timeout_s):
            await producer.start()
            await consumer.start()
            partitions = await producer.partitions_for(options.reply_topic)
            assigned = [TopicPartition(options.reply_topic, p) for p in sorted(partitions)]
            consumer.assign(assigned)
            await consumer.seek_to_end(*assigned)
            for partition in assigned:  # before the first question: its reply must lie after this
                await consumer.position(partition)
    except (KafkaError, OSError, TimeoutError, ssl.SSLError) as error:
        await asker.aclose()
        raise ConnectionError(
            f"Kafka at {options.bootstrap} cannot be used with reply topic {options.reply_topic} "
            f"({type(error).__name__}): check that broker and service run, and the address"
        ) from None
    except BaseException:
        await asker.aclose()
        raise
    return asker


class KafkaAsker:
    """Produces to the request topic and reads the reply topic from its end, without a group."""

    def __init__(self, options: KafkaOptions, producer: Any, consumer: Any) -> None:
        self._options = options
        self._producer = producer
        self._consumer = consumer
        self._waiting: dict[str, tuple[_Parts, asyncio.Future[Reply | FailureReply]]] = {}
        self.unknown_replies = 0

    async def run(self) -> None:
        """Hand every reply to who asked; the rest is counted."""
        from aiokafka.errors import KafkaError

        try:
            async for message in self._consumer:
                self.take(message.value)
        except KafkaError as error:
            raise ConnectionError(
                f"Kafka at {self._options.bootstrap} gives no replies any more "
                f"({type(error).__name__}): check that it still runs, and ask again"
            ) from None

    def take(self, body: bytes | None) -> None:
        """One record of the reply topic. D11: what belongs to nobody is no error."""
        record = None
        if body is not None:
            with contextlib.suppress(EmbedstreamError):
                record = decode_reply(body)
        waiting = self._waiting.get(record.id) if record is not None else None
        if record is None or waiting is None:
            self.unknown_replies += 1
            return
        parts, future = waiting
        whole = parts.add(record)
        if whole is not None and not future.done():
            future.set_result(whole)

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        from aiokafka.errors import KafkaError

        future: asyncio.Future[Reply | FailureReply] = asyncio.get_running_loop().create_future()
        headers = _headers(request_id, content_type, self._options.reply_topic, timeout_s)
        topic = self._options.topics[0]
        self._waiting[request_id] = (_Parts(), future)
        try:
            async with asyncio.timeout(timeout_s):
                await self._producer.send_and_wait(
                    topic, key=request_id.encode(), value=body, headers=list(headers.items())
                )
                return await future
        except TimeoutError:
            raise TimeoutError(
                f"no reply within {timeout_s:g} s on {self._options.reply_topic} at "
                f"{self._options.bootstrap}: check that a service reads {topic}, or ask again with "
                "a longer --timeout"
            ) from None
        except KafkaError as error:
            raise ConnectionError(
                f"Kafka at {self._options.bootstrap} refused the request "
                f"({type(error).__name__}): check topic {topic} and the size of the request"
            ) from None
        finally:
            del self._waiting[request_id]

    async def aclose(self) -> None:
        """Disconnect, in bounded time."""
        for client in (self._consumer, self._producer):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.close_timeout_s):
                    await client.stop()

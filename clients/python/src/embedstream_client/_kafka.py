"""A service behind a Kafka topic.

Who calls it: `_session`.
What must stay true: one producer sends and one consumer reads the reply topic from where it ended when
the client opened, whatever the number of calls; no request is sent before that place is known; records
of others are passed over by their key, undecoded; a cancel record goes to its request's partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from ._calls import Call, Calls
from ._links import Backoff, leave_if_cancelled, together
from ._urls import KafkaEndpoint
from ._wire.codec import encode_request
from ._wire.headers import REQUEST_ID
from ._wire.requests import CancelRequest
from .errors import RecordTooLarge, Unreachable

CONNECT_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_MS = 10_000
_FETCH_WAIT_MS = 50
_CLOSE_S = 5.0
_MAX_UNSENT = 1000
_LOOK_S = 1.0
"""How soon a topic that is missing, or new partitions of the reply topic, are looked for again."""


class KafkaLink:
    """`_links.Link` over one producer and one consumer without a group."""

    def __init__(self, endpoint: KafkaEndpoint, calls: Calls) -> None:
        self._endpoint = endpoint
        self._calls = calls
        self.reply_to = endpoint.reply_topic
        self._outbox: deque[tuple[Call, bytes, dict[str, bytes]]] = deque()  # bounded by the calls
        self._wake = asyncio.Event()
        self._unsent: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_UNSENT)
        self._ready = asyncio.Event()
        self._tried = asyncio.Event()
        self._trouble: Unreachable | None = None
        self.consumer: Any = None
        """The reader of the moment, for those who look from outside."""

    # --- what the session calls -----------------------------------------------------------------

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            leave_if_cancelled()
            producer = consumer = None
            try:
                producer, consumer = self._clients()
                await asyncio.wait_for(self._start(producer, consumer), CONNECT_TIMEOUT_S)
                self._trouble, self.consumer = None, consumer
                self._ready.set()
                self._tried.set()
                backoff.reset()
                await together(self._send_forever(producer), self._read_forever(producer, consumer))
            except Exception as error:  # noqa: BLE001  aiokafka, the socket, TLS: all mean no cluster
                self._trouble = self._unreachable(error)
                if not self._trouble.retryable:
                    self._calls.fail_all(self._trouble)
            finally:
                self._ready.clear()
                self._tried.set()
                await _close(consumer)
                await _close(producer)
            await asyncio.sleep(backoff.next_s())
            self._send_again()

    def send(self, call: Call) -> None:
        self._put(call, call.body, call.headers)

    def withdraw(self, call: Call) -> None:
        if call.sent:
            self._put(call, *encode_request(CancelRequest(id=call.id)))

    async def ping(self) -> None:
        await self._tried.wait()
        if not self._ready.is_set():
            raise self._trouble or self._unreachable(asyncio.TimeoutError())

    async def why_silent(self, call: Call) -> str:
        if self._trouble is not None:
            return self._trouble.message
        if not call.sent:
            return f"the topic {self._endpoint.topic} does not take requests: check that it exists"
        return (
            f"check that a service reads {self._endpoint.topic} and may write to "
            f"{self._endpoint.reply_topic}, or allow more time"
        )

    # --- sending --------------------------------------------------------------------------------

    def _put(self, call: Call, body: bytes, headers: dict[str, bytes]) -> None:
        self._outbox.append((call, body, headers))
        self._wake.set()

    async def _send_forever(self, producer: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                leave_if_cancelled()
                await self._wake.wait()
                if not self._outbox:
                    self._wake.clear()
                    continue
                await self._room.acquire()
                call, body, headers = self._outbox.popleft()
                if call.ended and body is call.body:
                    self._room.release()
                    continue
                sending = loop.create_task(self._send_one(producer, call, body, headers))
                self._unsent.add(sending)
                sending.add_done_callback(self._forget)
        finally:
            for unsent in self._unsent:
                unsent.cancel()

    def _forget(self, sending: asyncio.Task[None]) -> None:
        self._unsent.discard(sending)
        self._room.release()

    async def _send_one(
        self, producer: Any, call: Call, body: bytes, headers: dict[str, bytes]
    ) -> None:
        from aiokafka.errors import KafkaError, MessageSizeTooLargeError

        try:
            call.sent = call.sent or body is call.body
            await producer.send_and_wait(
                self._endpoint.topic,
                key=call.id.encode(),
                value=body,
                headers=list(headers.items()),
            )
        except MessageSizeTooLargeError:
            call.fail(
                RecordTooLarge(
                    "the request is larger than Kafka takes: split it, or raise max_request_size here "
                    "and the topic's max.message.bytes",
                    limit=self._endpoint.max_request_size,
                    given=len(body),
                )
            )
        except (KafkaError, OSError) as error:
            call.fail(self._unreachable(error))

    def _send_again(self) -> None:
        """Whether the old producer's records arrived is unknown: the service knows twins by their id."""
        waiting = {id(call) for call, _, _ in self._outbox}
        for call in self._calls:
            if not call.ended and id(call) not in waiting:
                self.send(call)

    # --- reading --------------------------------------------------------------------------------

    async def _read_forever(self, producer: Any, consumer: Any) -> None:
        while True:
            leave_if_cancelled()
            batches = await consumer.getmany(timeout_ms=int(_LOOK_S * 1000))
            for records in batches.values():
                for record in records:
                    self._take(record)
            await self._assign(producer, consumer, from_start=True)

    def _take(self, record: Any) -> None:
        key = None if record.key is None else record.key.decode("utf-8", "replace")
        if key is None:
            header = dict(record.headers).get(REQUEST_ID)
            key = None if header is None else header.decode("utf-8", "replace")
        if key is None or key not in self._calls:
            self._calls.n_unknown += 1
            return
        self._calls.take(record.value, key)

    async def _assign(self, producer: Any, consumer: Any, *, from_start: bool) -> None:
        """Read every partition of the reply topic: a new one from its start, since a reply may be its
        first record."""
        from aiokafka import TopicPartition

        topic = self._endpoint.reply_topic
        numbers = await producer.partitions_for(topic)
        known = consumer.assignment()
        wanted = {TopicPartition(topic, number) for number in numbers or ()}
        if wanted <= known:
            return
        positions = {partition: await consumer.position(partition) for partition in known}
        consumer.assign(sorted(wanted | known))
        for partition, position in positions.items():
            consumer.seek(partition, position)
        new = sorted(wanted - known)
        if from_start:
            await consumer.seek_to_beginning(*new)
        else:
            await consumer.seek_to_end(*new)
        for partition in new:
            await consumer.position(partition)

    # --- connections ----------------------------------------------------------------------------

    def _clients(self) -> tuple[Any, Any]:
        from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

        endpoint = self._endpoint
        settings: dict[str, Any] = {
            "bootstrap_servers": endpoint.bootstrap.split(","),
            "client_id": "embedstream-client",
            "request_timeout_ms": _REQUEST_TIMEOUT_MS,
            "metadata_max_age_ms": 10_000,
            "security_protocol": endpoint.security_protocol,
        }
        if "SASL" in endpoint.security_protocol:
            settings["sasl_mechanism"] = endpoint.sasl_mechanism
            if endpoint.sasl_mechanism == "OAUTHBEARER":
                settings["sasl_oauth_token_provider"] = _token_file(endpoint.sasl_token_file)
            else:
                settings["sasl_plain_username"] = endpoint.sasl_username
                settings["sasl_plain_password"] = _password(endpoint)
        if "SSL" in endpoint.security_protocol:
            context = ssl.create_default_context(cafile=endpoint.ssl_cafile)
            if endpoint.ssl_certfile is not None:
                context.load_cert_chain(
                    endpoint.ssl_certfile, endpoint.ssl_keyfile, password=endpoint.ssl_password
                )
            context.check_hostname = endpoint.ssl_check_hostname
            settings["ssl_context"] = context
        producer = AIOKafkaProducer(
            **settings, acks="all", max_request_size=endpoint.max_request_size
        )
        consumer = AIOKafkaConsumer(
            **settings,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
            max_partition_fetch_bytes=4 * 1024 * 1024,
        )
        return producer, consumer

    async def _start(self, producer: Any, consumer: Any) -> None:
        """Connect, and stand at the end of the reply topic; waits for a topic that is missing."""
        await producer.start()
        await consumer.start()
        while True:
            await self._assign(producer, consumer, from_start=False)
            if consumer.assignment():
                return
            await asyncio.sleep(_LOOK_S / 5)

    def _unreachable(self, error: BaseException) -> Unreachable:
        where = self._endpoint.address
        what = type(error).__name__
        denied = "Authorization" in what or "Authentication" in what or "Sasl" in what
        unreachable = Unreachable(
            f"Kafka at {where} refuses this client ({what}): check user, password and its rights"
            if denied
            else f"Kafka at {where} cannot be used with reply topic {self._endpoint.reply_topic} "
            f"({what}): check that broker and service run, and the address"
        )
        unreachable.retryable = not denied
        return unreachable


async def _close(client: Any) -> None:
    if client is None:
        return
    stopping: Awaitable[Any] = client.stop()
    with contextlib.suppress(Exception):
        await asyncio.wait_for(stopping, _CLOSE_S)


def _password(endpoint: KafkaEndpoint) -> str | None:
    if endpoint.sasl_password_file is None:
        return endpoint.sasl_password
    return _read("sasl_password_file", endpoint.sasl_password_file)


def _token_file(path: str | None) -> Any:
    """What aiokafka asks for a token, for each connection."""
    from aiokafka.abc import AbstractTokenProvider

    if path is None:
        raise Unreachable("sasl_mechanism OAUTHBEARER needs sasl_token_file")
    place: str = path

    class TokenFile(AbstractTokenProvider):  # type: ignore[misc]
        async def token(self) -> str:
            return _read("sasl_token_file", place)

    return TokenFile()


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreachable(f"{option} {path} cannot be read ({type(error).__name__})") from None

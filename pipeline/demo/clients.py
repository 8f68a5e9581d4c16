"""The demo's clients: bulk over Kafka with plain aiokafka, questions over Redis with the light client.

Who calls it: `pipeline.demo.run`.
What must stay true: nothing here knows the service beyond the wire contract (topic and stream names,
msgpack records); every wait has a bound; no task outlives the call that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from embedstream_client import AsyncClient, parse_url

_POLL_MS = 200
_CONNECT_S = 15.0
_CLOSE_S = 5.0


class DemoBrokerError(Exception):
    """A broker did not do its part; one line."""


class KafkaIndexer:
    """Produces requests to a topic and reads their replies from the reply topic.

    Partitions are assigned by hand, from their beginning: there is no group to join, and no reply is
    missed. Replies to other requests are handed on too; the caller knows its own ids.
    """

    def __init__(self, bootstrap: str, *, request_topic: str, reply_topic: str) -> None:
        self._request_topic = request_topic
        self._reply_topic = reply_topic
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)

    async def open(self) -> None:
        """Connect. Raises `DemoBrokerError`."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._producer.start()
                await self._consumer.start()
                numbers = await self._producer.partitions_for(self._reply_topic)
                partitions = [TopicPartition(self._reply_topic, number) for number in numbers]
                self._consumer.assign(partitions)
                await self._consumer.seek_to_beginning(*partitions)
        except (KafkaError, TimeoutError) as error:
            raise DemoBrokerError(f"Kafka cannot be reached: {type(error).__name__}") from error

    async def exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        on_reply: Callable[[str, bytes], bool],
        *,
        patience_s: float,
    ) -> None:
        """Send every (id, record); hand every reply to `on_reply` until it returns true.

        Then reads on for a moment, so that a second answer to the same request is seen as well.
        Raises `DemoBrokerError` when no reply comes for `patience_s`.
        """
        try:
            await self._send(requests)
            await self._receive(on_reply, patience_s)
        except KafkaError as error:
            raise DemoBrokerError(f"Kafka: {type(error).__name__}") from error

    async def _send(self, requests: Sequence[tuple[str, bytes]]) -> None:
        pending = []
        for request_id, record in requests:
            headers = [("content-type", b"application/msgpack")]
            pending.append(
                await self._producer.send(
                    self._request_topic, record, key=request_id.encode(), headers=headers
                )
            )
        await asyncio.gather(*pending)

    async def _receive(self, on_reply: Callable[[str, bytes], bool], patience_s: float) -> None:
        done = False
        last = time.monotonic()
        while True:
            batches = await self._consumer.getmany(timeout_ms=_POLL_MS)
            records = [record for batch in batches.values() for record in batch]
            for record in records:
                if record.key is not None and record.value is not None:
                    done = on_reply(record.key.decode("utf-8", "replace"), record.value) or done
            if records:
                last = time.monotonic()
            elif done:
                return
            elif time.monotonic() - last > patience_s:
                raise DemoBrokerError(f"no reply on {self._reply_topic} for {patience_s:.0f} s")

    async def aclose(self) -> None:
        """Close both connections, in bounded time."""
        for client in (self._producer, self._consumer):
            with contextlib.suppress(KafkaError, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await client.stop()


class RedisAsker:
    """Questions through a Redis stream, by the light client."""

    def __init__(self, url: str, *, stream: str) -> None:
        self._client = AsyncClient(msgspec.structs.replace(parse_url(url), stream=stream))

    async def ask(self, request_id: str, record: bytes, *, timeout_s: float) -> bytes:
        """Send one record and wait for its reply. Raises `DemoBrokerError`."""
        try:
            bodies = await self._client.ask(record, request_id=request_id, timeout=timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise DemoBrokerError(f"Redis: {error}") from error
        return bodies[0]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

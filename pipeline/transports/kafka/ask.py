"""Ask a running service over Kafka.

Who calls it: the registry.
What must stay true: as in `pipeline.transports.ask`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from pipeline.transports.ask import Parts, ask_headers, reply_record
from pipeline.transports.kafka.cluster import client_settings
from pipeline.transports.kafka.options import KafkaOptions
from schemas.errors import ContentType
from schemas.results import FailureReply, Reply


async def open_asker(options: KafkaOptions, *, timeout_s: float) -> KafkaAsker:
    """Connected, and at the end of the reply topic. Raises `ConnectionError`."""
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
        self._waiting: dict[str, tuple[Parts, asyncio.Future[Reply | FailureReply]]] = {}
        self.unknown_replies = 0

    async def run(self) -> None:
        """Hand every reply to who asked; the rest is counted."""
        try:
            async for message in self._consumer:
                self.take(message.value)
        except KafkaError as error:
            raise ConnectionError(
                f"Kafka at {self._options.bootstrap} gives no replies any more "
                f"({type(error).__name__}): check that it still runs, and ask again"
            ) from None

    def take(self, body: bytes | None) -> None:
        """One record of the reply topic. What belongs to nobody is no error."""
        record = reply_record(body)
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
        future: asyncio.Future[Reply | FailureReply] = asyncio.get_running_loop().create_future()
        headers = ask_headers(request_id, content_type, self._options.reply_topic, timeout_s)
        topic = self._options.topics[0]
        self._waiting[request_id] = (Parts(), future)
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

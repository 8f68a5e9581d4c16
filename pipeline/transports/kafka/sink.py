"""Replies and dead letters to Kafka: a record counts as published when all replicas have it.

Who calls it: egress, many publishes at a time.
What must stay true: every send is awaited with `acks=all` and a bound; errors say whether the same
record may pass later; a producer that broke for good is replaced, so that one fault does not stop
all replies after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidTopicError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    ProducerFenced,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from actors.ports import Metrics, NoMetrics, PublishError, RecordTooLargeForBroker, Source
from pipeline.transports.broker_names import reply_to_error
from pipeline.transports.kafka.cluster import (
    ClusterFacts,
    client_settings,
    closed_in_time,
    survey,
    words,
)
from pipeline.transports.kafka.deliveries import key_of_id
from pipeline.transports.kafka.options import KafkaOptions, topic_error
from pipeline.transports.kafka.source import KafkaSource

log = structlog.get_logger(__name__)

RECORD_OVERHEAD_BYTES = 1024
"""Kept free below the broker's limit: batch and record framing (under 100 bytes), a key of 256."""
MAX_BATCH_BYTES = 256 * 1024
_FIND_TOPIC_S = 5.0
_CUT_TIMEOUT_S = 1.0
_MAX_KNOWN_TOPICS = 10_000
_PERMANENT = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError, InvalidTopicError)
_BROKEN_PRODUCER = (OutOfOrderSequenceNumber, ProducerClosed, ProducerFenced)


class KafkaSink:
    """`actors.ports.Sink` over one aiokafka producer."""

    def __init__(self, options: KafkaOptions, *, metrics: Metrics | None = None) -> None:
        self._options = options
        self._metrics = metrics or NoMetrics()
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._idempotent = options.idempotent is True
        self._batch_bytes = min(MAX_BATCH_BYTES, options.max_request_size)
        self._known_topics: set[str] = set()
        self._closed = False
        self._bounds: set[asyncio.Timeout] = set()
        self.max_record_bytes: int | None = options.max_request_size - RECORD_OVERHEAD_BYTES
        self.dead_letter_destination = options.dead_letter_topic

    async def open(self, facts: ClusterFacts | None = None) -> None:
        """Connect. `facts` spare a second survey. Raises `ConnectionError`."""
        facts = facts or await survey(self._options)
        self._idempotent = facts.idempotent
        limit = min(self._options.max_request_size, facts.max_message_bytes or 2**31)
        self.max_record_bytes = max(1, limit - RECORD_OVERHEAD_BYTES)
        # A batch above the topic's limit would be refused as a whole, small records included.
        self._batch_bytes = min(MAX_BATCH_BYTES, self.max_record_bytes)
        try:
            await self._ready_producer()
        except PublishError as error:
            raise ConnectionError(str(error)) from None

    def default_destination(self, request_id: str) -> str:
        return self._options.reply_topic

    def check_destination(self, destination: str) -> str | None:
        return topic_error(destination, "reply_to") or reply_to_error(
            destination,
            prefixes=self._options.reply_prefixes,
            sources=(*self._options.topics, *self._options.refuse_destinations),
            dead_letters=self._options.dead_letter_topic,
        )

    async def publish(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        bound_s = self._options.request_timeout_ms / 1000
        timeout = asyncio.timeout(bound_s)
        self._bounds.add(timeout)  # `aclose` brings it forward: no publish outlives its producer
        try:
            async with timeout:
                producer = await self._ready_producer()
                if destination not in self._known_topics:
                    await self._find_topic(producer, destination)
                await producer.send_and_wait(
                    destination,
                    body,
                    key=key_of_id(key),
                    headers=list(headers.items()),
                )
        except TimeoutError:
            raise PublishError(
                "the Kafka sink was closed before the acknowledgement came"
                if self._closed
                else f"no acknowledgement from Kafka within request_timeout_ms ({bound_s:g} s)",
                retryable=True,
            ) from None
        except (MessageSizeTooLargeError, RecordListTooLargeError):
            given = len(body) + sum(len(name) + len(value) for name, value in headers.items())
            raise RecordTooLargeForBroker(
                f"a record of {given} bytes is too large for topic {destination}: raise "
                "max.message.bytes of the topic and max_request_size here",
                limit_bytes=self.max_record_bytes,
                given_bytes=given,
            ) from None
        except _PERMANENT as error:
            raise PublishError(
                f"topic {destination} cannot be written ({type(error).__name__}): "
                "check its name and the ACLs of this client",
                retryable=False,
            ) from None
        except KafkaError as error:
            expired = isinstance(error, KafkaTimeoutError)
            if isinstance(error, _BROKEN_PRODUCER) or not (error.retriable or expired):
                await self._discard(producer, error)
            raise PublishError(f"Kafka: {words(error)}", retryable=True) from None
        finally:
            self._bounds.discard(timeout)
        self._metrics.count("sink_records_total", transport="kafka")

    async def aclose(self) -> None:
        """Flush what is being sent and disconnect, within `close_timeout_s`."""
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            await self._stop(producer)
        for timeout in list(self._bounds):
            with contextlib.suppress(RuntimeError):  # it is over already
                timeout.reschedule(asyncio.get_running_loop().time())

    async def _ready_producer(self) -> AIOKafkaProducer:
        if self._producer is not None:
            return self._producer
        async with self._starting:
            if self._closed:
                raise PublishError("the Kafka sink is closed", retryable=False)
            if self._producer is None:
                self._producer = await self._start_producer()
            return self._producer

    async def _start_producer(self) -> AIOKafkaProducer:
        compression = self._options.compression
        producer = AIOKafkaProducer(
            **client_settings(self._options),
            acks="all",
            enable_idempotence=self._idempotent,
            linger_ms=self._options.linger_ms,
            max_batch_size=self._batch_bytes,
            max_request_size=self._options.max_request_size,
            compression_type=None if compression == "none" else compression,
        )
        try:
            async with asyncio.timeout(self._options.open_timeout_s):
                await producer.start()
        except BaseException as error:
            await self._stop(producer)
            if isinstance(error, KafkaError | TimeoutError):
                raise PublishError(
                    f"no Kafka producer for {self._options.bootstrap}: {words(error)}",
                    retryable=True,
                ) from None
            raise
        return producer

    async def _find_topic(self, producer: AIOKafkaProducer, topic: str) -> None:
        """Bounded: aiokafka alone would look for a missing topic until the request times out."""
        bound_s = min(_FIND_TOPIC_S, self._options.request_timeout_ms / 3000)
        try:
            async with asyncio.timeout(bound_s):
                await producer.partitions_for(topic)
        except (TimeoutError, UnknownTopicOrPartitionError):
            try:
                async with asyncio.timeout(bound_s):
                    broker_answers = await asyncio.shield(producer.client.force_metadata_update())
            except TimeoutError:
                broker_answers = False
            if broker_answers:
                raise PublishError(
                    f"topic {topic} does not exist and the broker does not create it: "
                    "create it, or name another reply_to",
                    retryable=False,
                ) from None
            raise PublishError("Kafka does not answer", retryable=True) from None
        if len(self._known_topics) >= _MAX_KNOWN_TOPICS:
            self._known_topics.clear()
        self._known_topics.add(topic)

    async def _discard(self, producer: AIOKafkaProducer, error: KafkaError) -> None:
        if self._producer is producer:
            self._producer = None
            log.warning("kafka_producer_replaced", error=type(error).__name__)
            self._metrics.count("sink_reconnects_total", transport="kafka")
            await self._stop(producer)

    async def _stop(self, producer: AIOKafkaProducer) -> None:
        if await closed_in_time(producer.stop(), self._options.close_timeout_s):
            return
        # The broker is gone and stop waits for it: cut the tasks and connections instead.
        sender = producer._sender.sender_task
        if sender is not None:
            sender.cancel()
        await closed_in_time(producer.client.close(), _CUT_TIMEOUT_S)


async def open_sink(options: KafkaOptions, *, beside: Source | None, metrics: Metrics) -> KafkaSink:
    """A connected sink; `beside` has surveyed the cluster already. Raises `ConnectionError`."""
    sink = KafkaSink(options, metrics=metrics)
    await sink.open(beside.facts if isinstance(beside, KafkaSource) else None)
    return sink

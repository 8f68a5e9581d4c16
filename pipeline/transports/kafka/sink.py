"""Replies and dead letters to Kafka: a record counts as published when all replicas have it.

Who calls it: egress, many publishes at a time.
What must stay true: every send is awaited with `acks=all` and a bound; errors say whether the same
record may pass later; a producer that broke for good is replaced, so that one fault does not stop
all replies after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

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
from pipeline.transports.kafka.admin import closed_in_time, words
from pipeline.transports.kafka.cluster import ClusterFacts, survey
from pipeline.transports.kafka.deliveries import key_of_id
from pipeline.transports.kafka.directory import TopicDirectory
from pipeline.transports.kafka.limits import topic_limit
from pipeline.transports.kafka.options import KafkaOptions, topic_error
from pipeline.transports.kafka.record import KafkaRecord, partition_of
from pipeline.transports.kafka.security import client_settings
from pipeline.transports.kafka.sent_list import SentList
from pipeline.transports.kafka.source import KafkaSource

log = structlog.get_logger(__name__)

RECORD_OVERHEAD_BYTES = 1024
"""Kept free below the broker's limit: batch and record framing (under 100 bytes), a key of 256."""
MAX_BATCH_BYTES = 256 * 1024
_CUT_TIMEOUT_S = 1.0
_PRUNE_EVERY_S = 60.0
_FAULT_AFTER = 3
_FAULT_FOR_S = 12.0
"""Above egress' longest wait between two tries: a fault lasts as long as tries fail."""
_WHY = {"missing": "it does not exist", "forbidden": "not allowed", "invalid": "no topic name"}
_PERMANENT = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError, InvalidTopicError)
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
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
        self._own = frozenset((options.reply_topic, options.dead_letter_topic))
        self._topics = TopicDirectory()
        self._pruned_at = time.monotonic()
        self._read_limits: set[str] = set()
        self._reading_limits, self._queueing = asyncio.Lock(), asyncio.Lock()
        self._n_failures, self._failure, self._last_failure_at = 0, "", 0.0
        self._closed = False
        self._bounds: set[asyncio.Timeout] = set()
        self.max_record_bytes: int | None = options.max_request_size - RECORD_OVERHEAD_BYTES
        self.dead_letter_destination = options.dead_letter_topic

    async def open(self, facts: ClusterFacts | None = None) -> None:
        """Connect. `facts` spare a second survey. Raises `ConnectionError`."""
        facts = facts or await survey(self._options, consumes=False)
        self._idempotent = facts.idempotent
        self._topics = TopicDirectory(broker_creates=facts.broker_creates)
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
        read = self._options.reads(destination)
        return topic_error(destination, "reply_to") or reply_to_error(
            destination,
            prefixes=self._options.reply_prefixes,
            sources=(destination,) if read else (),
            dead_letters=self._options.dead_letter_topic,
        )

    def fault(self) -> str | None:
        """Why nothing can be written to the topics that the operator named; None when it can.

        Said after `_FAULT_AFTER` failures in a row, and forgotten when nothing fails any more.
        """
        fresh = time.monotonic() < self._last_failure_at + _FAULT_FOR_S
        return self._failure if fresh and self._n_failures >= _FAULT_AFTER else None

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        bound_s = self._options.request_timeout_ms / 1000
        timeout = asyncio.timeout(bound_s)
        self._bounds.add(timeout)  # `aclose` brings it forward: no publish outlives its producer
        producer: AIOKafkaProducer | None = None
        try:
            async with timeout:
                producer = await self._ready_producer()
                await self._find_topic(producer, destination)
                record = KafkaRecord(key_of_id(key), body, headers, key_of_id(order_key or ""))
                await self._send(producer, destination, record)
        except PublishError as error:
            self._note_failure(destination, error)
            raise
        except (TimeoutError, KafkaError) as error:
            failure = await self._failed(producer, destination, error)
            self._note_failure(destination, failure)
            raise failure from None
        finally:
            self._bounds.discard(timeout)
        if destination in self._own:
            self._n_failures = 0
        self._metrics.count("sink_records_total", transport="kafka")

    async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
        """See `actors.ports.ListSink`. What asks for more than an ordinary send is told to come alone."""
        sent = SentList(len(records), tell)
        timeout = asyncio.timeout(self._options.request_timeout_ms / 1000)
        self._bounds.add(timeout)
        producer: AIOKafkaProducer | None = None
        try:
            # What is not told by the end comes alone, and meets the same error there.
            with contextlib.suppress(TimeoutError, KafkaError, PublishError):
                async with timeout:
                    producer = await self._ready_producer()
                    self._prune(producer)
                    for topic in self._own.intersection([one.destination for one in records]):
                        await self._find_topic(producer, topic)
                    for number, record in enumerate(records):
                        if self._is_ordinary(record):
                            sent.sent(number, await self._queued(producer, record))
                    await sent.acknowledged()
        finally:
            self._bounds.discard(timeout)
            refused = sent.end()
            self._metrics.count("sink_records_total", sent.n_acknowledged, transport="kafka")
        if sent.n_acknowledged == len(records) and any(
            record.destination in self._own for record in records
        ):
            self._n_failures = 0
        for number, error in refused:
            if isinstance(error, KafkaError) and not isinstance(error, _TOO_LARGE):
                await self._failed(producer, records[number].destination, error)

    def _is_ordinary(self, record: Record) -> bool:
        """A topic that is known, and takes a record of this size beside others."""
        topic = record.destination
        limit = self._topics.limit(topic)
        fits = record.size_bytes + RECORD_OVERHEAD_BYTES <= self._options.max_request_size
        return self._topics.knows(topic) and fits and (limit is None or limit >= self._batch_bytes)

    async def _queued(self, producer: AIOKafkaProducer, record: Record) -> asyncio.Future[Any]:
        topic, key = record.destination, key_of_id(record.key)
        headers = [*record.headers.items()]
        sent: asyncio.Future[Any] = await producer.send(
            topic, record.body, key=key, headers=headers
        )
        return sent

    async def _send(self, producer: AIOKafkaProducer, topic: str, record: KafkaRecord) -> None:
        given = record.size_bytes
        limit = self._topics.limit(topic)
        if limit is not None and given + RECORD_OVERHEAD_BYTES > limit:
            raise self._too_large(topic, given)
        if limit is None or limit >= self._batch_bytes:
            try:
                sent = await producer.send(
                    topic,
                    record.body,
                    key=record.key,
                    headers=record.headers,
                    partition=await record.partition(producer, topic),
                )
            except MessageSizeTooLargeError:  # above max_request_size: nothing was sent
                raise self._too_large(topic, given) from None
            try:
                await sent
                return
            except _TOO_LARGE:
                # The batch was refused, perhaps for a neighbour's sake: the topic's limit is below
                # what we were told, so from here on its records travel alone.
                await self._read_limit(topic)
        try:
            await self._send_alone(producer, topic, record)
        except _TOO_LARGE:
            await self._read_limit(topic)
            raise self._too_large(topic, given) from None

    async def _send_alone(
        self, producer: AIOKafkaProducer, topic: str, record: KafkaRecord
    ) -> None:
        """A batch of this record only, on the partition that it would have had anyway."""
        batch = producer.create_batch()
        batch.append(timestamp=None, key=record.key, value=record.body, headers=record.headers)
        partition = await partition_of(producer, topic, record.order_key or record.key)
        # A batch that waits for its turn while the producer is stopped is never sent, and another
        # one behind it would wait for that: so one waits at a time, and not for a dead producer.
        async with self._queueing:
            if not self._is_current(producer):
                raise ProducerClosed
            sent = await producer.send_batch(batch, topic, partition=partition)
        sender = producer._sender.sender_task
        await asyncio.wait({sent, sender}, return_when=asyncio.FIRST_COMPLETED)
        if not sent.done():
            raise ProducerClosed
        await sent

    async def _read_limit(self, topic: str) -> None:
        """What the topic takes now; where the broker does not tell, its records go alone."""
        async with self._reading_limits:
            if topic not in self._read_limits:
                self._read_limits.add(topic)
                self._topics.note_limit(topic, await topic_limit(self._options, topic) or 0)

    def _too_large(self, topic: str, given: int) -> RecordTooLargeForBroker:
        limit = self._topics.limit(topic)
        takes = limit - RECORD_OVERHEAD_BYTES if limit else self.max_record_bytes
        return RecordTooLargeForBroker(
            f"a record of {given} bytes is too large for topic {topic}: raise "
            "max.message.bytes of the topic and max_request_size here",
            limit_bytes=takes,
            given_bytes=given,
        )

    async def _failed(
        self, producer: AIOKafkaProducer | None, topic: str, error: Exception
    ) -> PublishError:
        """The error as egress understands it; replaces a producer that cannot go on."""
        if isinstance(error, TimeoutError):
            self._topics.forget(topic)
            bound_s = self._options.request_timeout_ms / 1000
            return PublishError(
                "the Kafka sink was closed before the acknowledgement came"
                if self._closed
                else f"no acknowledgement from Kafka within request_timeout_ms ({bound_s:g} s)",
                retryable=True,
            )
        assert isinstance(error, KafkaError)
        if isinstance(error, _PERMANENT):
            return self._unwritable(topic, type(error).__name__)
        expired = isinstance(error, KafkaTimeoutError)
        if expired or isinstance(error, UnknownTopicOrPartitionError):
            self._topics.forget(topic)
        if producer is not None and (
            isinstance(error, _BROKEN_PRODUCER) or not (error.retriable or expired)
        ):
            await self._discard(producer, error)
        return PublishError(f"Kafka: {words(error)}", retryable=True)

    def _unwritable(self, topic: str, why: str) -> PublishError:
        """What the operator named waits for the operator; what a sender named is the sender's."""
        own = topic in self._own
        return PublishError(
            f"topic {topic} cannot be written ({why}): "
            + (
                "create it or set auto_create=true, and check the ACLs of this client"
                if own
                else "create it, name another reply_to, or check the ACLs of this client"
            ),
            retryable=own,
        )

    def _note_failure(self, topic: str, error: PublishError) -> None:
        if topic in self._own and not isinstance(error, RecordTooLargeForBroker):
            self._n_failures += 1
            self._failure, self._last_failure_at = str(error), time.monotonic()

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

    def _producer_settings(self) -> dict[str, Any]:
        return {"enable_idempotence": self._idempotent}

    async def _start_producer(self) -> AIOKafkaProducer:
        compression = self._options.compression
        producer = AIOKafkaProducer(
            **client_settings(self._options),
            acks="all",
            **self._producer_settings(),
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
        verdict = await self._topics.find(producer.client, topic)
        if verdict == "no answer":
            raise PublishError("Kafka does not answer", retryable=True)
        if verdict != "exists":
            raise self._unwritable(topic, _WHY[verdict])
        self._prune(producer)

    def _prune(self, producer: AIOKafkaProducer) -> None:
        now = time.monotonic()
        if now > self._pruned_at + _PRUNE_EVERY_S:
            self._pruned_at = now
            self._topics.prune(producer.client)
            self._read_limits.clear()

    def _is_current(self, producer: AIOKafkaProducer) -> bool:
        return self._producer is producer

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
    if isinstance(beside, KafkaSource):
        beside.watch(sink.fault)
        await sink.open(beside.facts)
    else:
        await sink.open()
    return sink

"""Replies, dead letters and offsets in one Kafka transaction: who reads committed records sees each once.

Who calls it: the registry opens the sink of a route with `delivery = "exactly_once"`; egress delivers
through it; the supervisor runs it.
What must stay true: what is published for a request is only gathered until all of it is there, so a
transaction is short and nothing in it waits for anybody; an offset is committed in the transaction that
holds its answer and nowhere before; after any fault the producer is made anew under its transactional id,
which ends whatever was open, and where the end had been asked for, the group's own offsets say whether it
came; a process that lost its partitions commits nothing (`fencing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    ProducerFenced,
    RecordListTooLargeError,
)
from aiokafka.structs import OffsetAndMetadata

from actors.backoff import Backoff
from actors.ports import Delivery, Metrics, PublishError
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.kafka.admin import words
from pipeline.transports.kafka.consumer import committed_now, is_member
from pipeline.transports.kafka.fencing import (
    Fenced,
    NoLongerMember,
    fence,
    membership_of,
    supports_fencing,
)
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.record import KafkaRecord
from pipeline.transports.kafka.sink import RECORD_OVERHEAD_BYTES, KafkaSink
from pipeline.transports.kafka.source import KafkaSource

log = structlog.get_logger(__name__)

FULL = 512
"""Results that one transaction holds at most; so many leave without waiting for the interval."""
_BOUND_SHARE = 0.8
"""Of the broker's own time-out: we give a transaction up before the broker does."""
_FAULT_AFTER = 3
_gathering: ContextVar[list[tuple[str, KafkaRecord]]] = ContextVar("gathering")


class _Result:
    """What one request asks to have published, and who waits for it to be durable."""

    __slots__ = ("deliver", "deliveries", "ended", "outcome", "records")

    def __init__(
        self, deliveries: Sequence[Delivery], deliver: Callable[[], Awaitable[str]]
    ) -> None:
        self.deliveries = deliveries
        self.deliver = deliver
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.outcome: str | None = None
        self.records: list[tuple[str, KafkaRecord]] | None = None

    async def gather(self) -> None:
        """Have everything published into `records`."""
        found: list[tuple[str, KafkaRecord]] = []
        token = _gathering.set(found)
        try:
            self.outcome = await self.deliver()
        finally:
            _gathering.reset(token)
        self.records = found

    def held(self) -> list[HeldDelivery]:
        """Those of its deliveries that are still ours."""
        return [one for one in self.deliveries if isinstance(one, HeldDelivery) and one.held]

    def end(self, outcome: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)


class TransactionalSink(KafkaSink):
    """A `KafkaSink` that publishes in transactions; also `actors.ports.Transactions`."""

    def __init__(
        self, options: KafkaOptions, *, source: KafkaSource, metrics: Metrics | None = None
    ) -> None:
        super().__init__(options, metrics=metrics)
        self._source = source
        # The group's name first, so that one prefixed ACL allows all of them.
        self._id = f"{options.group}.{options.group_instance_id or uuid.uuid4().hex}"
        self._waiting: deque[_Result] = deque()
        self._more = asyncio.Event()
        self._bound_s = _BOUND_SHARE * options.transaction_timeout_ms / 1000
        self._n_aborted, self._trouble = 0, ""

    def _producer_settings(self) -> dict[str, Any]:
        return {
            "transactional_id": self._id,
            "transaction_timeout_ms": self._options.transaction_timeout_ms,
        }

    async def _start_producer(self) -> AIOKafkaProducer:
        try:
            producer = await super()._start_producer()
        except PublishError as error:
            raise PublishError(
                f"{error}: with delivery=exactly_once this client needs WRITE and DESCRIBE on transactional "
                f"ids that begin with {self._options.group}., and a cluster of fewer than three brokers "
                "transaction.state.log.replication.factor=1",
                retryable=True,
            ) from None
        if not supports_fencing(producer):
            await self._stop(producer)
            raise PublishError(
                f"Kafka at {self._options.bootstrap} is too old for delivery=exactly_once, which needs 2.5",
                retryable=True,
            )
        return producer

    async def _send(self, producer: AIOKafkaProducer, topic: str, record: KafkaRecord) -> None:
        """Gathered only. What will not fit is told now, so that it can be split."""
        limit = self._topics.limit(topic) or self._options.max_request_size
        if record.size_bytes + RECORD_OVERHEAD_BYTES > min(limit, self._options.max_request_size):
            raise self._too_large(topic, record.size_bytes)
        _gathering.get().append((topic, record))

    def fault(self) -> str | None:
        return super().fault() or (self._trouble if self._n_aborted >= _FAULT_AFTER else None)

    # --- `actors.ports.Transactions` ------------------------------------------------------------

    async def deliver(
        self,
        deliveries: Sequence[Delivery],
        deliver: Callable[[], Awaitable[str]],
        *,
        queued: Callable[[], None],
    ) -> str | None:
        """See `Transactions`."""
        result = _Result(deliveries, deliver)
        await result.gather()
        self._waiting.append(result)
        queued()
        self._more.set()
        return await result.ended

    async def run(self) -> None:
        """See `Transactions`. Raises `Fenced`."""
        backoff = Backoff(0.05, 5.0)
        while True:
            await self._gathered()
            results = list(islice(self._waiting, FULL))
            if await self._all_gathered(results) and await self._commit(results):
                for _ in results:
                    self._waiting.popleft()
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next_s())

    async def _gathered(self) -> None:
        """Until a transaction is worth it."""
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.transaction_interval_ms / 1000):
                while len(self._waiting) < FULL:
                    self._more.clear()
                    await self._more.wait()

    async def _all_gathered(self, results: list[_Result]) -> bool:
        """Gather again what was forgotten after a fault: a topic may be gone, or take less, now."""
        for result in results:
            if result.records is None and not result.ended.done():
                try:
                    async with asyncio.timeout(self._bound_s):
                        await result.gather()
                except TimeoutError:
                    return False
                except Exception as error:  # noqa: BLE001  boundary: its publisher is told
                    result.ended.set_exception(error)
        return True

    # --- one transaction ------------------------------------------------------------------------

    async def _commit(self, results: list[_Result]) -> bool:
        """True when all of these have ended: durable and settled, or given away."""
        async with self._source.offsets.alone():
            consumer = self._source.consumer
            ours = {one: held for one in results if not one.ended.done() and (held := one.held())}
            if ours and consumer is not None:
                # Brokers take the commit of a stranger while a group is empty.
                if not is_member(consumer) or not await self._through(ours):
                    for one in ours:
                        one.records = None
                    return False
                for one in ours:
                    one.end(one.outcome)
        for one in results:
            one.end(None)
        return True

    async def _through(self, ours: dict[_Result, list[HeldDelivery]]) -> bool:
        """True when a transaction with these results was committed."""
        consumer, offsets = self._source.consumer, self._source.offsets
        held = [delivery for found in ours.values() for delivery in found]
        settled = offsets.with_settled(held, uuid.uuid4().hex[:8])
        producer: AIOKafkaProducer | None = None
        asked_for: dict[TopicPartition, OffsetAndMetadata] = {}
        try:
            async with asyncio.timeout(self._bound_s):
                producer = await self._ready_producer()
                options = self._options
                fence(producer, membership_of(consumer, options.group, options.group_instance_id))
                await producer.begin_transaction()
                await self._send_all(producer, [r for one in ours for r in one.records or ()])
                await producer.send_offsets_to_transaction(settled.commits, options.group)
                asked_for = settled.commits
                await producer.commit_transaction()
        except (KafkaError, PublishError, TimeoutError) as error:
            await self._note_fault(producer, error, ours)
            if not (asked_for and await self._came_through(asked_for, held)):
                return False
        self._n_aborted = 0
        self._metrics.count("sink_transactions_total", transport="kafka")
        for delivery in held:
            delivery.settle()
        offsets.note_committed(settled)
        return True

    async def _send_all(
        self, producer: AIOKafkaProducer, records: Sequence[tuple[str, KafkaRecord]]
    ) -> None:
        """In their order; returns when the brokers have them. Raises the first error."""
        sent: list[asyncio.Future[Any]] = []
        try:
            for topic, record in records:
                limit = self._topics.limit(topic)
                if limit is not None and limit < self._batch_bytes:
                    await self._send_alone(producer, topic, record)
                    continue
                partition = await record.partition(producer, topic)
                sent.append(
                    await producer.send(
                        topic,
                        record.body,
                        key=record.key,
                        headers=record.headers,
                        partition=partition,
                    )
                )
        finally:
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _note_fault(
        self, producer: AIOKafkaProducer | None, error: Exception, ours: dict[_Result, Any]
    ) -> None:
        """Give the producer up, and with it what it holds open. Raises `Fenced`."""
        text = words(error)
        self._n_aborted += 1
        self._trouble = f"no transaction with Kafka at {self._options.bootstrap} ends ({text})"
        self._metrics.count("sink_transactions_aborted_total", transport="kafka")
        log.warning("kafka_transaction_aborted", error=text, results=len(ours))
        named = isinstance(error, NoLongerMember) and error.by_name
        if self._options.group_instance_id and (named or isinstance(error, ProducerFenced)):
            raise Fenced(self._options.group, self._options.group_instance_id) from error
        for topic in {topic for one in ours for topic, _ in one.records or ()}:
            if isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError):
                await self._read_limit(topic)
            elif not isinstance(error, NoLongerMember):
                self._topics.forget(topic)
        if producer is not None and self._is_current(producer):
            await self._discard(producer, error)

    async def _discard(self, producer: AIOKafkaProducer, error: Exception) -> None:
        await super()._discard(producer, error)
        waiter = producer._txn_manager._transaction_waiter
        if waiter is not None and waiter.done() and not waiter.cancelled():
            waiter.exception()  # told already

    async def _came_through(
        self, commits: dict[TopicPartition, OffsetAndMetadata], held: list[HeldDelivery]
    ) -> bool:
        """Was it committed, though nobody confirmed it? Asked until there is an answer, or until all of
        it is somebody else's."""
        for wait_s in _waits():
            consumer = self._source.consumer
            if consumer is None or not any(delivery.held for delivery in held):
                return False
            try:
                async with asyncio.timeout(self._bound_s):
                    await self._ready_producer()  # ends what is open under our id
                    found = await committed_now(consumer, list(commits))
            except (KafkaError, PublishError, TimeoutError) as error:
                log.warning("kafka_transaction_in_doubt", error=words(error))
                await asyncio.sleep(wait_s)
            else:
                through = all(found.get(place) == commit for place, commit in commits.items())
                log.info("kafka_transaction_found", committed=through)
                return through
        raise AssertionError("waits do not end")


def _waits() -> Iterator[float]:
    backoff = Backoff(0.1, 5.0)
    while True:
        yield backoff.next_s()


async def open_sink(
    options: KafkaOptions, *, beside: KafkaSource, metrics: Metrics
) -> TransactionalSink:
    """A connected sink for what `beside` reads. Raises `ConnectionError`."""
    sink = TransactionalSink(options, source=beside, metrics=metrics)
    beside.watch(sink.fault)
    try:
        await sink.open(beside.facts)
    except BaseException:
        await sink.aclose()
        raise
    return sink

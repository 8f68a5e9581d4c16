"""Replies on a broker: the destination of request/reply routes, and how any write is tried again.

Who calls it: egress drives a `ReplyDestination` per route and writes dead letters with the same two
functions; other destinations are handed the same `RetryingWriter`.
What must stay true: a record is durable when `deliver` returns; a reply is split only where its
destination takes no larger record; what would fail the same way for ever becomes a failure that says
why, and only what not even a failure fits into is given up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from actors.answers import Answer, Key, RecentAnswers
from actors.backoff import Backoff
from actors.loop_turn import LoopTurn
from actors.ports import (
    Clock,
    Delivery,
    GaveUp,
    ListSink,
    Metrics,
    PublishError,
    Record,
    RecordTooLargeForBroker,
    Sink,
)
from actors.replies import build_reply
from actors.reply_records import (
    HEADER_ROOM_BYTES,
    OFF_LOOP_NUMBERS,
    encode,
    headers_for,
    numbers_in,
    rows_record,
)
from actors.route import Destination, Finished, Refusal, Retry
from gpu.batch import ItemResult, ModelInfo
from schemas.codec import reply_headers
from schemas.errors import (
    ContentType,
    EmbedstreamError,
    ForbiddenDestination,
    RecordTooLarge,
)
from schemas.requests import AnyRequest, Encoding
from schemas.results import FailureReply, Reply

log = structlog.get_logger(__name__)
T = TypeVar("T")

MIN_PART_BYTES = 512
"""Parts of a reply are not cut below this."""

_RESULT = frozenset((ItemResult,))


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """At most `max_concurrent` publishes of one route at once and `attempts` tries each.

    The wait between tries doubles from first_backoff_s up to max_backoff_s, with jitter.
    """

    max_concurrent: int = 64
    attempts: int = 60
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


class RetryingWriter(Retry):
    """The `Retry` that egress hands to destinations. `attempts` None: until it is cancelled."""

    def __init__(
        self, policy: PublishPolicy, attempts: int | None, *, clock: Clock, metrics: Metrics
    ) -> None:
        self._policy = policy
        self._attempts = sys.maxsize if attempts is None else attempts
        self._clock = clock
        self._metrics = metrics

    async def __call__(self, write: Callable[[], Awaitable[T]], to: str) -> T:
        """See `Retry`."""
        started = self._clock.monotonic()
        backoff: Backoff | None = None
        while True:
            try:
                result = await write()
            except RecordTooLargeForBroker:
                raise
            except PublishError as error:
                if backoff is None:
                    backoff = Backoff(self._policy.first_backoff_s, self._policy.max_backoff_s)
                if not error.retryable or backoff.tries + 1 >= self._attempts:
                    raise GaveUp(str(error), permanent=not error.retryable) from error
                self._metrics.count("publish_retries_total")
                log.warning("publish_retried", destination_kind=to, reason=str(error))
                await asyncio.sleep(max(backoff.next_s(), error.retry_after_s or 0.0))
            else:
                self._metrics.observe("publish_seconds", self._clock.monotonic() - started)
                return result


async def publish_fitting(
    publish: Callable[[int | None], Awaitable[None]], limit_bytes: int | None, *, smallest: int
) -> None:
    """`publish(limit_bytes)`, with a smaller limit each time that the destination finds it too large.

    The destination's own limit may be below the one that its client knows, and below the one that
    it tells: what it tells is tried first, then halves. Raises the last refusal when the next limit
    would be below `smallest`.
    """
    told: int | None = None
    while True:
        try:
            return await publish(limit_bytes)
        except RecordTooLargeForBroker as error:
            if told is None:
                told = error.limit_bytes or error.given_bytes // 2
                limit_bytes = min(told, error.given_bytes - 1)
                continue
            limit_bytes = (limit_bytes or error.given_bytes) // 2
            if limit_bytes < smallest:
                raise


class ReplyDestination(Destination):
    """Replies, each to its request's `reply_to` or to the sink's default."""

    def __init__(
        self,
        sink: Sink,
        *,
        split_replies: bool = True,
        clock: Clock,
        recent: RecentAnswers | None = None,
    ) -> None:
        self._sink = sink
        self._recent = recent
        self._split = split_replies
        self._clock = clock
        self._encode_thread = ThreadPoolExecutor(1, thread_name_prefix="reply-encoder")
        self._lists = sink if isinstance(sink, ListSink) else None
        self.takes_lists = self._lists is not None

    def address(self, request: AnyRequest) -> str:
        """See `Destination`."""
        if request.reply_to is None:
            return self._sink.default_destination(request.id)
        refusal = self._sink.check_destination(request.reply_to)
        if refusal is not None:
            raise ForbiddenDestination(refusal, path="$.reply_to")
        return request.reply_to

    def address_of_failure(
        self, delivery: Delivery, error: EmbedstreamError, request: AnyRequest | None
    ) -> str | None:
        """The `reply_to` when it may be used, else the default place, where an id leads to its sender.

        A Kafka batch that nobody can read has no sender: nobody is told.
        """
        reply_to = request.reply_to if request else error.reply_to
        if isinstance(error, ForbiddenDestination):
            reply_to = None
        if reply_to is not None and self._sink.check_destination(reply_to) is None:
            return reply_to
        if delivery.damage is not None and not delivery.headers:
            return None
        request_id = request.id if request else error.request_id or delivery.default_id
        return self._sink.default_destination(request_id)

    def answered(self, key: Key) -> Answer | None:
        """See `Destination`."""
        return None if self._recent is None else self._recent.get(key)

    async def deliver(
        self, finished: Finished, info: ModelInfo, retry: Retry
    ) -> Sequence[EmbedstreamError]:
        """Publish the reply; whatever failed is told in it."""
        request = finished.request
        if finished.answer is not None:
            headers = headers_for(request)
            for body in finished.answer.bodies:
                await self._write(finished.address, request.id, body, headers, None, retry)
            return ()
        reply = build_reply(
            finished,
            info,
            now=self._clock.monotonic(),
            received_at=finished.deliveries[0].received_at,
        )
        bodies = await self._publish(
            reply,
            finished.address,
            request.content_type,
            request.encoding,
            request.traceparent,
            finished.order_key,
            retry,
        )
        if self._recent is not None and _is_final(finished):
            self._recent.put(finished.join_key, bodies)
        return ()

    async def deliver_all(
        self, finished: Sequence[tuple[Finished, ModelInfo]], done: Callable[[int], None]
    ) -> set[int]:
        """Publish those replies that are one record of ordinary size."""
        assert self._lists is not None
        records: list[Record] = []
        numbers: list[int] = []
        remember: list[bool] = []
        turn = LoopTurn(self._clock)
        for number, (one, info) in enumerate(finished):
            if turn.is_long:
                await turn.end()
            record, is_new = self._as_one_record(one, info)
            if record is not None:
                records.append(record)
                numbers.append(number)
                remember.append(is_new and self._recent is not None)

        refused: dict[int, PublishError] = {}

        def tell(place: int, error: PublishError | None) -> None:
            if error is not None:
                refused[numbers[place]] = error
                return
            if remember[place]:
                assert self._recent is not None
                join_key = finished[numbers[place]][0].join_key
                self._recent.put(join_key, (records[place].body,))
            done(numbers[place])

        await self._lists.publish_all(records, tell)
        if refused:
            reason = str(next(iter(refused.values())))
            log.warning("list_not_published", records=len(refused), reason=reason)
        return set(refused)

    def _as_one_record(self, finished: Finished, info: ModelInfo) -> tuple[Record | None, bool]:
        """And whether it is to be remembered. None: large, in parts, or not to be built: `deliver` sees to it."""
        request = finished.request
        is_new = False
        if finished.answer is not None:
            bodies: Sequence[bytes] = finished.answer.bodies
        else:
            now, received_at = self._clock.monotonic(), finished.deliveries[0].received_at
            limit_bytes = self._sink.max_record_bytes if self._split else None
            try:
                body = rows_record(finished, info, now, received_at, limit_bytes)
                if body is not None:
                    headers = headers_for(request)
                    return Record(finished.address, request.id, body, headers), True
                reply = build_reply(finished, info, now=now, received_at=received_at)
            except Exception:  # noqa: BLE001  boundary: `deliver` meets it again, and says so
                return None, False
            if numbers_in(reply) > OFF_LOOP_NUMBERS:
                return None, False
            bodies = encode(reply, limit_bytes, request.content_type, request.encoding)
            is_new = _is_final(finished)
        if len(bodies) != 1:
            return None, False
        return Record(finished.address, request.id, bodies[0], headers_for(request)), is_new

    async def refuse(self, refusal: Refusal, retry: Retry) -> None:
        """Publish a failure."""
        reply = FailureReply(id=refusal.id, error=refusal.error, metadata=refusal.metadata)
        kind = refusal.content_type
        encoding: Encoding = "float" if kind == "application/json" else "bytes"
        await self._publish(
            reply,
            refusal.address,
            kind,
            encoding,
            refusal.traceparent,
            refusal.order_key,
            retry,
        )

    async def _publish(
        self,
        reply: Reply | FailureReply,
        address: str,
        content_type: ContentType,
        encoding: Encoding,
        traceparent: str | None,
        order_key: str | None,
        retry: Retry,
    ) -> tuple[bytes, ...]:
        """The records that were written."""
        headers = reply_headers(reply.id, content_type, traceparent=traceparent)
        written: list[bytes] = []

        async def publish(limit_bytes: int | None, reply: Reply | FailureReply = reply) -> None:
            room = None if not self._split else limit_bytes
            written[:] = await self._encoded(reply, room, content_type, encoding)
            for body in written:
                await self._write(address, reply.id, body, headers, order_key, retry)

        smallest = HEADER_ROOM_BYTES + MIN_PART_BYTES if self._split else sys.maxsize
        try:
            await publish_fitting(publish, self._sink.max_record_bytes, smallest=smallest)
        except RecordTooLargeForBroker as error:
            reason = RecordTooLarge(
                "the reply exceeds what its destination takes, even in parts",
                limit=error.limit_bytes,
                given=error.given_bytes,
            )
            try:
                await publish(None, FailureReply(id=reply.id, error=reason))
            except RecordTooLargeForBroker as too_large:
                raise GaveUp(str(too_large), permanent=True) from too_large

        return tuple(written)

    async def _write(
        self,
        address: str,
        request_id: str,
        body: bytes,
        headers: Mapping[str, bytes],
        order_key: str | None,
        retry: Retry,
    ) -> None:
        write = partial(self._sink.publish, address, request_id, body, headers, order_key=order_key)
        await retry(write, kind_of(address))

    async def _encoded(
        self,
        reply: Reply | FailureReply,
        limit_bytes: int | None,
        content_type: ContentType,
        encoding: Encoding,
    ) -> list[bytes]:
        """The reply as records of at most about `limit_bytes`."""

        work = (reply, limit_bytes, content_type, encoding)
        if numbers_in(reply) <= OFF_LOOP_NUMBERS:
            return encode(*work)
        return await asyncio.get_running_loop().run_in_executor(self._encode_thread, encode, *work)

    async def aclose(self) -> None:
        """Stop the encoder thread. The sink is closed by who opened it."""
        self._encode_thread.shutdown(wait=False, cancel_futures=True)


def _is_final(finished: Finished) -> bool:
    """Would the same request get the same answer, and not a better one?"""
    return finished.failure is None and _RESULT.issuperset(map(type, finished.outcomes))


def kind_of(address: str) -> str:
    """What kind of place it is, without its name: "topic", "stream", "list"."""
    return address.split(":", 1)[0] if ":" in address else "topic"

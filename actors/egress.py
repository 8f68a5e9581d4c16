"""Egress: finished requests out to the broker, then settled, in that order.

Who calls it: the tokenizer and the dispatcher `complete` items or `fail` requests; ingress `refuse`s
records that never became in-flight requests. Publishers (supervised tasks) do the rest.
What must stay true: a reply is durable before its delivery is settled; each request leaves once;
every budget charged is refunded on every path; what cannot be published within `attempts` is
released (delivered again later), never dropped; a broker that hangs holds up its own route alone.
The mailbox of a route is bounded by admission plus the refusal slots.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from actors.dead_letters import cut_to_fit, dead_letter_headers
from actors.in_flight import InFlightTable
from actors.mailbox import Mailbox
from actors.messages import InFlight, Outgoing, Route
from actors.ports import Clock, Metrics, PublishError, RecordTooLargeForBroker, Sink
from actors.replies import build_reply
from gpu.batch import ItemOutcome, ModelInfo
from schemas.codec import encode_reply, reply_headers, split_reply
from schemas.errors import EmbedstreamError, Internal, RecordTooLarge
from schemas.headers import DeadLetterKind
from schemas.requests import Encoding
from schemas.results import FailureReply, Reply

log = structlog.get_logger(__name__)

HEADER_ROOM_BYTES = 1024
"""Kept free under the broker's record limit for headers and framing."""
MIN_PART_BYTES = 512
"""Parts of a reply are not cut below this."""
MIN_DEAD_LETTER_BYTES = 256
"""A destination that refuses even this takes no dead letter at all."""
OFF_LOOP_NUMBERS = 20_000
"""Numbers in a reply above which encoding leaves the event loop (JSON writes about 5 M floats/s)."""


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """At most `max_concurrent` publishes of one route at once and `attempts` tries each.

    The wait between tries doubles from first_backoff_s up to max_backoff_s, with jitter.
    `split_replies`: cut a reply that is too large into parts.
    """

    max_concurrent: int = 64
    attempts: int = 60
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    split_replies: bool = True


class GaveUp(Exception):
    """The broker did not take a record. `permanent`: it never will."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class _Outbox:
    """What waits to be published for one route, so that its broker holds up no other route."""

    def __init__(self, name: str, max_waiting: int, refusal_slots: int) -> None:
        self.mailbox: Mailbox[Outgoing] = Mailbox(name, max_items=max_waiting + refusal_slots)
        self.refusals = asyncio.Semaphore(refusal_slots)


class Egress:
    """Publishes replies and dead letters.

    Args:
        infos: loaded models by name.
        max_waiting: admission's bound on in-flight requests, all lanes together.
    """

    def __init__(
        self,
        table: InFlightTable,
        infos: Mapping[str, ModelInfo],
        *,
        policy: PublishPolicy,
        max_waiting: int,
        clock: Clock,
        metrics: Metrics,
        refusal_slots: int = 256,  # of each route
    ) -> None:
        self._table = table
        self._infos = infos
        self.policy = policy
        self._clock = clock
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._refusal_slots = refusal_slots
        self._outboxes: dict[str, _Outbox] = {}  # by route
        self._n_busy = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._encode_thread = ThreadPoolExecutor(1, thread_name_prefix="reply-encoder")

    def _outbox(self, route: Route) -> _Outbox:
        outbox = self._outboxes.get(route.name)
        if outbox is None:
            outbox = _Outbox(f"egress.{route.name}", self._max_waiting, self._refusal_slots)
            self._outboxes[route.name] = outbox
        return outbox

    # --- called by the other stations; none of these waits -------------------------------------

    def complete(self, in_flight: InFlight, index: int, outcome: ItemOutcome) -> None:
        """Note one item's outcome; the last one sends the request out."""
        if isinstance(outcome, EmbedstreamError):
            self._metrics.count("item_errors_total", code=outcome.code)
        if in_flight.complete(index, outcome):
            self._send(in_flight)

    def fail(self, in_flight: InFlight, error: EmbedstreamError) -> None:
        """End a request with a failure, unless it has ended already."""
        if in_flight.fail(error):
            self._send(in_flight)

    def _send(self, in_flight: InFlight) -> None:
        request = in_flight.request
        self._quiet.clear()
        self._outbox(in_flight.route).mailbox.put_nowait(
            Outgoing(
                route=in_flight.route,
                deliveries=in_flight.deliveries,
                in_flight=in_flight,
                request_id=request.id,
                outcome=_outcome_label(in_flight),
                destination=in_flight.destination,
                content_type=request.content_type,
                traceparent=request.traceparent,
            )
        )

    async def refuse(self, outgoing: Outgoing) -> None:
        """Send a failure or dead letter for a record that was never admitted; waits for a slot."""
        outbox = self._outbox(outgoing.route)
        await outbox.refusals.acquire()
        self._quiet.clear()
        outbox.mailbox.put_nowait(outgoing)

    # --- publishers ----------------------------------------------------------------------------

    async def run(self, route: Route) -> None:
        """One publisher; `policy.max_concurrent` of them run for each route."""
        mailbox = self._outbox(route).mailbox
        while True:
            outgoing = await mailbox.get()
            self._n_busy += 1
            try:
                await self._process(outgoing)
            finally:
                self._n_busy -= 1
                if not self._n_busy and not any(len(o.mailbox) for o in self._outboxes.values()):
                    self._quiet.set()

    async def _process(self, outgoing: Outgoing) -> None:
        settled = False
        try:
            await self._publish_all(outgoing)
            for delivery in outgoing.deliveries:
                delivery.settle()
            settled = True
        except GaveUp as error:
            log.error("reply_not_published", request_id=outgoing.request_id, reason=str(error))
        except Exception as error:
            log.error(
                "publisher_failed",
                request_id=outgoing.request_id,
                error_type=type(error).__name__,
                exc_info=error,
            )
        finally:
            if not settled:
                for delivery in outgoing.deliveries:
                    delivery.release("reply not published")
            if outgoing.in_flight is not None:
                self._table.remove(outgoing.in_flight)
            else:
                self._outbox(outgoing.route).refusals.release()
        if settled:
            self._note(outgoing)

    async def _publish_all(self, outgoing: Outgoing) -> None:
        """The reply, then the dead letter if there is one. Raises `GaveUp` to have it released."""
        letter, kind = outgoing.dead_letter, outgoing.dead_letter_kind
        if outgoing.destination is not None:
            try:
                await self._publish_fitting_reply(outgoing, outgoing.destination)
            except GaveUp as error:
                # A destination that cannot be written would bring the record back for ever; and
                # what is being given up anyway must not be kept by a reply that fails.
                if letter is None and not error.permanent:
                    raise
                log.error("reply_refused", request_id=outgoing.request_id, reason=str(error))
                if letter is None:
                    letter, kind = Internal("the reply cannot be published"), "failed"
        if letter is not None:
            await self._publish_dead_letters(outgoing, letter, kind)

    async def _publish_fitting_reply(self, outgoing: Outgoing, destination: str) -> None:
        try:
            await self._publish_reply(outgoing, destination, outgoing.route.sink.max_record_bytes)
        except RecordTooLargeForBroker as error:
            # The destination's own limit may be below the client's: split again, to fit.
            limit = min(error.limit_bytes or error.given_bytes // 2, error.given_bytes - 1)
            await self._publish_small_enough(outgoing, destination, limit)

    async def _publish_dead_letters(
        self, outgoing: Outgoing, letter: EmbedstreamError, kind: DeadLetterKind
    ) -> None:
        sink, key = outgoing.route.sink, outgoing.request_id
        for delivery in outgoing.deliveries:
            body, headers = delivery.body or b"", dead_letter_headers(delivery, letter, kind)
            all_headers, limit = headers, 0
            while True:
                try:
                    await self._publish(sink, sink.dead_letter_destination, key, body, headers)
                    break
                except RecordTooLargeForBroker as error:
                    # The original with our headers no longer fits: its beginning does, and says
                    # so. The destination's own limit may be below the one that we are told.
                    told = error.limit_bytes or error.given_bytes
                    limit = limit // 2 if limit else min(told, error.given_bytes)
                    if limit < MIN_DEAD_LETTER_BYTES:
                        raise GaveUp("no dead letter is small enough", permanent=True) from error
                    body, headers = cut_to_fit(delivery, all_headers, limit)
            self._metrics.count("dead_letters_total", kind=kind)

    async def _publish_small_enough(
        self, outgoing: Outgoing, destination: str, limit_bytes: int
    ) -> None:
        """Cut smaller until the destination takes it; `record_too_large` when it never does."""
        while True:
            try:
                await self._publish_reply(outgoing, destination, limit_bytes)
                return
            except RecordTooLargeForBroker as error:
                limit_bytes //= 2
                if limit_bytes > HEADER_ROOM_BYTES + MIN_PART_BYTES:
                    continue
                failure = FailureReply(
                    id=outgoing.request_id,
                    error=RecordTooLarge(
                        "the reply exceeds what its destination takes, even in parts",
                        limit=error.limit_bytes,
                        given=error.given_bytes,
                    ),
                )
            try:
                await self._publish_bodies(outgoing, destination, failure, limit_bytes)
            except RecordTooLargeForBroker as too_large:
                raise GaveUp(str(too_large), permanent=True) from too_large
            return

    async def _publish_reply(
        self, outgoing: Outgoing, destination: str, limit_bytes: int | None
    ) -> None:
        await self._publish_bodies(outgoing, destination, self._reply_of(outgoing), limit_bytes)

    async def _publish_bodies(
        self,
        outgoing: Outgoing,
        destination: str,
        reply: Reply | FailureReply,
        limit_bytes: int | None,
    ) -> None:
        content_type = outgoing.content_type
        encoding: Encoding = "float" if content_type == "application/json" else "bytes"
        if outgoing.in_flight is not None:
            encoding = outgoing.in_flight.request.encoding
        room = None if limit_bytes is None else max(256, limit_bytes - HEADER_ROOM_BYTES)

        def encode() -> list[bytes]:
            try:
                if isinstance(reply, FailureReply) or room is None or not self.policy.split_replies:
                    return [encode_reply(reply, content_type=content_type, encoding=encoding)]
                return split_reply(reply, room, content_type=content_type, encoding=encoding)
            except EmbedstreamError as error:
                # It would fail the same way for ever (metadata above the room, say): tell why.
                bare = FailureReply(id=outgoing.request_id, error=error)
                return [encode_reply(bare, content_type=content_type, encoding=encoding)]

        if _numbers_in(reply) > OFF_LOOP_NUMBERS:
            loop = asyncio.get_running_loop()
            bodies = await loop.run_in_executor(self._encode_thread, encode)
        else:
            bodies = encode()
        headers = reply_headers(reply, content_type, traceparent=outgoing.traceparent)
        for body in bodies:
            await self._publish(
                outgoing.route.sink, destination, outgoing.request_id, body, headers
            )

    def _reply_of(self, outgoing: Outgoing) -> Reply | FailureReply:
        in_flight = outgoing.in_flight
        if in_flight is None:
            error = outgoing.failure or Internal("a refusal without a reason; this is a bug")
            metadata = dict(outgoing.metadata) if outgoing.metadata is not None else None
            return FailureReply(id=outgoing.request_id, error=error, metadata=metadata)
        return build_reply(
            in_flight,
            self._infos[in_flight.model],
            now=self._clock.monotonic(),
            received_at=in_flight.deliveries[0].received_at,
        )

    async def _publish(
        self, sink: Sink, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        """One record, retried while the broker may yet take it. Raises `GaveUp` or the refusal."""
        started = self._clock.monotonic()
        backoff_s = self.policy.first_backoff_s
        for attempt in itertools.count(1):
            try:
                await sink.publish(destination, key, body, headers)
            except PublishError as error:
                if not error.retryable:
                    if isinstance(error, RecordTooLargeForBroker):
                        raise
                    raise GaveUp(str(error), permanent=True) from error
                if attempt >= self.policy.attempts:
                    raise GaveUp(str(error), permanent=False) from error
                self._metrics.count("publish_retries_total")
                log.warning(
                    "publish_retried", destination_kind=_kind(destination), reason=str(error)
                )
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, self.policy.max_backoff_s)
            else:
                self._metrics.observe("publish_seconds", self._clock.monotonic() - started)
                return

    def _note(self, outgoing: Outgoing) -> None:
        task = outgoing.in_flight.request.task if outgoing.in_flight is not None else "none"
        self._metrics.count(
            "requests_total", route=outgoing.route.name, task=task, outcome=outgoing.outcome
        )
        now = self._clock.monotonic()
        self._metrics.observe(
            "request_seconds", now - outgoing.deliveries[0].received_at, route=outgoing.route.name
        )
        if outgoing.in_flight is not None:
            self._metrics.count("items_total", outgoing.in_flight.request.n_items, task=task)
        log.debug("reply_published", request_id=outgoing.request_id, outcome=outgoing.outcome)

    async def wait_quiet(self) -> None:
        """Wait until nothing waits to be published and no publisher works."""
        await self._quiet.wait()

    def close(self) -> None:
        """Stop the encoder thread and release what was never published."""
        self._encode_thread.shutdown(wait=False, cancel_futures=True)
        for outbox in self._outboxes.values():
            while (outgoing := outbox.mailbox.get_nowait()) is not None:
                for delivery in outgoing.deliveries:
                    delivery.release("stopped before the reply was published")


def _outcome_label(in_flight: InFlight) -> str:
    if in_flight.failure is not None:
        return in_flight.failure.code
    n_errors = sum(isinstance(outcome, EmbedstreamError) for outcome in in_flight.outcomes)
    if n_errors == 0:
        return "ok"
    return "partial" if n_errors < len(in_flight.outcomes) else "all_items_failed"


def _numbers_in(reply: Reply | FailureReply) -> int:
    if isinstance(reply, FailureReply):
        return 0
    per_vector, n_vectors, n_sparse = reply.dimensions or 1, len(reply.items), 0
    for item in reply.items:
        n_vectors += len(item.multivector or ())
        n_sparse += 0 if item.sparse is None else 2 * len(item.sparse.indices)
    return per_vector * n_vectors + n_sparse


def _kind(destination: str) -> str:
    return destination.split(":", 1)[0] if ":" in destination else "topic"

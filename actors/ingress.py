"""Ingress: records in, admitted requests out; whatever cannot enter is answered here and now.

Who calls it: one supervised task per route.
What must stay true: every delivery that `receive` handed out ends here in exactly one of: admitted,
joined to its running twin, refused (failure reply, dead letter), settled (tombstone, cancel record),
or released (stopped while it waited). Nothing is decoded twice; user text is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import structlog

from actors.admission import Accept, Admission, Reject
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.messages import InFlight, Outgoing, Route
from actors.ports import Clock, Delivery, Metrics, SourceClosed
from actors.tokenizer import Tokenizer
from gpu.batch import ModelInfo
from schemas.codec import decode_request
from schemas.errors import (
    Cancelled,
    EmbedstreamError,
    ForbiddenDestination,
    Internal,
    UndecodableRecord,
)
from schemas.requests import AnyRequest, CancelRequest

log = structlog.get_logger(__name__)

OFF_LOOP_BYTES = 128 * 1024
"""Records above this are decoded in a thread: 1 MB of JSON takes some 10 ms, and the event loop
also sends Kafka's heartbeats (bug log E03)."""

_LONGEST_WAIT_S = 3600.0  # of one look; a deadline may be any number


class Ingress:
    """Intake of one route."""

    def __init__(
        self,
        route: Route,
        *,
        admission: Admission,
        table: InFlightTable,
        tokenizers: Mapping[str, Tokenizer],
        infos: Mapping[str, ModelInfo],
        egress: Egress,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.route = route
        self._admission = admission
        self._table = table
        self._tokenizers = tokenizers
        self._infos = infos
        self._egress = egress
        self._clock = clock
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"decode-{route.name}")
        self._held: deque[Delivery] = deque()
        self._current: Delivery | None = None
        self.closed = asyncio.Event()

    async def run(self) -> None:
        """Take deliveries until the source is closed; set `closed` then."""
        try:
            while True:
                try:
                    self._held.extend(await self.route.source.receive())
                except SourceClosed:
                    self.closed.set()
                    return
                while self._held:
                    self._current = self._held.popleft()
                    await self._accept_guarded(self._current)
        finally:
            # Cancelled, or a bug: what was received and not admitted goes back.
            if self._current is not None:
                self._held.appendleft(self._current)
            while self._held:
                self._held.popleft().release("stopped before admission")

    async def _accept_guarded(self, delivery: Delivery) -> None:
        try:
            await self._accept(delivery)
        except Exception as error:
            log.error(
                "ingress_failed",
                route=self.route.name,
                error_type=type(error).__name__,
                exc_info=error,
                **delivery.origin,
            )
            await self._refuse(
                delivery, Internal("the record could not be processed; this is a bug"), letter=True
            )

    async def _accept(self, delivery: Delivery) -> None:
        body = delivery.body
        if delivery.damage is not None:
            await self._refuse(delivery, UndecodableRecord(delivery.damage), letter=True)
            return
        if body is None:
            # A tombstone asks an index to delete; a request/reply route has nothing to delete.
            self._metrics.count("tombstones_skipped_total", route=self.route.name)
            self._settle(delivery)
            return
        if delivery.redelivered or delivery.attempt > 1:
            self._metrics.count("redelivered_total", route=self.route.name)
        try:
            request = await self._decode(body, delivery)
        except EmbedstreamError as error:
            await self._refuse(delivery, error, letter=isinstance(error, UndecodableRecord))
            return
        if isinstance(request, CancelRequest):
            self._cancel(request.id)
            self._settle(delivery)
            return
        if delivery.attempt > self.route.max_attempts:
            await self._refuse(
                delivery,
                Internal(
                    f"gave up after {self.route.max_attempts} attempts",
                    limit=self.route.max_attempts,
                    given=delivery.attempt,
                ),
                request=request,
                letter=True,
            )
            return
        await self._admit(delivery, request, body)

    def _settle(self, delivery: Delivery) -> None:
        delivery.settle()
        self._current = None

    async def _decode(self, body: bytes, delivery: Delivery) -> AnyRequest | CancelRequest:
        def decode() -> AnyRequest | CancelRequest:
            return decode_request(
                body,
                delivery.headers,
                default_id=delivery.default_id,
                limits=self.route.limits,
            )

        if len(body) > OFF_LOOP_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._thread, decode)
        return decode()

    async def _admit(self, delivery: Delivery, request: AnyRequest, body: bytes) -> None:
        try:
            destination = self._destination(request)
            model = self.route.resolve_model(request, self._infos)
        except EmbedstreamError as error:
            await self._refuse(delivery, error, request=request)
            return
        # The deadline may stand in a header; all else that counts is in the body or the key.
        digest = hashlib.blake2b(body, digest_size=16, salt=_salt(request.deadline_ms)).digest()
        join_key = (request.id, self.route.name, destination, digest)
        if self._table.join(join_key, delivery) is not None:
            self._current = None  # owned by its twin from here
            self._metrics.count("joined_duplicates_total", route=self.route.name)
            return
        lane = request.priority or self.route.lane
        while True:
            decision = self._admission.decide(
                request, lane, len(body), epoch_ms=self._clock.epoch_ms()
            )
            if isinstance(decision, Reject):
                await self._refuse(delivery, decision.error, request=request)
                return
            if isinstance(decision, Accept):
                break
            await self._wait_for_room(decision.reason, request.deadline_ms)
        in_flight = InFlight(
            request=request,
            route=self.route,
            model=model,
            lane=lane,
            destination=destination,
            admitted_at=self._clock.monotonic(),
            cost_bytes=len(body),
            deliveries=[delivery],
            join_key=join_key,
            labels=self._infos[model].labels,
        )
        self._table.add(in_flight)
        self._current = None  # owned by the table from here
        await self._tokenizers[model].put(in_flight)

    async def _wait_for_room(self, reason: str, deadline_ms: int | None) -> None:
        """Until something leaves, or the sender's deadline: it is answered then, not after the jam."""
        source = self.route.source
        source.pause()
        self._metrics.gauge("source_paused", 1, route=self.route.name)
        log.debug("source_paused", route=self.route.name, reason=reason)
        wait_s = None
        if deadline_ms is not None:
            wait_s = max(0.0, min((deadline_ms - self._clock.epoch_ms()) / 1000, _LONGEST_WAIT_S))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._table.wait_for_room()
        finally:
            source.resume()
            self._metrics.gauge("source_paused", 0, route=self.route.name)

    def _destination(self, request: AnyRequest) -> str:
        if request.reply_to is None:
            return self.route.sink.default_destination(request.id)
        refusal = self.route.sink.check_destination(request.reply_to)
        if refusal is not None:
            raise ForbiddenDestination(refusal, path="$.reply_to")
        return request.reply_to

    def _cancel(self, request_id: str) -> None:
        # Who may write to this source need not be allowed to touch what came in through another.
        found = [one for one in self._table.with_id(request_id) if one.route is self.route]
        for in_flight in found:
            self._egress.fail(in_flight, Cancelled("withdrawn by a cancel record"))
        self._metrics.count(
            "cancel_records_total",
            route=self.route.name,
            outcome="cancelled" if found else "not_found",
        )

    async def _refuse(
        self,
        delivery: Delivery,
        error: EmbedstreamError,
        *,
        request: AnyRequest | None = None,
        letter: bool = False,
    ) -> None:
        """Answer a record that does not enter, and settle it once the answer is durable."""
        request_id = request.id if request else (error.request_id or delivery.default_id)
        reply_to = request.reply_to if request else error.reply_to
        if isinstance(error, ForbiddenDestination):
            reply_to = None
        destination: str | None
        if reply_to is not None and self.route.sink.check_destination(reply_to) is None:
            destination = reply_to
        elif isinstance(error, UndecodableRecord):
            destination = None  # nobody readable asked: the dead letter is the answer
        else:
            destination = self.route.sink.default_destination(request_id)
        undecodable = isinstance(error, UndecodableRecord)
        log.info(
            "request_refused",
            route=self.route.name,
            code=error.code,
            path=error.path,
            **delivery.origin,
        )
        await self._egress.refuse(
            Outgoing(
                route=self.route,
                deliveries=[delivery],
                in_flight=None,
                request_id=request_id,
                outcome=error.code,
                destination=destination,
                failure=error,
                content_type=(request.content_type if request else error.content_type)
                or "application/msgpack",
                metadata=request.metadata if request else error.metadata,
                traceparent=request.traceparent if request else None,
                dead_letter=error if letter else None,
                dead_letter_kind="unprocessable" if undecodable else "failed",
            )
        )
        self._current = None  # owned by egress from here

    def close(self) -> None:
        """Stop the decode thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _salt(deadline_ms: int | None) -> bytes:
    return b"" if deadline_ms is None else deadline_ms.to_bytes(16, "little", signed=True)

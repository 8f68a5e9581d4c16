"""Ingress: records in, admitted requests out; whatever cannot enter is answered here and now.

Who calls it: supervised tasks, per route one that receives and one per lane for what waits aside.
What must stay true: every delivery that `receive` handed out ends here in exactly one of: admitted,
joined to its running twin, refused (failure reply, dead letter), settled (tombstone, cancel record),
or released (stopped while it waited). A record whose lane is full lets records of the other lane pass, and
none of its own. Nothing is decoded twice; user text is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any

import structlog

from actors.admission import Accept, Admission, Reject, Wait
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.loggable import loggable_path
from actors.loop_turn import LoopTurn
from actors.messages import InFlight, Outgoing
from actors.parking import Parked, Parking
from actors.ports import Clock, Delivery, Metrics, SourceClosed
from actors.route import Decoded, Refusal, Route
from actors.tokenizer import Tokenizer
from gpu.batch import ModelInfo
from schemas.errors import (
    Cancelled,
    EmbedstreamError,
    Expired,
    Internal,
    InvalidRequest,
    UndecodableRecord,
)
from schemas.headers import salvage_headers
from schemas.requests import LANES, AnyRequest, CancelRequest, Lane

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.5  # at deadlines and withdrawals of what is parked
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
        self._held: deque[Delivery] = deque()
        self._owned: dict[int, Delivery] = {}  # received, and nobody else's yet, in their order
        self._parkings = {lane: Parking() for lane in LANES}
        self._look_again_at = 0.0
        self.closed = asyncio.Event()

    async def run(self) -> None:
        """Take deliveries until the source is closed; set `closed` then."""
        try:
            while True:
                try:
                    self._held.extend(await self.route.source.receive())
                except SourceClosed:
                    for parking in self._parkings.values():
                        await parking.quiet.wait()
                    self.closed.set()
                    return
                self._owned.update((id(delivery), delivery) for delivery in self._held)
                await self._look_ahead()
                turn = LoopTurn(self._clock)
                while self._held:
                    if turn.is_long:
                        await turn.end()
                    delivery = self._held.popleft()
                    await self._guarded(delivery, self._accept(delivery))
        finally:
            # Cancelled, or a bug: what was received and not admitted goes back.
            for parking in self._parkings.values():
                for parked in parking:
                    parked.leave()
            self._held.clear()
            while self._owned:
                self._owned.pop(next(iter(self._owned))).release("stopped before admission")

    async def run_parked(self, lane: Lane) -> None:
        """Admit what waits aside of one lane, in its order, for ever."""
        parking = self._parkings[lane]
        while True:
            await parking.some.wait()
            head = parking.head
            assert head is not None
            try:
                await self._guarded(
                    head.delivery, self._admit(head.delivery, head.decoded, head.request, head)
                )
            finally:
                head.leave()

    async def _look_ahead(self) -> None:
        try:
            await self.route.decoder.look_ahead(self._held)
        except Exception as error:  # noqa: BLE001  boundary: each record is decoded without it
            log.warning("look_ahead_failed", route=self.route.name, error_type=type(error).__name__)

    async def _guarded(self, delivery: Delivery, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
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
        if delivery.withdrawn:
            self._give_back(delivery)
            return
        if delivery.damage is not None:
            damaged = UndecodableRecord(delivery.damage)
            found = salvage_headers(delivery.headers)
            damaged.request_id, damaged.reply_to = found.request_id, found.reply_to
            damaged.content_type = found.content_type
            await self._refuse(delivery, damaged, letter=True)
            return
        if delivery.redelivered or delivery.attempt > 1:
            self._metrics.count("redelivered_total", route=self.route.name)
        try:
            decoded = await self.route.decoder.decode(delivery)
        except EmbedstreamError as error:
            await self._refuse(delivery, error, letter=isinstance(error, UndecodableRecord))
            return
        if decoded is None:
            if delivery.body is None:
                self._metrics.count("tombstones_skipped_total", route=self.route.name)
            self._settle(delivery)
            return
        request = decoded.request
        if isinstance(request, CancelRequest):
            await self._cancel(request.id)
            self._settle(delivery)
            return
        if delivery.attempt > self.route.max_attempts:
            gave_up = Internal(
                f"gave up after {self.route.max_attempts} attempts",
                limit=self.route.max_attempts,
                given=delivery.attempt,
            )
            await self._refuse(delivery, gave_up, request=request, letter=True)
            return
        await self._admit(delivery, decoded, request)

    def _give_back(self, delivery: Delivery) -> None:
        delivery.release("withdrawn before it was admitted")
        self._disown(delivery)

    def _settle(self, delivery: Delivery) -> None:
        delivery.settle()
        self._disown(delivery)

    def _disown(self, delivery: Delivery, parked: Parked | None = None) -> None:
        self._owned.pop(id(delivery), None)
        if parked is not None:
            parked.leave()

    async def _admit(
        self,
        delivery: Delivery,
        decoded: Decoded,
        request: AnyRequest,
        parked: Parked | None = None,
    ) -> None:
        """Let it in, or see it out; where its lane is full, wait for room or, if it may, park it."""
        try:
            address = self.route.destination.address(request)
            model = self.route.resolve_model(request, self._infos)
            request = self.route.completed(request)
        except EmbedstreamError as error:
            await self._refuse(delivery, error, request=request, parked=parked)
            return
        body = delivery.body or b""
        # The deadline may stand in a header; all else that counts is in the body or the key.
        digest = hashlib.blake2b(body, digest_size=16, salt=_salt(request.deadline_ms)).digest()
        join_key = (request.id, self.route.name, address, digest)
        if self.route.order == "none" and self._table.join(join_key, delivery) is not None:
            self._disown(delivery, parked)  # its twin's from here
            self._metrics.count("joined_duplicates_total", route=self.route.name)
            return
        answer = self.route.destination.answered(join_key) if self.route.order == "none" else None
        lane = request.priority or self.route.lane
        tokenizer, parking = self._tokenizers[model], self._parkings[lane]
        may_park = parked is None and self.route.order == "none"
        while True:
            decision = self._admission.decide(
                request, lane, len(body), epoch_ms=self._clock.epoch_ms()
            )
            if isinstance(decision, Reject):
                await self._refuse(delivery, decision.error, request=request, parked=parked)
                return
            crowded = may_park and (len(parking) > 0 or not tokenizer.has_room(lane))
            if isinstance(decision, Accept) and not crowded:
                break
            if may_park and parking.has_room(len(body)):
                parking.add(Parked(parking, delivery, decoded, request, len(body)))
                return
            if parked is not None:
                await self._wait_aside(parking)
                if parked.gone:
                    return
                continue
            reason = decision.reason if isinstance(decision, Wait) else "records that wait aside"
            ahead = parking if may_park and len(parking) else self._table
            await self._wait_for_room(ahead.wait_for_room(), reason, request.deadline_ms)
            if delivery.withdrawn:
                self._give_back(delivery)
                return
        in_flight = InFlight(
            request=request,
            route=self.route,
            model=model,
            lane=lane,
            address=address,
            admitted_at=self._clock.monotonic(),
            cost_bytes=len(body),
            deliveries=[delivery],
            join_key=join_key,
            labels=self._infos[model].labels,
            payload=decoded.payload,
            answer=answer,
            ticket=self._egress.line_up(self.route, self.route.order_key(delivery, decoded)),
        )
        self._table.add(in_flight)
        self._disown(delivery, parked)  # the table's from here
        if answer is not None:
            self._metrics.count("answered_again_total", route=self.route.name)
        if in_flight.n_open and answer is None:
            if tokenizer.has_room(lane):
                tokenizer.put_nowait(in_flight)
            else:
                await tokenizer.put(in_flight)
        else:
            in_flight.closed = True
            self._egress.send(in_flight)

    async def _wait_for_room(
        self, room: Awaitable[None], reason: str, deadline_ms: int | None
    ) -> None:
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
                    await room
        finally:
            source.resume()
            self._metrics.gauge("source_paused", 0, route=self.route.name)

    async def _wait_aside(self, parking: Parking) -> None:
        """Until something leaves, or a moment; what has ended while it was parked leaves now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._table.wait_for_room()
        if self._clock.monotonic() < self._look_again_at:
            return
        self._look_again_at = self._clock.monotonic() + _LOOK_AGAIN_S
        epoch_ms = self._clock.epoch_ms()
        for one in parking:
            deadline_ms = one.request.deadline_ms
            if one.gone:
                continue
            if one.delivery.withdrawn:
                one.leave()
                self._give_back(one.delivery)
            elif deadline_ms is not None and epoch_ms >= deadline_ms:
                expired = Expired(
                    "deadline_ms passed before there was room; nothing was computed",
                    limit=deadline_ms,
                    given=epoch_ms,
                )
                await self._refuse(one.delivery, expired, request=one.request, parked=one)

    async def _cancel(self, request_id: str) -> None:
        # Who may write to this source need not be allowed to touch what came in through another.
        found = [one for one in self._table.with_id(request_id) if one.route is self.route]
        found_parked = False
        for in_flight in found:
            self._egress.fail(in_flight, Cancelled("withdrawn by a cancel record"))
        for parking in self._parkings.values():
            for one in parking:
                if one.request.id == request_id and not one.gone:
                    found_parked = True
                    error = Cancelled("withdrawn by a cancel record")
                    await self._refuse(one.delivery, error, request=one.request, parked=one)
        self._metrics.count(
            "cancel_records_total",
            route=self.route.name,
            outcome="cancelled" if found or found_parked else "not_found",
        )

    async def _refuse(
        self,
        delivery: Delivery,
        error: EmbedstreamError,
        *,
        request: AnyRequest | None = None,
        letter: bool = False,
        parked: Parked | None = None,
    ) -> None:
        """Answer a record that does not enter, and settle it once the answer is durable."""
        if parked is not None:
            parked.leave()
        request_id = request.id if request else (error.request_id or delivery.default_id)
        address = self.route.destination.address_of_failure(delivery, error, request)
        log.info(
            "request_refused",
            route=self.route.name,
            code=error.code,
            path=loggable_path(error.path),
            **delivery.origin,
        )
        unprocessable = isinstance(error, UndecodableRecord)
        if address is None and not letter:
            # Nobody can be told: what may pass later comes again, all else is a dead letter.
            if error.retryable:
                delivery.release(error.code)
                self._disown(delivery)
                return
            letter, unprocessable = True, isinstance(error, InvalidRequest)
        refusal, order_key = None, self.route.order_key(delivery)
        if address is not None:
            refusal = Refusal(
                id=request_id,
                error=error,
                address=address,
                content_type=(request.content_type if request else error.content_type)
                or "application/msgpack",
                metadata=request.metadata if request else error.metadata,
                traceparent=request.traceparent if request else None,
                order_key=order_key,
            )
        await self._egress.refuse(
            Outgoing(
                route=self.route,
                deliveries=[delivery],
                request_id=request_id,
                outcome=error.code,
                refusal=refusal,
                dead_letter=error if letter else None,
                dead_letter_kind="unprocessable" if unprocessable else "failed",
                ticket=self._egress.line_up(self.route, order_key),
            )
        )
        self._disown(delivery)  # egress's from here

    def close(self) -> None:
        """Stop the decoder's threads."""
        self.route.decoder.close()


def _salt(deadline_ms: int | None) -> bytes:
    return b"" if deadline_ms is None else deadline_ms.to_bytes(16, "little", signed=True)

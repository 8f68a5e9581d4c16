"""Egress: finished requests out to their destination, then settled, in that order.

Who calls it: the tokenizer and the dispatcher `complete` items or `fail` requests; ingress `refuse`s
records that never became in-flight requests. Publishers (supervised tasks) do the rest.
What must stay true: a result is durable before its delivery is settled; each request leaves once,
on an ordered route in its turn; every budget charged is refunded on every path; what cannot be
written within `attempts` is released (delivered again later), never dropped; a destination that hangs
holds up its own route alone. The queue of a route is bounded by admission plus the refusal slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import structlog

from actors.dead_letters import cut_to_fit, dead_letter_headers
from actors.in_flight import InFlightTable
from actors.messages import InFlight, Outgoing
from actors.ordering import Ticket
from actors.outbox import Outbox, outcome_label, outgoing_of
from actors.ports import Clock, Delivery, GaveUp, Metrics, PublishError, RecordTooLargeForBroker
from actors.publish import PublishPolicy, RetryingWriter, kind_of, publish_fitting
from actors.route import Route
from gpu.batch import ItemOutcome, ModelInfo
from schemas.errors import EmbedstreamError, Internal
from schemas.headers import DeadLetterKind
from schemas.requests import Task

log = structlog.get_logger(__name__)

MIN_DEAD_LETTER_BYTES = 256
"""A destination that refuses even this takes no dead letter at all."""


class Egress:
    """Hands results to destinations and writes dead letters.

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
        self._clock = clock
        self._metrics = metrics
        self._log = log.bind()  # what the module's does anew for each line
        self._retry = RetryingWriter(policy, policy.attempts, clock=clock, metrics=metrics)
        self._attempts = policy.attempts
        self._retry_tried = RetryingWriter(
            policy, policy.attempts - 1, clock=clock, metrics=metrics
        )
        # To release what stands in a line would let what stands behind it overtake.
        self._retry_in_line = RetryingWriter(policy, None, clock=clock, metrics=metrics)
        self._max_waiting = max_waiting
        self._refusal_slots = refusal_slots
        self._outboxes: dict[str, Outbox] = {}  # by route
        self._n_out = 0  # waiting in a queue or being written
        self._quiet = asyncio.Event()
        self._quiet.set()

    def _outbox(self, route: Route) -> Outbox:
        outbox = self._outboxes.get(route.name)
        if outbox is None:
            outbox = Outbox(route, self._attempts, self._max_waiting, self._refusal_slots)
            self._outboxes[route.name] = outbox
        return outbox

    def takes_lists(self, route: Route) -> bool:
        """Does `run_lists` have anything to do for this route?"""
        return self._outbox(route).takes_lists

    # --- called by the other stations; only `refuse` waits ---------------------------------------

    def line_up(self, route: Route, key: str | None) -> Ticket[Outgoing] | None:
        """A place in the line of `key`, for what will be sent or refused; None: no order is asked."""
        return None if key is None else self._outbox(route).order.enter(key)

    def complete(self, in_flight: InFlight, index: int, outcome: ItemOutcome) -> None:
        """Note one item's outcome; the last one sends the request out."""
        if isinstance(outcome, EmbedstreamError):
            self._metrics.count("item_errors_total", code=outcome.code)
        if in_flight.complete(index, outcome):
            self.send(in_flight)

    def fail(self, in_flight: InFlight, error: EmbedstreamError) -> None:
        """End a request with a failure, unless it has ended already."""
        if in_flight.fail(error):
            self.send(in_flight)

    def send(self, in_flight: InFlight) -> None:
        """A request has ended: out with it, in its turn."""
        outbox = self._outbox(in_flight.route)
        if outbox.takes_lists:
            self._n_out += 1
            self._quiet.clear()
            outbox.lists.put_nowait(in_flight)
        else:
            self._put(outgoing_of(in_flight))

    def withdraw(
        self, unwanted: Callable[[Delivery], bool] = lambda _: True, *, at_most: int | None = None
    ) -> int:
        """Release deliveries whose computation has not begun, the newest first; returns how many."""
        n_released = 0
        for in_flight in reversed(list(self._table)):
            if in_flight.closed or in_flight.first_forward_at is not None:
                continue
            gone = [delivery for delivery in in_flight.deliveries if unwanted(delivery)]
            if not gone or self._has_begun_behind(in_flight):
                continue
            if len(gone) == len(in_flight.deliveries):
                in_flight.closed = True  # its items fall out of the queues
                self._table.remove(in_flight)
                if in_flight.ticket is not None:
                    outbox = self._outbox(in_flight.route)
                    following = outbox.order.withdraw(in_flight.ticket)
                    if following is not None:
                        self._quiet.clear()
                        self._enqueue(outbox, following)
            else:
                in_flight.deliveries = [d for d in in_flight.deliveries if d not in gone]
            for delivery in gone:
                delivery.release("withdrawn before it was computed")
            n_released += len(gone)
            if at_most is not None and n_released >= at_most:
                break
        return n_released

    def _has_begun_behind(self, in_flight: InFlight) -> bool:
        """Would something of its line, which has begun, be written before whoever gets it next?"""
        ticket = in_flight.ticket
        return ticket is not None and not self._outbox(in_flight.route).order.is_last(ticket)

    async def refuse(self, outgoing: Outgoing) -> None:
        """Send a failure or dead letter for a record that was never admitted; waits for a slot."""
        await self._outbox(outgoing.route).refusals.acquire()
        self._put(outgoing)

    def _put(self, outgoing: Outgoing) -> None:
        outbox, ticket = self._outbox(outgoing.route), outgoing.ticket
        if ticket is None or outbox.order.finish(ticket, outgoing) is not None:
            self._enqueue(outbox, outgoing)

    def _enqueue(self, outbox: Outbox, outgoing: Outgoing) -> None:
        self._n_out += 1
        self._quiet.clear()
        outbox.queue.put_nowait(outgoing)

    # --- publishers ----------------------------------------------------------------------------

    async def run(self, route: Route) -> None:
        """One publisher; several run for each route."""
        outbox = self._outbox(route)
        while True:
            outgoing = await outbox.queue.get()
            try:
                await self._process(outgoing, outbox)
            finally:
                self._went(1)

    def _went(self, n: int) -> None:
        self._n_out -= n
        if not self._n_out:
            self._quiet.set()

    async def run_lists(self, route: Route) -> None:
        """One publisher of what leaves in lists; several run for each such route."""
        outbox = self._outbox(route)
        while True:
            await self._process_all(route, await outbox.next_list(), outbox)

    async def _process_all(self, route: Route, some: list[InFlight], outbox: Outbox) -> None:
        started = self._clock.monotonic()
        left = dict(enumerate(some))
        gone: list[tuple[InFlight, float]] = []
        refused: Collection[int] = ()

        def done(number: int) -> None:
            in_flight = left.pop(number)
            for delivery in in_flight.deliveries:
                delivery.settle()
            self._table.remove(in_flight)
            gone.append((in_flight, self._clock.monotonic()))

        try:
            finished = [(one, self._infos[one.model]) for one in some]
            refused = await route.destination.deliver_all(finished, done)
        except Exception as error:
            log.error(
                "publisher_failed",
                route=route.name,
                error_type=type(error).__name__,
                exc_info=error,
            )
        except asyncio.CancelledError:
            for in_flight in left.values():
                for delivery in in_flight.deliveries:
                    delivery.release("reply not published")
                self._table.remove(in_flight)
            self._went(len(left))
            raise
        finally:
            self._went(len(gone))
            self._note_all(route, gone, started)
        if refused:
            self._metrics.count("publish_retries_total", len(refused))
        for number, in_flight in left.items():  # alone, with all the patience that it needs
            outbox.queue.put_nowait(outgoing_of(in_flight, tried=number in refused))

    async def _process(self, outgoing: Outgoing, outbox: Outbox) -> None:
        outcome, transactions = None, outgoing.route.transactions
        leave = _once(partial(self._leave_line, outgoing, outbox))
        try:
            if transactions is not None:
                outcome = await transactions.deliver(
                    outgoing.deliveries, partial(self._deliver, outgoing), queued=leave
                )
            elif outgoing.ticket is None or any(d.held for d in outgoing.deliveries):
                outcome = await self._deliver(outgoing)
            if outcome is None:
                # Others answer it: ours would come behind results that are newer, or twice.
                log.info("given_away_unanswered", request_id=outgoing.request_id)
                return
            for delivery in outgoing.deliveries:
                delivery.settle()
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
            if outcome is None:
                for delivery in outgoing.deliveries:
                    delivery.release("reply not published")
            if outgoing.in_flight is not None:
                self._table.remove(outgoing.in_flight)
            else:
                outbox.refusals.release()
            leave()
        if outcome is not None:
            self._note(outgoing, outcome)

    def _leave_line(self, outgoing: Outgoing, outbox: Outbox) -> None:
        """What stands behind it may be written now."""
        if outgoing.ticket is not None:
            following = outbox.order.leave(outgoing.ticket)
            if following is not None:
                self._enqueue(outbox, following)

    async def _deliver(self, outgoing: Outgoing) -> str:
        """The result, then the dead letter if there is one; what the metrics call the outcome.

        Raises `GaveUp` to have the record released.
        """
        retry = self._retry_tried if outgoing.tried else self._retry
        if outgoing.ticket is not None:
            retry = self._retry_in_line
        letter, kind, outcome = outgoing.dead_letter, outgoing.dead_letter_kind, outgoing.outcome
        try:
            undelivered = await self._to_destination(outgoing, retry)
        except (GaveUp, PublishError) as error:
            # A destination that cannot be written would bring the record back for ever; and what is
            # being given up anyway must not be kept by a reply that fails.
            permanent = error.permanent if isinstance(error, GaveUp) else not error.retryable
            if letter is None and not permanent:
                raise GaveUp(str(error), permanent=False) from error
            log.error("reply_refused", request_id=outgoing.request_id, reason=str(error))
            letter = letter or Internal("the reply cannot be published")
        else:
            if undelivered:
                letter = _as_one(undelivered)
                outcome = letter.code
                if any(error.retryable for error in undelivered):
                    raise GaveUp(letter.message, permanent=False)
        if letter is not None:
            for delivery in outgoing.deliveries:
                await self._write_dead_letter(outgoing, delivery, letter, kind, retry)
                self._metrics.count("dead_letters_total", kind=kind)
        return outcome

    async def _to_destination(
        self, outgoing: Outgoing, retry: RetryingWriter
    ) -> Sequence[EmbedstreamError]:
        destination, in_flight = outgoing.route.destination, outgoing.in_flight
        if in_flight is not None:
            return await destination.deliver(in_flight, self._infos[in_flight.model], retry)
        if outgoing.refusal is not None:
            await destination.refuse(outgoing.refusal, retry)
        return ()

    async def _write_dead_letter(
        self,
        outgoing: Outgoing,
        delivery: Delivery,
        letter: EmbedstreamError,
        kind: DeadLetterKind,
        retry: RetryingWriter,
    ) -> None:
        sink, key = outgoing.route.sink, outgoing.request_id
        to, whole = sink.dead_letter_destination, dead_letter_headers(delivery, letter, kind)

        async def publish(limit_bytes: int | None) -> None:
            body, headers = delivery.body or b"", whole
            if limit_bytes is not None:
                # The original with our headers no longer fits: its beginning does, and says so.
                body, headers = cut_to_fit(delivery, whole, limit_bytes)
            await retry(partial(sink.publish, to, key, body, headers), kind_of(to))

        try:
            await publish_fitting(publish, None, smallest=MIN_DEAD_LETTER_BYTES)
        except RecordTooLargeForBroker as error:
            raise GaveUp("no dead letter is small enough", permanent=True) from error

    def _note(self, outgoing: Outgoing, outcome: str) -> None:
        in_flight, route = outgoing.in_flight, outgoing.route.name
        task = "none" if in_flight is None else in_flight.request.task
        took_s = self._clock.monotonic() - outgoing.deliveries[0].received_at
        self._metrics.count("requests_total", route=route, task=task, outcome=outcome)
        self._metrics.observe("request_seconds", took_s, route=route)
        if in_flight is not None:
            self._metrics.count("items_total", in_flight.request.n_items, task=task)
        log.debug("reply_published", request_id=outgoing.request_id, outcome=outcome)

    def _note_all(
        self, route: Route, gone: Sequence[tuple[InFlight, float]], started: float
    ) -> None:
        """As `_note`, each series once. gone: with the moment of the acknowledgement."""
        counts: dict[tuple[Task, str], tuple[int, int]] = {}  # requests and items
        tell = self._log.is_enabled_for(logging.DEBUG)
        for in_flight, _ in gone:
            key = in_flight.request.task, outcome_label(in_flight)
            n, n_items = counts.get(key, (0, 0))
            counts[key] = n + 1, n_items + len(in_flight.outcomes)
            if tell:
                self._log.debug("reply_published", request_id=in_flight.request.id, outcome=key[1])
        name = route.name
        for (task, outcome), (n, n_items) in counts.items():
            self._metrics.count("requests_total", n, route=name, task=task, outcome=outcome)
            self._metrics.count("items_total", n_items, task=task)
        took = [at - one.deliveries[0].received_at for one, at in gone]
        self._metrics.observe_all("request_seconds", took, route=name)
        self._metrics.observe_all("publish_seconds", [at - started for _, at in gone])

    async def wait_quiet(self) -> None:
        """Wait until nothing waits to be written and no publisher works."""
        await self._quiet.wait()

    def close(self) -> None:
        """Release what never left."""
        for outbox in self._outboxes.values():
            left = list(outbox.order.waiting())
            while not outbox.queue.empty():
                left.append(outbox.queue.get_nowait())
            for outgoing in left:
                for delivery in outgoing.deliveries:
                    delivery.release("stopped before the reply was published")
            while outbox.lists.waiting:
                for delivery in outbox.lists.waiting.popleft().deliveries:
                    delivery.release("stopped before the reply was published")


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, the first time only."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


def _as_one(undelivered: Sequence[EmbedstreamError]) -> EmbedstreamError:
    """What a dead letter says of several items: the first one's reason, and every index."""
    first = undelivered[0]
    if len(undelivered) == 1:
        return first
    items = sorted({index for error in undelivered for index in error.items})
    message = f"{first.message} (and {len(undelivered) - 1} more)"
    return type(first)(message, path=first.path, items=items, limit=first.limit, given=first.given)

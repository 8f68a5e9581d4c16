"""The protocols that actors need from the outside: transports, clock, metrics.

Who calls it: ingress talks to a `Source` and its `Delivery` objects; egress and the reply destination
to a `Sink`; `pipeline/transports/` implements them; tests implement them in memory.
What must stay true: nine verbs on three objects. `settle` and `release` only mark (sync,
idempotent, first call wins); the transport batches the commit. Commit-up-to semantics never leak
in here, and "dead letter" is no verb: publish to the dead-letter destination, then settle.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable


class SourceClosed(Exception):
    """`receive` after `stop_intake`: nothing more will be handed out."""


class PublishError(Exception):
    """The other side did not take a write.

    retryable: the same write may pass later. retry_after_s: how long the other side asked to wait.
    """

    def __init__(
        self, message: str, *, retryable: bool, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class RecordTooLargeForBroker(PublishError):
    """The record exceeds what the destination takes; it will never pass as it is."""

    def __init__(self, message: str, *, limit_bytes: int | None, given_bytes: int) -> None:
        super().__init__(message, retryable=False)
        self.limit_bytes = limit_bytes
        self.given_bytes = given_bytes


class GaveUp(Exception):
    """A write was tried for the last time. `permanent`: it would never pass."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class Deadline:
    """One monotonic budget shared by every step of an operation (shutdown, a revoke callback)."""

    __slots__ = ("at",)

    def __init__(self, budget_s: float, *, now: float | None = None) -> None:
        self.at = (time.monotonic() if now is None else now) + budget_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at


class Delivery(Protocol):
    """One record as handed out by a transport, with the right to settle it.

    body            record bytes; None is a Kafka tombstone (b"" is not)
    headers         names in lower case -> values as bytes; never None
    key             Kafka key decoded as UTF-8 (replacing), or None
    default_id      request id when neither header nor body names one: Kafka key, else
                    "<topic>-<partition>-<offset>"; Redis entry id, or SHA-1 of a list element;
                    a uuid in process
    attempt         1 plus the attempts that did not come back or were released, as far as the
                    transport can know
    redelivered     handed out before, to a process that may have died of it
    received_at     time.monotonic() at receipt
    origin          where it came from, for logs and dead letters:
                    {"transport","topic","partition","offset"}, {"transport","stream","id"} or
                    {"transport","list","id"}
    withdrawn       taken back by its source (a revoked partition): whoever has not begun drops it
    held            still ours; false once its source has given it away: another answers it then
    damage          why the body is no record at all (a batch that cannot be decoded), else None
    """

    @property
    def body(self) -> bytes | None: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...
    @property
    def key(self) -> str | None: ...
    @property
    def default_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def redelivered(self) -> bool: ...
    @property
    def received_at(self) -> float: ...
    @property
    def origin(self) -> Mapping[str, str | int]: ...
    @property
    def damage(self) -> str | None: ...
    @property
    def withdrawn(self) -> bool: ...
    @property
    def held(self) -> bool: ...

    def settle(self) -> None:
        """Finished for good: the reply is durable; never give it to anybody again."""
        ...

    def release(self, reason: str) -> None:
        """Hand it back: it is delivered again (here after a back-off, or to another member)."""
        ...


class Withdraw(Protocol):
    """Releases the deliveries that `unwanted` picks and nobody has begun; returns how many."""

    def __call__(self, unwanted: Callable[[Delivery], bool]) -> int: ...


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """connected: the broker answers and intake is possible. detail: one line for `/ready`."""

    connected: bool
    detail: str = ""
    in_flight: int = 0  # handed out and neither settled nor released
    buffered: int = 0  # fetched, not yet handed out


class Source(Protocol):
    """Where requests come from."""

    async def open(self) -> None:
        """Connect; create group and topics where configured. Raises `ConnectionError` with a one-line remedy."""
        ...

    async def run(self) -> None:
        """The transport's own loop (polling while paused, leases, commits, reconnects).

        Started by the supervisor as a task right after `open`; returns after `aclose`. Reconnects
        by itself with back-off; raises only when going on would lose or repeat work silently.
        """
        ...

    async def receive(self) -> list[Delivery]:
        """At least one delivery; waits for it. Safe to cancel: nothing is lost.

        Raises `SourceClosed` after `stop_intake` (a bounded file source: when it is exhausted).
        """
        ...

    def pause(self) -> None:
        """Stop fetching without leaving the group. Idempotent."""
        ...

    def resume(self) -> None: ...

    def stop_intake(self) -> None:
        """No delivery is handed out any more; held ones can still be settled. Fetched but not
        handed-out records go back."""
        ...

    def withdraw_with(self, withdraw: Withdraw) -> None:
        """How to have held deliveries released whose computation has not begun."""
        ...

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        """A step that can kill this process begins with these redelivered records.

        Returns once whoever gets them next would know (`Delivery.attempt` one higher). A broker
        that does not answer is logged, never raised: the work goes on uncounted.
        """
        ...

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        """The step is over and nobody died: what `attempt_begins` noted does not count."""
        ...

    async def flush(self, deadline: Deadline) -> None:
        """Make every settle so far durable (commit, XACK), within the budget."""
        ...

    async def aclose(self) -> None:
        """Leave the group and disconnect, in bounded time. Unsettled deliveries are left to others."""
        ...

    def status(self) -> SourceStatus: ...


class Sink(Protocol):
    """Where replies and dead letters go. Destinations are names the transport understands:
    a topic on Kafka; ``stream:NAME`` or ``list:NAME`` on Redis."""

    max_record_bytes: int | None
    """Largest record (body plus headers) the destination takes, None when unbounded: egress splits above it."""
    dead_letter_destination: str

    def default_destination(self, request_id: str) -> str:
        """Where a reply goes when the request names no `reply_to`."""
        ...

    def check_destination(self, destination: str) -> str | None:
        """None when a request may name this `reply_to`, else the reason in plain words.

        Applies the allow-list, the transport's syntax, and refuses sources and dead letters (a
        reply must never become a request).
        """
        ...

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        """Returns only when the broker has the record. Raises `PublishError`.

        Records with one `order_key` are put where a reader meets them in the order of their publishing:
        on Kafka in one partition. None: wherever `key` leads.
        """
        ...

    async def aclose(self) -> None: ...


class Record:
    """What is published: `Sink.publish`'s arguments."""

    __slots__ = ("body", "destination", "headers", "key")

    def __init__(
        self, destination: str, key: str, body: bytes, headers: Mapping[str, bytes]
    ) -> None:
        self.destination = destination
        self.key = key
        self.body = body
        self.headers = headers

    @property
    def size_bytes(self) -> int:
        size = len(self.body)
        for name, value in self.headers.items():
            size += len(name) + len(value)
        return size


Told: TypeAlias = Callable[[int, PublishError | None], None]
"""Hears of each record of a list, by its number, once: it is durable (None), or why not."""


@runtime_checkable
class ListSink(Protocol):
    """A sink that takes many records at once for less than it takes each."""

    async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
        """Each record as `Sink.publish` would, none waiting for another; returns when all are told.

        Cancelled, it tells nothing more. Never raises `PublishError`.
        """
        ...


class Transactions(Protocol):
    """Makes what is published for requests, and their settling, durable at once or not at all."""

    async def run(self) -> None:
        """The loop that commits, a supervised task. Raises when another process has taken our place."""
        ...

    async def deliver(
        self,
        deliveries: Sequence[Delivery],
        deliver: Callable[[], Awaitable[str]],
        *,
        queued: Callable[[], None],
    ) -> str | None:
        """What `deliver` returned, once all it published is durable and `deliveries` are settled.

        Args:
            deliver: publishes by the sink beside this; called again when a transaction is aborted.
            queued: called when the place among all that is published is certain.

        Returns None when the deliveries had been given away: then nothing was published. Raises what
        `deliver` raised; nothing was published then, either.
        """
        ...


class Clock(Protocol):
    """Time, injected so that tests own it."""

    def monotonic(self) -> float:
        """Seconds; for intervals."""
        ...

    def epoch_ms(self) -> int:
        """Milliseconds since 1970; only for `deadline_ms`."""
        ...


class SystemClock:
    """The real clock."""

    monotonic = staticmethod(time.monotonic)

    def epoch_ms(self) -> int:
        return time.time_ns() // 1_000_000


class Metrics(Protocol):
    """Counters, gauges and histograms by name. Implementations never raise into an actor."""

    def count(self, name: str, value: float = 1.0, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def observe(self, name: str, value: float, **labels: str) -> None: ...
    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None: ...


class NoMetrics:
    """Metrics that go nowhere: unit tests and one-off runs."""

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Dropped."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Dropped."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Dropped."""

    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None:
        """Dropped."""

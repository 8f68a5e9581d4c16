"""A route: a source, how its records are decoded, and a destination. The two ends to implement.

    Decoder        record -> request            `actors.decoder`: the wire contract
    Destination    finished request -> durable  `actors.publish`: replies on a broker

Who calls it: the graph builds routes; ingress drives a route's `Decoder`, egress its `Destination`.
What must stay true: a destination never settles, releases or dead-letters: it delivers or says what
it could not, and egress applies one set of rules to all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

from actors.answers import Answer, Key
from actors.ports import Delivery, Sink, Source, Transactions
from gpu.batch import ItemOutcome, ModelInfo
from schemas.errors import ContentType, EmbedstreamError, UnknownModel
from schemas.requests import AnyRequest, CancelRequest, EmbedRequest, Lane, Task

T = TypeVar("T")
Order: TypeAlias = Literal["none", "key", "partition"]


@dataclass(slots=True, eq=False)
class Decoded:
    """What a record asks for. Never changed.

    request     what to compute. No items (`EmbedRequest(id=..., input=())`): nothing, the
                destination gets it at once (a delete, a document that did not change). Many: they are
                encoded, packed and answered each for itself, and reach the destination together.
                Two requests in flight with the same id and body are computed once, so where each
                record counts the id has to be the record's own.
    payload     the decoder's own, handed to the destination untouched (a document's metadata).
    order_key   on a route with `order = "key"`: what to order by instead of the record's key.
    """

    request: AnyRequest | CancelRequest
    payload: object = None
    order_key: str | None = None


class Decoder(ABC):
    """How the records of a route become requests. `actors.decoder` reads the wire contract.

    Called by the route's ingress alone, one call at a time. Derive from this class to inherit the
    steps that do nothing.
    """

    async def look_ahead(self, deliveries: Sequence[Delivery]) -> None:
        """Told once of each hand-out, before its records are decoded in the same order: for one
        look-up on behalf of all of them. What it raises is logged and changes nothing."""

    @abstractmethod
    async def decode(self, delivery: Delivery) -> Decoded | None:
        """One record's request; None when it asks for nothing: it is settled then.

        It runs on the event loop: what takes longer than a millisecond goes into a thread. A body
        of None is a tombstone, and reaches the decoder.

        Raises:
            UndecodableRecord: the bytes are no record at all; it is dead-lettered.
            EmbedstreamError: the record cannot be accepted. The sender is told when the destination
                can (`Destination.address_of_failure`); else it is released when the error is
                retryable, and dead-lettered when not.
        """

    def close(self) -> None:
        """Stop threads. Called once, at the end."""


class Finished(Protocol):
    """A request that was admitted and has ended, as its destination reads it. Read only.

    request, payload    as decoded
    address             what `Destination.address` said of it
    deliveries          the records that asked: the first was decoded (`key`, `headers`, `body`,
                        `origin` with topic, partition and offset are the original's); others are its
                        twins. Never settled or released by a destination.
    join_key            what makes a request its twin: id, route, address, digest of the record
    answer              what the destination has given to its twin before; nothing was computed then
    order_key           on an ordered route: whose order the result keeps
    failure             why the request failed as a whole (no outcomes then), or None
    outcomes            one per item, in the items' order: an `ItemResult` (vectors are finite
                        float32) or the error of this item
    tokens, truncated   one per item
    prompt              the text put before each item, or None
    labels              of a classifier
    first_forward_at    `Clock.monotonic()`, None when nothing ran; forward_s: longest batch
    """

    @property
    def request(self) -> AnyRequest: ...
    @property
    def payload(self) -> object: ...
    @property
    @abstractmethod
    def address(self) -> str: ...
    @property
    def deliveries(self) -> Sequence[Delivery]: ...
    @property
    def join_key(self) -> Key: ...
    @property
    def answer(self) -> Answer | None: ...
    @property
    def order_key(self) -> str | None: ...
    @property
    def failure(self) -> EmbedstreamError | None: ...
    @property
    def outcomes(self) -> Sequence[ItemOutcome | None]: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def truncated(self) -> Sequence[bool]: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def first_forward_at(self) -> float | None: ...
    @property
    def forward_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a record that never became a request in flight. order_key: as of `Finished`."""

    id: str
    error: EmbedstreamError
    address: str
    content_type: ContentType = "application/msgpack"
    metadata: dict[str, object] | None = None
    traceparent: str | None = None
    order_key: str | None = None


class Retry(Protocol):
    """Egress's way to write: tries again, with a growing wait, while the other side may yet take it."""

    async def __call__(self, write: Callable[[], Awaitable[T]], to: str) -> T:
        """`await write()`, again whenever it raises a retryable `PublishError`.

        Args:
            write: makes the same write durable on every call; a repeated one changes nothing.
            to: the kind of the other side, for the log ("topic", "qdrant"); never what a sender wrote.

        Raises:
            RecordTooLargeForBroker: as `write` raised it; the caller may try something smaller.
            GaveUp: another refusal for good, or too many tries. Let it pass: egress dead-letters the
                record in the first case and releases it in the second (it is delivered again).
        """
        ...


class Destination(ABC):
    """Where the results of a route go. `actors.publish` holds the one of request/reply routes.

    Egress calls `deliver` for each request that ended, from up to `max_concurrent` tasks at once, and
    settles the request's deliveries after `deliver` has returned: whatever it was given is durable
    then. Cancelled at any await, it may be called again with the same request, after a restart too,
    so writes have to be idempotent. On a route with `order = "key"` results of one key come one after
    the other, in the order of their records, the next one only after `deliver` of the one before has
    returned; a record that was released comes again later, behind newer ones, so a destination where
    that matters compares versions. Derive from this class to inherit the steps that do nothing.
    """

    max_concurrent: int | None = None
    """Calls of `deliver` at once; None: the setting `publish.max_concurrent`."""

    async def open(self, models: Mapping[str, ModelInfo]) -> None:
        """Called once, when all models are loaded and before any record is taken: connect, create or
        check what is there against the models. Raises `ConnectionError` or `ValueError` with a
        one-line remedy; the service does not start then."""

    async def run(self) -> None:
        """The destination's own loop (batches that leave by time, say), a supervised task from
        after `open` until it is cancelled after the drain. May return at once."""

    @abstractmethod
    def address(self, request: AnyRequest) -> str:
        """The name of the place where this request's result goes (a reply topic, a collection).

        Raises `ForbiddenDestination` when the request names one that it must not.
        """

    @abstractmethod
    def address_of_failure(
        self, delivery: Delivery, error: EmbedstreamError, request: AnyRequest | None
    ) -> str | None:
        """Where the sender of a record that cannot enter is told so; None: nobody can be told.

        `request` is None when the record could not be decoded. With None the record is released
        when the error is retryable, and dead-lettered when not.
        """

    def answered(self, key: Key) -> Answer | None:
        """What it has written for a twin of this request a moment ago, and can write again as it is.

        It then gets the request back in `deliver`, with that answer and without outcomes.
        """
        return None

    @abstractmethod
    async def deliver(
        self, finished: Finished, info: ModelInfo, retry: Retry
    ) -> Sequence[EmbedstreamError]:
        """Make one result durable; return when the other side has confirmed it.

        Every write goes through `retry`. A request that failed comes here as well: either its
        sender is told here, or the error is returned.

        Returns:
            What could not be delivered and never will be, one error per item with `items` set (the
            store refused a point, the item has no vector); empty when all is told or stored. A
            record with any retryable error among them is released and comes again whole; else it is
            dead-lettered with these errors, once, and settled: its other items stay delivered.
        """

    takes_lists: bool = False
    """Does `deliver_all` deliver anything? Read once, when the graph is built."""

    async def deliver_all(
        self, finished: Sequence[tuple[Finished, ModelInfo]], done: Callable[[int], None]
    ) -> Collection[int]:
        """Try to make each of these results durable, once and together: many cost less together.

        `done(number)` is to be called when that result is durable and nothing of it is undelivered. All
        for which it was not called when this returns or raises are given to `deliver`, one by one, which
        may write them again. Only on routes without an order and without transactions.

        Returns:
            The numbers of those that were written and not taken: that counts as a try.
        """
        return ()

    @abstractmethod
    async def refuse(self, refusal: Refusal, retry: Retry) -> None:
        """Tell the sender of a record that cannot enter. Only called when `address_of_failure` named
        a place."""

    def problem(self) -> str | None:
        """Why writing is not possible now, one line for `/ready`; None while it is, or is not known."""
        return None

    async def aclose(self) -> None:
        """Disconnect, in bounded time. Called once, after the drain."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where work comes from, which model, where results go.

    sink: of the source's own transport; dead letters go there.
    models: task -> the model used when the request names none. dimensions: size of dense vectors of embed
        requests that name neither a size nor a model.
    order: which results leave in the order of their records: those of one key, of one partition, or
        none. On an ordered route a request is never answered with its twin in flight, and what its
        destination does not take now holds up its own key until it does.
    transactions: where what is published and what is settled are one; None: first the one, then the
        other.
    """

    name: str
    lane: Lane
    source: Source
    decoder: Decoder
    destination: Destination
    sink: Sink
    models: Mapping[Task, str]
    max_attempts: int = 5
    order: Order = "none"
    transactions: Transactions | None = None
    dimensions: int | None = None

    def completed(self, request: AnyRequest) -> AnyRequest:
        """The request with what the route says where it says nothing itself."""
        if self.dimensions is None or not isinstance(request, EmbedRequest):
            return request
        own = request.dimensions is not None or request.model is not None
        if own or tuple(request.outputs) not in ((), ("dense",)):
            return request
        return msgspec.structs.replace(request, dimensions=self.dimensions)

    def order_key(self, delivery: Delivery, decoded: Decoded | None = None) -> str | None:
        """What the result of this record must not overtake; None: nothing."""
        if self.order == "none":
            return None
        if self.order == "key":
            named = None if decoded is None else decoded.order_key
            return delivery.key if named is None else named
        origin = delivery.origin
        return f"{origin.get('topic', origin.get('stream'))}-{origin.get('partition')}"

    def resolve_model(self, request: AnyRequest, known: Mapping[str, ModelInfo]) -> str:
        """The name of the model that answers `request`. Raises `UnknownModel`."""
        name = request.model if request.model is not None else self.models.get(request.task)
        if name is None:
            raise UnknownModel(
                f"no model is configured for task {request.task!r} on this route; "
                f"name one of: {', '.join(sorted(known)) or 'none loaded'}",
                path="$.model",
            )
        if name not in known:
            raise UnknownModel(
                f"no loaded model has that name; known: {', '.join(sorted(known))}",
                path="$.model",
            )
        return name

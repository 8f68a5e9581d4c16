"""What the stations hand to each other, and who sends what to whom.

    Route                    built by `pipeline.app`, read by every station
    InFlight                 ingress -> tokenizer: one admitted request, alive until it is settled
    Entry                    tokenizer -> coalescer: one encoded item of an in-flight request
    Outgoing                 ingress | egress bookkeeping -> publisher: one reply or dead letter

What must stay true: an `InFlight` collects exactly one outcome per item; whoever completes the last
one hands the request to egress, once; after that the object is `closed` and later outcomes are
ignored (an expired request whose items still run).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.ports import Delivery, Sink, Source
from gpu.batch import EncodedItem, ItemOutcome, ModelInfo
from schemas.errors import ContentType, EmbedstreamError, UnknownModel
from schemas.headers import DeadLetterKind
from schemas.requests import AnyRequest, Lane, Limits, Task


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where work comes from, which model, where results go.

    `models` maps a task to the model used when the request names none.
    """

    name: str
    lane: Lane
    source: Source
    sink: Sink
    models: Mapping[Task, str]
    limits: Limits = field(default_factory=Limits)
    max_attempts: int = 5

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


@dataclass(slots=True, eq=False)
class InFlight:
    """One admitted request: its deliveries, its outcomes, what was charged for it.

    Times are `Clock.monotonic()` seconds.
    """

    request: AnyRequest
    route: Route
    model: str
    lane: Lane
    destination: str
    admitted_at: float
    cost_bytes: int
    deliveries: list[Delivery]
    join_key: tuple[str, str, str, bytes]
    outcomes: list[ItemOutcome | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    prompt: str | None = None
    labels: tuple[str, ...] = ()
    failure: EmbedstreamError | None = None
    closed: bool = False
    charged_tokens: int = 0
    redelivered: bool = False
    n_open: int = 0
    first_forward_at: float | None = None
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        n = self.request.n_items
        self.outcomes = [None] * n
        self.tokens = [0] * n
        self.truncated = [False] * n
        self.n_open = n
        self.redelivered = any(delivery.redelivered for delivery in self.deliveries)

    @property
    def suspect(self) -> bool:
        """Was it in a step that did not come back? It is computed in nobody's company then."""
        return self.redelivered and any(d.redelivered and d.attempt > 1 for d in self.deliveries)

    def join(self, delivery: Delivery) -> None:
        """Answer this delivery too: the same request, come again."""
        self.deliveries.append(delivery)
        self.redelivered = self.redelivered or delivery.redelivered

    def complete(self, index: int, outcome: ItemOutcome) -> bool:
        """Note one item's outcome; true exactly once, when it was the last open one."""
        if self.closed or self.outcomes[index] is not None:
            return False
        self.outcomes[index] = outcome
        self.n_open -= 1
        if self.n_open == 0:
            self.closed = True
            return True
        return False

    def fail(self, error: EmbedstreamError) -> bool:
        """Fail the request as a whole; true unless it had already ended."""
        if self.closed:
            return False
        self.failure = error
        self.closed = True
        return True

    def expired(self, epoch_ms: int) -> bool:
        """Has the sender's deadline passed?"""
        return self.request.deadline_ms is not None and epoch_ms >= self.request.deadline_ms


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One encoded item on its way into a batch."""

    item: EncodedItem
    owner: InFlight
    index: int
    enqueued_at: float

    @property
    def n_tokens(self) -> int:
        return len(self.item.input_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """Records to publish in order, and the deliveries to settle when all are durable.

    `in_flight` is set for admitted requests, whose budgets are refunded afterwards.
    """

    route: Route
    deliveries: list[Delivery]
    in_flight: InFlight | None
    request_id: str
    outcome: str  # "ok", "partial" or an error code: the metric's label
    destination: str | None = None  # None: nothing to reply, only the dead letter
    failure: EmbedstreamError | None = None
    content_type: ContentType = "application/msgpack"
    metadata: Mapping[str, object] | None = None
    traceparent: str | None = None
    dead_letter: EmbedstreamError | None = None
    dead_letter_kind: DeadLetterKind = "failed"

"""What the stations hand to each other, and who sends what to whom.

    InFlight                 ingress -> tokenizer: one admitted request, alive until it is settled
    Entry                    tokenizer -> coalescer: one encoded item of an in-flight request
    Outgoing                 ingress | egress bookkeeping -> publisher: what leaves, and what to settle

What must stay true: an `InFlight` collects exactly one outcome per item; whoever completes the last
one hands the request to egress, once; after that the object is `closed` and later outcomes are
ignored (an expired request whose items still run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from actors.answers import Answer, Key
from actors.ordering import Ticket
from actors.ports import Delivery
from actors.route import Refusal, Route
from gpu.batch import EncodedItem, ItemOutcome
from schemas.errors import EmbedstreamError
from schemas.headers import DeadLetterKind
from schemas.requests import AnyRequest, Lane

_MADE: Any = ()  # by `InFlight` itself; a default of [] would be copied for nothing


class InFlight(msgspec.Struct, eq=False):
    """One admitted request: its deliveries, its outcomes, what was charged for it.

    Its destination reads it as `actors.route.Finished`. Times are `Clock.monotonic()` seconds.
    """

    request: AnyRequest
    route: Route
    model: str
    lane: Lane
    address: str
    admitted_at: float
    cost_bytes: int
    deliveries: list[Delivery]
    join_key: Key
    payload: object = None
    answer: Answer | None = None
    ticket: Ticket[Outgoing] | None = None
    outcomes: list[ItemOutcome | None] = _MADE  # one for each item, as are
    tokens: list[int] = _MADE
    truncated: list[bool] = _MADE
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
        n = self.n_open = self.request.n_items
        self.outcomes = [None] * n
        self.tokens = [0] * n
        self.truncated = [False] * n
        for delivery in self.deliveries:
            if delivery.redelivered:
                self.redelivered = True

    @property
    def order_key(self) -> str | None:
        """What its result stands in line by, on an ordered route."""
        return None if self.ticket is None else self.ticket.key

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
        if self.n_open:
            return False
        self.closed = True
        return True

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


class Entry(msgspec.Struct, eq=False, gc=False):
    """One encoded item on its way into a batch. Never changed.

    n_tokens: of the item, its cost everywhere. key: `actors.result_cache.key_of`, where results are shared.
    """

    item: EncodedItem
    owner: InFlight
    index: int
    enqueued_at: float
    n_tokens: int
    key: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What leaves, and the deliveries to settle when all of it is durable.

    in_flight: an admitted request, whose budgets are refunded afterwards. refusal: the answer to a
    record that was not admitted. Neither: only the dead letter. outcome: "ok", "partial" or an error
    code, the metric's label. ticket: the place in its line, on an ordered route. tried: with a list,
    which did not deliver it.
    """

    route: Route
    deliveries: list[Delivery]
    request_id: str
    outcome: str
    in_flight: InFlight | None = None
    refusal: Refusal | None = None
    dead_letter: EmbedstreamError | None = None
    dead_letter_kind: DeadLetterKind = "failed"
    ticket: Ticket[Outgoing] | None = None
    tried: bool = False

"""Deciding whether a request may enter: accept, wait or reject. Pure.

Who calls it: ingress asks `Admission.decide` for every decoded request and refunds through egress.
What must stay true: what `charge` adds, `refund` takes away, exactly once; counts are never
negative; one rule for single items and lists; `wait` only for lanes that may wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from schemas.errors import EmbedstreamError, Expired, Overloaded
from schemas.requests import AnyRequest, Lane

FullPolicy = Literal["wait", "reject"]


@dataclass(frozen=True, slots=True)
class LaneBudget:
    """Bounds on what one lane holds in flight, and what happens when it is full."""

    max_requests: int = 4096
    max_tokens: int = 2_000_000
    max_bytes: int = 256 * 1024 * 1024
    full_policy: FullPolicy = "wait"


@dataclass(slots=True)
class LaneUse:
    """What a lane holds now."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Accept:
    """Charge it and go on."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Pause the source until something is refunded; `reason` names the full budget."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer now with this failure."""

    error: EmbedstreamError


Decision = Accept | Wait | Reject
_ACCEPT = Accept()


@dataclass(slots=True)
class Admission:
    """Budgets of both lanes."""

    budgets: dict[Lane, LaneBudget]
    use: dict[Lane, LaneUse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lane in self.budgets:
            self.use.setdefault(lane, LaneUse())

    def decide(
        self, request: AnyRequest, lane: Lane, cost_bytes: int, *, epoch_ms: int
    ) -> Decision:
        """Accept, wait or reject. A request larger than a whole budget passes when the lane is empty."""
        if request.deadline_ms is not None and epoch_ms >= request.deadline_ms:
            return Reject(
                Expired(
                    "deadline_ms had passed when the request was received",
                    limit=request.deadline_ms,
                    given=epoch_ms,
                )
            )
        full = self.full_reason(lane, cost_bytes)
        if full is None:
            return _ACCEPT
        if self.budgets[lane].full_policy == "wait":
            return Wait(full)
        return Reject(Overloaded(f"the {lane} lane is full ({full}); try again later"))

    def full_reason(self, lane: Lane, cost_bytes: int) -> str | None:
        """The name of the budget that has no room for this much more, or None.

        Tokens are known only after encoding, so the token budget closes the door behind the
        request that filled it.
        """
        budget, use = self.budgets[lane], self.use[lane]
        if use.requests == 0:
            return None
        if use.requests + 1 > budget.max_requests:
            return "max_in_flight_requests"
        if use.tokens >= budget.max_tokens:
            return "max_in_flight_tokens"
        if use.bytes + cost_bytes > budget.max_bytes:
            return "max_in_flight_bytes"
        return None

    def charge(self, lane: Lane, cost_bytes: int) -> None:
        """Note that a request entered."""
        use = self.use[lane]
        use.requests += 1
        use.bytes += cost_bytes

    def charge_tokens(self, lane: Lane, tokens: int) -> None:
        """Note what encoding made of a request."""
        self.use[lane].tokens += tokens

    def refund(self, lane: Lane, cost_bytes: int, tokens: int) -> None:
        """Note that a request left. Raises `AssertionError` when more leaves than entered: a bug."""
        use = self.use[lane]
        use.requests -= 1
        use.bytes -= cost_bytes
        use.tokens -= tokens
        assert use.requests >= 0 and use.tokens >= 0 and use.bytes >= 0, (
            "refunded twice; this is a bug"
        )

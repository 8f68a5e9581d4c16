"""Egress alone, on a sink that tests own: what no broker takes, and what must not repeat for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from actors.admission import Admission, LaneBudget
from actors.decoder import WireDecoder
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.messages import Outgoing
from actors.ports import RecordTooLargeForBroker, SystemClock
from actors.publish import PublishPolicy, ReplyDestination
from actors.route import Refusal, Route
from actors.supervisor import Supervisor
from schemas.errors import Internal, UndecodableRecord
from schemas.requests import LANES, Limits
from tests.support.fakes import FakeDelivery, RecordingMetrics


@dataclass(eq=False)
class StrictSink:
    """Refuses records above `limit_bytes`; says how much it takes only when `tells`."""

    limit_bytes: int = 4096
    tells: bool = True
    claimed_bytes: int | None = None
    max_record_bytes: int | None = None
    dead_letter_destination: str = "dead"
    taken: list[tuple[str, bytes, Mapping[str, bytes]]] = field(default_factory=list)

    def default_destination(self, request_id: str) -> str:
        return "replies"

    def check_destination(self, destination: str) -> str | None:
        return None

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        given = len(key) + len(body) + sum(len(n) + len(v) for n, v in headers.items())
        if given > self.limit_bytes:
            limit = (self.claimed_bytes or self.limit_bytes) if self.tells else None
            raise RecordTooLargeForBroker("too large", limit_bytes=limit, given_bytes=given)
        self.taken.append((destination, body, headers))

    async def aclose(self) -> None: ...


def route_to(sink: StrictSink) -> Route:
    return Route(
        "r",
        "bulk",
        source=None,  # type: ignore[arg-type]
        decoder=WireDecoder(Limits()),
        destination=ReplyDestination(sink, clock=SystemClock()),
        sink=sink,
        models={},
    )


def outgoing(sink: StrictSink, delivery: FakeDelivery) -> Outgoing:
    return Outgoing(
        route=route_to(sink),
        deliveries=[delivery],
        request_id="id-1",
        outcome="internal",
        dead_letter=UndecodableRecord("no record"),
        dead_letter_kind="unprocessable",
    )


@asynccontextmanager
async def running(sink: StrictSink) -> AsyncIterator[Egress]:
    clock, metrics = SystemClock(), RecordingMetrics()
    table = InFlightTable(Admission({lane: LaneBudget() for lane in LANES}))
    egress = Egress(table, {}, policy=PublishPolicy(), max_waiting=16, clock=clock, metrics=metrics)
    async with Supervisor(clock=clock, metrics=metrics) as supervisor:
        supervisor.start("publisher", lambda: egress.run(route_to(sink)))
        yield egress
        await egress.wait_quiet()
    egress.close()


async def test_a_dead_letter_with_large_headers_is_written_without_them() -> None:
    """E07: headers above the limit: our own and the body's beginning pass; it is settled."""
    sink = StrictSink()
    delivery = FakeDelivery(
        body=b"x" * 100,
        headers={"embedstream-huge": b"h" * 9000, "tenant": b"a", "other": b"o" * 5000},
    )
    async with running(sink) as egress:
        await egress.refuse(outgoing(sink, delivery))
    assert delivery.outcome == "settled"
    [(destination, body, headers)] = sink.taken
    assert destination == "dead" and body == b"x" * 100
    assert headers["tenant"] == b"a" and "embedstream-huge" not in headers
    assert headers["embedstream-error-code"] == b"invalid_request"


async def test_a_dead_letter_fits_a_limit_that_is_below_the_one_told() -> None:
    """E07: a topic's own limit is below the client's: the body is cut until it fits."""
    for sink in (StrictSink(claimed_bytes=1_000_000), StrictSink(tells=False)):
        delivery = FakeDelivery(body=b"x" * 100_000)
        async with running(sink) as egress:
            await egress.refuse(outgoing(sink, delivery))
        assert delivery.outcome == "settled"
        [(_, body, headers)] = sink.taken
        assert body and headers["embedstream-original-bytes"] == b"100000"


async def test_a_reply_that_no_record_holds_ends_in_a_dead_letter() -> None:
    """E07: not even the failure fits the destination: dead-lettered, not released for ever."""

    class Narrow(StrictSink):
        async def publish(
            self,
            destination: str,
            key: str,
            body: bytes,
            headers: Mapping[str, bytes],
            *,
            order_key: str | None = None,
        ) -> None:
            self.limit_bytes = 10 if destination == "replies" else 4096
            await super().publish(destination, key, body, headers)

    sink, delivery = Narrow(), FakeDelivery(body=b"x")
    async with running(sink) as egress:
        await egress.refuse(
            Outgoing(
                route=route_to(sink),
                deliveries=[delivery],
                request_id="id-1",
                outcome="internal",
                refusal=Refusal("id-1", Internal("some reason"), "replies"),
            )
        )
    assert delivery.outcome == "settled"
    assert [destination for destination, _, _ in sink.taken] == ["dead"]

"""Replies that leave in lists: one that cannot is tried alone, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.admission import Admission, LaneBudget
from actors.decoder import WireDecoder
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.messages import InFlight
from actors.outbox import LIST_ITEMS, LIST_REQUESTS, leaves_in_lists
from actors.ports import PublishError, Record, SystemClock, Told
from actors.publish import PublishPolicy, ReplyDestination
from actors.route import Order, Route
from actors.supervisor import Supervisor
from gpu.batch import ItemResult
from schemas.codec import decode_reply
from schemas.errors import Internal
from schemas.requests import LANES, Limits
from tests.support.fakes import FakeDelivery, FakeRunner, RecordingMetrics, embed

INFO = FakeRunner().info
LATER = PublishError("busy", retryable=True)


@dataclass(eq=False)
class Lists:
    """Takes lists; `refuse` names the keys that only pass alone, `hang` those that are never told."""

    refuse: frozenset[str] = frozenset()
    hang: frozenset[str] = frozenset()
    explode: bool = False
    max_record_bytes: int | None = None
    dead_letter_destination: str = "dead"
    lists: list[list[str]] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    bodies: dict[str, list[bytes]] = field(default_factory=dict)

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
        self.alone.append(key)
        self.bodies.setdefault(key, []).append(body)

    async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
        self.lists.append([record.key for record in records])
        if self.explode:
            raise RuntimeError("a bug")
        for number, record in enumerate(records):
            if record.key in self.hang:
                continue
            if record.key in self.refuse:
                tell(number, LATER)
            else:
                self.bodies.setdefault(record.key, []).append(record.body)
                tell(number, None)
        if any(record.key in self.hang for record in records):
            await asyncio.Event().wait()

    async def aclose(self) -> None: ...


def route_to(sink: Lists, order: Order = "none") -> Route:
    return Route(
        "r",
        "bulk",
        source=None,  # type: ignore[arg-type]
        decoder=WireDecoder(Limits()),
        destination=ReplyDestination(sink, clock=SystemClock()),
        sink=sink,
        models={},
        order=order,
    )


@dataclass(eq=False)
class Bench:
    egress: Egress
    table: InFlightTable
    metrics: RecordingMetrics
    admission: Admission
    route: Route
    deliveries: dict[str, FakeDelivery] = field(default_factory=dict)

    def admit(self, name: str, *texts: str) -> InFlight:
        delivery = self.deliveries[name] = FakeDelivery(body=b"x")
        in_flight = InFlight(
            request=embed(*(texts or ("a text",)), request_id=name),
            route=self.route, model="fake", lane="bulk", address="replies", admitted_at=0.0,
            cost_bytes=1, deliveries=[delivery], join_key=(name, "r", "replies", b""),
        )  # fmt: skip
        self.table.add(in_flight)
        return in_flight

    def end(self, in_flight: InFlight) -> None:
        for index in range(in_flight.request.n_items):
            vector = np.full(4, index, np.float32)
            self.egress.complete(in_flight, index, ItemResult(dense=vector))

    def outcomes(self) -> dict[str, str | None]:
        return {name: delivery.outcome for name, delivery in self.deliveries.items()}


@asynccontextmanager
async def bench(sink: Lists, *, publishers: int = 2) -> AsyncIterator[Bench]:
    clock, metrics = SystemClock(), RecordingMetrics()
    admission = Admission({lane: LaneBudget() for lane in LANES})
    table = InFlightTable(admission)
    egress = Egress(
        table,
        {"fake": INFO},
        policy=PublishPolicy(),
        max_waiting=4096,
        clock=clock,
        metrics=metrics,
    )
    route = route_to(sink)
    async with asyncio.timeout(20), Supervisor(clock=clock, metrics=metrics) as supervisor:
        supervisor.start("alone", lambda: egress.run(route))
        for number in range(publishers):
            supervisor.start(f"lists.{number}", lambda: egress.run_lists(route))
        yield Bench(egress, table, metrics, admission, route)
    egress.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_what_has_ended_leaves_together_and_is_counted_as_if_alone() -> None:
    sink = Lists()
    async with bench(sink) as it:
        for name in "abc":
            it.end(it.admit(name, "one", "two"))
        await it.egress.wait_quiet()
        assert sink.lists == [["a", "b", "c"]] and not sink.alone
        assert set(it.outcomes().values()) == {"settled"}
        await until(lambda: it.metrics.counts.get("requests_total") == 3)
        assert it.metrics.counts["items_total"] == 6
        assert len(it.metrics.observed["request_seconds"]) == 3
        assert len(it.metrics.observed["publish_seconds"]) == 3
        assert len(it.table) == 0 and it.admission.use["bulk"].requests == 0
    for name in "abc":
        reply = decode_reply(sink.bodies[name][0])
        assert reply.id == name and len(reply.items) == 2  # type: ignore[union-attr]


async def test_what_the_list_does_not_take_is_tried_alone_and_answered_once() -> None:
    sink = Lists(refuse=frozenset("b"))
    async with bench(sink) as it:
        for name in "abc":
            it.end(it.admit(name))
        await it.egress.wait_quiet()
        assert sink.alone == ["b"]
        assert it.metrics.counts["publish_retries_total"] == 1
        assert set(it.outcomes().values()) == {"settled"}
    assert {name: len(bodies) for name, bodies in sink.bodies.items()} == {"a": 1, "b": 1, "c": 1}


async def test_neighbours_of_one_that_hangs_are_settled_at_once() -> None:
    """No sender holds up another: not even its budget stays taken."""
    sink = Lists(hang=frozenset("b"))
    async with bench(sink) as it:
        for name in "abc":
            it.end(it.admit(name))
        await until(lambda: it.outcomes() == {"a": "settled", "b": None, "c": "settled"})
        assert it.admission.use["bulk"].requests == 1
        it.end(it.admit("d"))
        await until(lambda: it.deliveries["d"].outcome == "settled")
    assert it.outcomes() | {"b": "released: reply not published"} == it.outcomes()
    assert len(it.table) == 0 and it.admission.use["bulk"].requests == 0


@pytest.mark.parametrize("how", ["explodes", "refuses"])
async def test_a_list_that_fails_as_a_whole_loses_nothing(how: str) -> None:
    names = [f"n{i}" for i in range(10)]
    sink = Lists(explode=how == "explodes", refuse=frozenset(names if how == "refuses" else ()))
    async with bench(sink) as it:
        for name in names:
            it.end(it.admit(name))
        await it.egress.wait_quiet()
        assert sorted(sink.alone) == sorted(names)
        assert set(it.outcomes().values()) == {"settled"}


async def test_lists_are_bounded_in_requests_and_in_items() -> None:
    sink = Lists()
    async with bench(sink, publishers=1) as it:
        small = [it.admit(f"s{i}") for i in range(LIST_REQUESTS + 5)]
        large = [it.admit(f"l{i}", *["text"] * 200) for i in range(5)]
        for in_flight in [*small, *large]:
            it.end(in_flight)
        await it.egress.wait_quiet()
    assert len(sink.lists[0]) == LIST_REQUESTS
    assert (
        max(len([n for n in names if n[0] == "l"]) for names in sink.lists) * 200
        <= LIST_ITEMS + 200
    )
    assert len(sink.bodies) == LIST_REQUESTS + 10


async def test_a_failed_request_and_a_large_reply_get_their_answers_too() -> None:
    """A reply of very many numbers is encoded beside the event loop, and so comes alone."""
    sink = Lists()
    async with bench(sink) as it:
        it.egress.fail(it.admit("failed"), Internal("some reason"))
        large = it.admit("large", *["text"] * 40)
        for index in range(40):
            it.egress.complete(large, index, ItemResult(dense=np.ones(1000, np.float32)))
        await it.egress.wait_quiet()
        assert set(it.outcomes().values()) == {"settled"}
    assert decode_reply(sink.bodies["failed"][0]).error.code == "internal"  # type: ignore[union-attr]
    assert len(sink.bodies["large"]) == 1


def test_what_stands_in_a_line_or_has_one_try_does_not_leave_in_lists() -> None:
    assert leaves_in_lists(route_to(Lists()), 2)
    assert not leaves_in_lists(route_to(Lists()), 1)
    assert not leaves_in_lists(route_to(Lists(), "key"), 2)
    assert not leaves_in_lists(route_to(Lists(), "partition"), 2)

"""Ingress of a route whose one lane is full: who passes, who waits, and what becomes of those that wait."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.admission import Admission, LaneBudget
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.ingress import Ingress
from actors.messages import InFlight
from actors.parking import MAX_RECORDS, Parked, Parking
from actors.ports import SourceClosed, SystemClock
from actors.publish import PublishPolicy
from actors.route import Decoded, Decoder, Destination, Order, Refusal, Route
from actors.supervisor import Supervisor
from gpu.batch import ModelInfo
from schemas.requests import LANES, CancelRequest, Lane
from tests.support.fakes import FakeDelivery, FakeRunner, RecordingMetrics, embed

INFO = FakeRunner().info


class Words(Decoder):
    """A record is `LANE ID [deadline_ms]` or `cancel ID`."""

    async def decode(self, delivery: FakeDelivery) -> Decoded:  # type: ignore[override]
        lane, request_id, *deadline = (delivery.body or b"").decode().split()
        if lane == "cancel":
            return Decoded(CancelRequest(id=request_id))
        deadline_ms = int(deadline[0]) if deadline else None
        return Decoded(embed("text", request_id=request_id, priority=lane, deadline_ms=deadline_ms))


class Told(Destination):
    """Remembers who was told what."""

    def __init__(self) -> None:
        self.codes: dict[str, str] = {}

    def address(self, request: object) -> str:
        return "place"

    def address_of_failure(self, *_: object) -> str:
        return "place"

    async def deliver(self, *_: object) -> tuple[()]:
        return ()

    async def refuse(self, refusal: Refusal, retry: object) -> None:
        assert refusal.id not in self.codes, "told twice"
        self.codes[refusal.id] = refusal.error.code


class Tokenizer:
    """Takes as many requests of a lane as it has room for, until a test ends them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[InFlight] = []
        self.open: list[InFlight] = []
        self.changed = asyncio.Event()

    def has_room(self, lane: Lane) -> bool:
        return sum(one.lane == lane for one in self.open) < self.room

    async def put(self, in_flight: InFlight) -> None:
        while not self.has_room(in_flight.lane):
            self.changed.clear()
            await self.changed.wait()
        self.put_nowait(in_flight)

    def put_nowait(self, in_flight: InFlight) -> None:
        self.taken.append(in_flight)
        self.open.append(in_flight)

    def ids(self, lane: Lane) -> list[str]:
        return [one.request.id for one in self.taken if one.lane == lane]


class Tap:
    """A source that hands out what a test gives it."""

    def __init__(self) -> None:
        self.waiting: deque[FakeDelivery] = deque()
        self.some = asyncio.Event()
        self.closed = False
        self.paused = 0

    def give(self, *bodies: str) -> list[FakeDelivery]:
        given_ = [FakeDelivery(body=body.encode(), default_id=body) for body in bodies]
        self.waiting.extend(given_)
        self.some.set()
        return given_

    def close(self) -> None:
        self.closed = True
        self.some.set()

    async def receive(self) -> list[FakeDelivery]:
        while not self.waiting:
            if self.closed:
                raise SourceClosed
            self.some.clear()
            await self.some.wait()
        found = list(self.waiting)
        self.waiting.clear()
        return found

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        """Nothing to do."""


@dataclasses.dataclass
class Bench:
    tap: Tap
    tokenizer: Tokenizer
    table: InFlightTable
    told: Told
    ingress: Ingress
    metrics: RecordingMetrics

    def end(self, request_id: str) -> None:
        """Its answer is out."""
        [one] = [one for one in self.tokenizer.open if one.request.id == request_id]
        self.tokenizer.open.remove(one)
        self.tokenizer.changed.set()
        one.closed = True
        for delivery in one.deliveries:
            delivery.settle()
        self.table.remove(one)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0)

    async def all_ended(self, n: int) -> None:
        """End what comes until `n` have come and nothing waits."""
        while len(self.tokenizer.taken) < n or self.tokenizer.open:
            for one in list(self.tokenizer.open):
                self.end(one.request.id)
            await asyncio.sleep(0)


@asynccontextmanager
async def bench(
    *, requests: int = 2, room: int = 10**6, order: Order = "none"
) -> AsyncIterator[Bench]:
    clock, metrics = SystemClock(), RecordingMetrics()
    admission = Admission(dict.fromkeys(LANES, LaneBudget(max_requests=requests)))
    table = InFlightTable(admission)
    infos: dict[str, ModelInfo] = {"fake": INFO}
    egress = Egress(
        table, infos, policy=PublishPolicy(), max_waiting=999, clock=clock, metrics=metrics
    )
    tap, told, tokenizer = Tap(), Told(), Tokenizer(room)
    route = Route(
        "r", "bulk", source=tap, decoder=Words(), destination=told, sink=None,  # type: ignore[arg-type]
        models={"embed": "fake"}, order=order,
    )  # fmt: skip
    ingress = Ingress(
        route, admission=admission, table=table, tokenizers={"fake": tokenizer},  # type: ignore[dict-item]
        infos=infos, egress=egress, clock=clock, metrics=metrics,
    )  # fmt: skip
    async with Supervisor(clock=clock, metrics=metrics) as supervisor:
        supervisor.start("publisher", lambda: egress.run(route))
        supervisor.start("ingress", ingress.run)
        supervisor.start("bulk", lambda: ingress.run_parked("bulk"))
        supervisor.start("interactive", lambda: ingress.run_parked("interactive"))
        yield Bench(tap, tokenizer, table, told, ingress, metrics)
    egress.close()
    ingress.close()
    assert supervisor.fatal is None and not supervisor.restarts


@pytest.mark.parametrize("full", ["budget", "tokenizer"])
async def test_interactive_records_behind_bulk_ones_do_not_wait_for_them(full: str) -> None:
    """On one route; the bulk ones keep their order and are all answered."""
    bounds = {"requests": 2} if full == "budget" else {"requests": 999, "room": 2}
    async with bench(**bounds) as it:
        bulk = [f"b{n}" for n in range(20)]
        deliveries = it.tap.give(*(f"bulk {one}" for one in bulk), "interactive question")
        await it.until(lambda: it.tokenizer.ids("interactive") == ["question"])
        assert it.tokenizer.ids("bulk") == bulk[:2] and not it.tap.paused
        it.end("question")
        await it.all_ended(21)
        assert it.tokenizer.ids("bulk") == bulk
        it.tap.close()
        await it.ingress.closed.wait()
    assert [one.outcome for one in deliveries] == ["settled"] * 21


async def test_what_waits_aside_is_bounded_and_pauses_the_source_then() -> None:
    async with bench() as it:
        n = MAX_RECORDS + 2  # two are in flight
        it.tap.give(*(f"bulk b{i}" for i in range(n + 1)), "interactive question")
        await it.until(lambda: it.tap.paused == 1)
        assert it.tokenizer.ids("interactive") == []
        it.end("b0")
        await it.until(lambda: it.tokenizer.ids("interactive") == ["question"])
        await it.all_ended(n + 2)
        assert it.tokenizer.ids("bulk") == [f"b{i}" for i in range(n + 1)]


@pytest.mark.parametrize("order", ["key", "partition"])
async def test_nobody_passes_on_an_ordered_route(order: Order) -> None:
    async with bench(order=order) as it:
        it.tap.give(*(f"bulk b{n}" for n in range(5)), "interactive question")
        await it.until(lambda: it.tap.paused == 1)
        assert it.tokenizer.ids("interactive") == []
        await it.all_ended(6)


async def test_deadlines_cancels_and_twins_of_what_waits_aside() -> None:
    """G10: each is answered once, at its time, and nothing is computed for it."""
    async with bench() as it:
        soon = SystemClock().epoch_ms() + 200
        deliveries = it.tap.give(
            "bulk b0", "bulk b1", "bulk head", f"bulk late {soon}", "bulk gone", "bulk b2", "bulk b2",
            "cancel gone", "cancel unknown",
        )  # fmt: skip
        await it.until(lambda: "gone" in it.told.codes)
        deadline = asyncio.get_running_loop().time() + 20
        while "late" not in it.told.codes:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert it.told.codes == {"gone": "cancelled", "late": "expired"}
        await it.all_ended(4)
        assert it.tokenizer.ids("bulk") == ["b0", "b1", "head", "b2"]
        await it.until(lambda: all(one.outcome == "settled" for one in deliveries))
    assert it.metrics.counts["cancel_records_total"] == 2


async def test_what_its_source_takes_back_is_released() -> None:
    async with bench() as it:
        deliveries = it.tap.give(*(f"bulk b{n}" for n in range(5)))
        await it.until(lambda: len(it.tokenizer.open) == 2)
        deliveries[3].withdrawn = True
        while deliveries[3].outcome is None:
            await asyncio.sleep(0.01)
        assert deliveries[3].outcome == "released: withdrawn before it was admitted"
        await it.all_ended(4)
        assert it.tokenizer.ids("bulk") == ["b0", "b1", "b2", "b4"]


async def test_what_waits_aside_when_the_service_stops_is_released() -> None:
    """Nothing that was received is forgotten: what was not admitted comes again."""
    async with bench() as it:
        deliveries = it.tap.give(*(f"bulk b{n}" for n in range(300)))
        await it.until(lambda: it.tap.paused == 1)
    outcomes = [one.outcome for one in deliveries]
    assert outcomes == [None] * 2 + ["released: stopped before admission"] * 298


async def test_a_closed_source_is_exhausted_when_nothing_waits_aside() -> None:
    """A drain finishes what is held."""
    async with bench() as it:
        it.tap.give(*(f"bulk b{n}" for n in range(9)))
        it.tap.close()
        await it.until(lambda: len(it.tokenizer.open) == 2)
        assert not it.ingress.closed.is_set()
        await it.all_ended(9)
        await it.ingress.closed.wait()


@settings(deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 60)),
            st.tuples(st.just("leave"), st.integers(0, 20)),
        ),
        max_size=60,
    )
)
def test_a_parking_keeps_its_order_and_its_bounds(steps: list[tuple[str, int]]) -> None:
    parking = Parking(max_records=5, max_bytes=100)
    expected: list[Parked] = []
    for step, number in steps:
        if step == "add" and parking.has_room(number):
            one = Parked(parking, FakeDelivery(), None, None, number)  # type: ignore[arg-type]
            parking.add(one)
            expected.append(one)
        elif step == "leave" and expected:
            one = expected.pop(number % len(expected))
            one.leave()
            one.leave()
        assert list(parking) == expected and parking.head is (expected[0] if expected else None)
        assert len(parking) <= 5 and 0 <= parking.n_bytes <= 100
        assert parking.some.is_set() is bool(expected) is not parking.quiet.is_set()

"""A destination beside the reply: what egress and ingress promise to whoever implements one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from actors.admission import Admission, LaneBudget
from actors.egress import Egress
from actors.in_flight import InFlightTable
from actors.ingress import Ingress
from actors.messages import InFlight
from actors.ports import Delivery, PublishError, SourceClosed, SystemClock
from actors.publish import PublishPolicy
from actors.route import Decoded, Decoder, Destination, Finished, Order, Refusal, Retry, Route
from actors.supervisor import Supervisor
from gpu.batch import ItemResult, ModelInfo
from schemas.errors import EmbedstreamError, Internal, InvalidRequest, TooLong
from schemas.requests import LANES, AnyRequest, EmbedRequest, Text
from tests.support.fakes import FakeDelivery, FakeRunner, RecordingMetrics

INFO = FakeRunner().info


class Letters:
    """A sink that only ever sees dead letters."""

    max_record_bytes: int | None = None
    dead_letter_destination = "dead"

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, Mapping[str, bytes]]] = []

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        assert destination == "dead"
        self.taken.append((body, headers))


class Lines(Decoder):
    """A record is a document with one item per line; "" asks for nothing, "?" is no document."""

    def __init__(self) -> None:
        self.seen_ahead: list[int] = []

    async def look_ahead(self, deliveries: Sequence[Delivery]) -> None:
        self.seen_ahead.append(len(deliveries))

    async def decode(self, delivery: Delivery) -> Decoded | None:
        if delivery.body == b"":
            return None
        if delivery.body == b"?":
            raise InvalidRequest("not a document", path="$")
        lines = (delivery.body or b"").decode().splitlines()
        request = EmbedRequest(id=delivery.default_id, input=tuple(map(Text, lines)))
        return Decoded(request, payload=("document", delivery.key), order_key=delivery.key)


@dataclass(eq=False)
class Store(Destination):
    """Keeps what it is given. `faults` are raised one by one before a write passes."""

    faults: list[Exception] = field(default_factory=list)
    refused: list[EmbedstreamError] = field(default_factory=list)
    tell: bool = False
    written: list[tuple[str | None, object, int]] = field(default_factory=list)
    bodies: list[bytes | None] = field(default_factory=list)
    told: list[Refusal] = field(default_factory=list)

    def address(self, request: AnyRequest) -> str:
        return "collection"

    def address_of_failure(
        self, delivery: Delivery, error: EmbedstreamError, request: AnyRequest | None
    ) -> str | None:
        return "told" if self.tell else None

    async def deliver(
        self, finished: Finished, info: ModelInfo, retry: Retry
    ) -> Sequence[EmbedstreamError]:
        assert info is INFO
        if finished.failure is not None:
            return (finished.failure,)

        async def write() -> None:
            if self.faults:
                raise self.faults.pop(0)
            key = finished.deliveries[0].key
            self.bodies.append(finished.deliveries[0].body)
            self.written.append((key, finished.payload, len(finished.outcomes)))

        await retry(write, "store")
        return self.refused

    async def refuse(self, refusal: Refusal, retry: Retry) -> None:
        self.told.append(refusal)


class Tokenizers(dict[str, object]):
    """Stands for tokenizer, coalescer and dispatcher: requests wait here until a test ends them."""

    def __init__(self) -> None:
        super().__init__(fake=self)
        self.waiting: list[InFlight] = []

    def has_room(self, lane: str) -> bool:
        return True

    def put_nowait(self, in_flight: InFlight) -> None:
        self.waiting.append(in_flight)


class Given:
    """A source that hands out what it was given, once."""

    def __init__(self, deliveries: list[FakeDelivery]) -> None:
        self._left = [deliveries]

    async def receive(self) -> list[FakeDelivery]:
        if not self._left:
            raise SourceClosed
        return self._left.pop()


@dataclass(eq=False)
class Bench:
    """One route between a given source and a store."""

    store: Store
    letters: Letters
    decoder: Lines
    tokenizers: Tokenizers
    table: InFlightTable
    egress: Egress
    ingress: Ingress

    def end(self, number: int, failure: EmbedstreamError | None = None) -> None:
        """The n-th admitted request ends."""
        in_flight = self.tokenizers.waiting[number]
        if failure is not None:
            self.egress.fail(in_flight, failure)
            return
        for index in range(len(in_flight.outcomes)):
            self.egress.complete(in_flight, index, ItemResult(dense=np.ones(8, np.float32)))

    async def quiet(self) -> None:
        await self.table.wait_empty()
        await self.egress.wait_quiet()


@asynccontextmanager
async def bench(
    deliveries: list[FakeDelivery], store: Store, *, order: Order = "none", attempts: int = 3
) -> AsyncIterator[Bench]:
    clock, metrics = SystemClock(), RecordingMetrics()
    admission = Admission({lane: LaneBudget() for lane in LANES})
    table = InFlightTable(admission)
    policy = PublishPolicy(attempts=attempts, first_backoff_s=0.0001, max_backoff_s=0.001)
    egress = Egress(
        table, {"fake": INFO}, policy=policy, max_waiting=9, clock=clock, metrics=metrics
    )
    letters, tokenizers, decoder = Letters(), Tokenizers(), Lines()
    route = Route(
        "r",
        "bulk",
        source=Given(deliveries),  # type: ignore[arg-type]
        decoder=decoder,
        destination=store,
        sink=letters,  # type: ignore[arg-type]
        models={"embed": "fake"},
        order=order,
    )
    ingress = Ingress(
        route,
        admission=admission,
        table=table,
        tokenizers=tokenizers,  # type: ignore[arg-type]
        infos={"fake": INFO},
        egress=egress,
        clock=clock,
        metrics=metrics,
    )
    async with Supervisor(clock=clock, metrics=metrics) as supervisor:
        for number in range(3):
            supervisor.start(f"publisher.{number}", lambda: egress.run(route))
        await ingress.run()
        yield Bench(store, letters, decoder, tokenizers, table, egress, ingress)
    egress.close()
    ingress.close()


def document(body: bytes | None, key: str = "k", **given: object) -> FakeDelivery:
    number = given.pop("number", 0)
    return FakeDelivery(body=body, key=key, default_id=f"t-0-{number}", **given)  # type: ignore[arg-type]


async def test_a_document_is_settled_after_the_store_has_it_with_what_its_decoder_attached() -> (
    None
):
    deliveries = [document(b"one\ntwo"), document(b"", number=1)]
    async with bench(deliveries, Store()) as it:
        assert it.decoder.seen_ahead == [2]
        assert deliveries[0].outcome is None and deliveries[1].outcome == "settled"
        it.end(0)
        await it.quiet()
    assert it.store.written == [("k", ("document", "k"), 2)]
    assert deliveries[0].outcome == "settled" and not it.letters.taken


async def test_a_request_without_items_reaches_the_destination_without_a_model() -> None:
    """A delete, or a document that did not change: nothing to compute, something to write."""
    delivery = document(None)
    async with bench([delivery], Store()) as it:
        await it.quiet()
        assert not it.tokenizers.waiting
    assert it.store.written == [("k", ("document", "k"), 0)] and delivery.outcome == "settled"


async def test_a_write_is_tried_again_and_then_released() -> None:
    for faults, outcome in ((2, "settled"), (3, "released: reply not published")):
        delivery = document(b"one")
        store = Store([PublishError("busy", retryable=True, retry_after_s=0.001)] * faults)
        async with bench([delivery], store, attempts=3) as it:
            it.end(0)
            await it.quiet()
        assert delivery.outcome == outcome and not it.letters.taken


async def test_what_the_store_will_never_take_is_dead_lettered_once_and_settled() -> None:
    delivery = document(b"one\ntwo\nthree")
    store = Store(refused=[TooLong("too big", items=(0,)), TooLong("too big", items=(2,))])
    async with bench([delivery], store) as it:
        it.end(0)
        await it.quiet()
    [(body, headers)] = it.letters.taken
    assert body == delivery.body and headers["embedstream-error-code"] == b"too_long"
    assert headers["embedstream-error-message"] == b"too big (and 1 more)"
    assert delivery.outcome == "settled" and len(store.written) == 1


async def test_a_store_that_refuses_for_good_sends_the_record_to_the_dead_letters() -> None:
    delivery = document(b"one")
    async with bench([delivery], Store([PublishError("never", retryable=False)])) as it:
        it.end(0)
        await it.quiet()
    assert delivery.outcome == "settled" and len(it.letters.taken) == 1


async def test_a_document_that_failed_for_now_comes_again_and_one_that_failed_for_good_does_not() -> (
    None
):
    later, never = document(b"one"), document(b"two", number=1)
    async with bench([later, never], Store()) as it:
        it.end(0, Internal("a bug"))
        it.end(1, TooLong("too long"))
        await it.quiet()
    assert later.outcome == "released: reply not published" and never.outcome == "settled"
    assert [body for body, _ in it.letters.taken] == [b"two"] and not it.store.written


async def test_who_cannot_be_told_gets_a_dead_letter_and_who_can_is_told() -> None:
    for tell in (False, True):
        delivery = document(b"?")
        async with bench([delivery], Store(tell=tell)) as it:
            await it.quiet()
        assert delivery.outcome == "settled"
        assert [refusal.error.path for refusal in it.store.told] == (["$"] if tell else [])
        kinds = [headers["embedstream-kind"] for _, headers in it.letters.taken]
        assert kinds == ([] if tell else [b"unprocessable"])


@pytest.mark.parametrize("order", ["none", "key", "partition"])
async def test_results_of_one_key_are_written_in_the_order_of_their_records(order: Order) -> None:
    """Computed in any order; two versions of a document never swap, and no key waits for another."""
    n = 40
    origin = {"topic": "t", "partition": 0}
    deliveries = [document(b"v%d" % i, key=f"k{i % 4}", number=i, origin=origin) for i in range(n)]
    store = Store([PublishError("busy", retryable=True)] * 30)
    async with bench(deliveries, store, order=order, attempts=100) as it:
        for number in reversed(range(n)):
            it.end(number)
        await it.quiet()
    assert {delivery.outcome for delivery in deliveries} == {"settled"}
    assert sorted(store.bodies) == sorted(delivery.body for delivery in deliveries)
    if order != "none":
        for key in (0, 1, 2, 3) if order == "key" else [slice(None)]:
            sent = deliveries[key::4] if isinstance(key, int) else deliveries
            bodies = {delivery.body for delivery in sent}
            assert [b for b in store.bodies if b in bodies] == [d.body for d in sent]


async def test_an_ordered_key_is_never_overtaken_even_when_the_store_is_down_for_long() -> None:
    deliveries = [document(b"v%d" % i, key="k", number=i) for i in range(5)]
    store = Store([PublishError("down", retryable=True)] * 50)
    async with bench(deliveries, store, order="key", attempts=1) as it:
        for number in (3, 1, 4, 0, 2):
            it.end(number)
        await it.quiet()
    assert store.bodies == [b"v0", b"v1", b"v2", b"v3", b"v4"]
    assert {delivery.outcome for delivery in deliveries} == {"settled"}


async def test_two_hundred_versions_of_one_key_leave_in_order_however_they_were_computed() -> None:
    """Refused ones too: they stand in line like all others."""
    n = 200
    deliveries = [
        document(b"?" if i % 10 == 9 else b"v%d" % i, key="k", number=i) for i in range(n)
    ]
    store = Store([PublishError("busy", retryable=True)] * 20, tell=True)
    ends = list(range(n - n // 10))
    random.Random(7).shuffle(ends)
    async with bench(deliveries, store, order="key", attempts=1) as it:
        for number in ends:
            it.end(number)
        await it.quiet()
    assert store.bodies == [d.body for d in deliveries if d.body != b"?"]
    assert len(store.told) == n // 10
    assert {delivery.outcome for delivery in deliveries} == {"settled"}


async def test_what_was_given_away_meanwhile_is_not_published_behind_newer_results() -> None:
    """Its new owner answers it, and perhaps what follows it, before we come to it."""
    deliveries = [document(b"v%d" % i, key="k", number=i) for i in range(3)]
    async with bench(deliveries, Store(), order="key") as it:
        it.end(1)
        deliveries[0].held = deliveries[1].held = False
        it.end(0)
        it.end(2)
        await it.quiet()
    assert it.store.bodies == [b"v2"] and deliveries[2].outcome == "settled"


async def test_a_document_that_returns_to_an_earlier_text_is_no_twin_on_an_ordered_route() -> None:
    """v1, v2, v1: joined to the first, the last v1 would be lost and v2 would stay."""
    deliveries = [document(body, key="k") for body in (b"v1", b"v2", b"v1")]
    async with bench(deliveries, Store(), order="key") as it:
        assert len(it.tokenizers.waiting) == 3
        for number in (2, 1, 0):
            it.end(number)
        await it.quiet()
    assert len(it.store.written) == 3


async def test_what_waits_in_a_line_when_the_service_stops_is_released() -> None:
    deliveries = [document(b"v1"), document(b"?", number=1)]
    async with bench(deliveries, Store(), order="key") as it:
        await it.egress.wait_quiet()
    assert deliveries[1].outcome == "released: stopped before the reply was published"

"""One behaviour suite for every transport. A transport's test file supplies a `Harness`.

Who calls it: `test_inproc.py`, `test_kafka.py`, `test_redis_streams.py`, `test_redis_list.py` (the file source, which has
no broker behind it, has tests of its own).
What must stay true: nothing here knows which transport runs; waiting is always for an event with a
bound, never for time to pass (except where the absence of an event is what is proved).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import pytest

from actors.ports import (
    Deadline,
    Delivery,
    ListSink,
    NoMetrics,
    PublishError,
    Record,
    RecordTooLargeForBroker,
    Source,
    SourceClosed,
    SystemClock,
)
from pipeline.transports.options import Options
from pipeline.transports.registry import Transport, open_transport

WAIT_S = 20.0
QUIET_S = 0.3  # how long "nothing comes" is watched


class Harness(Protocol):
    """What the suite needs of a transport's broker.

    tombstones: a body may be None. headers: a record may have some.
    """

    tombstones: bool
    headers: bool
    bad_destinations: list[str]

    def options(self, **overrides: Any) -> Options:
        """Settings of one more member of the same group on the same stream or topic."""
        ...

    async def produce(
        self, body: bytes | None, headers: Mapping[str, bytes] | None = None, key: str | None = None
    ) -> None: ...

    def reply_destination(self) -> str:
        """A fresh destination that a request may name."""
        ...

    async def replies(self, destination: str, done: Callable[[list[bytes]], bool]) -> list[bytes]:
        """Bodies published there, read until `done` says that it is enough."""
        ...

    async def unsettled(self) -> int:
        """Records that the broker would still hand to somebody."""
        ...


@contextlib.asynccontextmanager
async def running(options: Options, metrics: Any = None) -> AsyncIterator[Transport]:
    """Opened, with its loop running; closed at the end."""
    transport = await open_transport(
        options, clock=SystemClock(), metrics=NoMetrics() if metrics is None else metrics
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(transport.source.run())
            try:
                yield transport
            finally:
                await transport.source.aclose()
    finally:
        await transport.sink.aclose()


async def collect(source: Source, count: int, *, settle: bool = True) -> list[Delivery]:
    """At least `count` deliveries."""
    found: list[Delivery] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            found += await source.receive()
    if settle:
        for delivery in found:
            delivery.settle()
    return found


async def nothing_comes(source: Source) -> bool:
    """True when `receive` stays silent for `QUIET_S`."""
    try:
        async with asyncio.timeout(QUIET_S):
            await source.receive()
    except TimeoutError:
        return True
    return False


async def flushed(source: Source) -> None:
    await source.flush(Deadline(WAIT_S))


class TransportSuite:
    """Inherit, and give a fixture `harness`."""

    async def test_receives_settles_and_forgets(self, harness: Harness) -> None:
        for i in range(50):
            await harness.produce(b"%d" % i, key=f"k{i}")
        async with running(harness.options()) as transport:
            got = await collect(transport.source, 50)
            assert sorted(int(d.body or b"") for d in got) == list(range(50))
            assert {d.attempt for d in got} == {1}
            assert len({d.default_id for d in got}) == 50
            await flushed(transport.source)
            assert await harness.unsettled() == 0
            assert transport.source.status().connected
        await harness.produce(b"marker")
        async with running(harness.options()) as transport:
            assert [d.body for d in await collect(transport.source, 1)] == [b"marker"]

    async def test_bodies_and_headers_arrive_as_sent(self, harness: Harness) -> None:
        """E14: empty is not None; header names are lower case, values untouched bytes."""
        bodies: list[bytes | None] = [b"", bytes(range(256)), b"x" * 200_000, "žluť".encode()]
        if harness.tombstones:
            bodies.append(None)
        for i, body in enumerate(bodies):
            await harness.produce(body, {"X-Number": b"%d" % i, "raw": b"\x00\xff"}, key=f"k{i}")
        async with running(harness.options()) as transport:
            got = await collect(transport.source, len(bodies))
            assert all("transport" in d.origin for d in got)
            if not harness.headers:
                assert Counter(d.body for d in got) == Counter(bodies)
                assert all(d.headers == {} for d in got)
                return
            assert {int(d.headers["x-number"]): d.body for d in got} == dict(enumerate(bodies))
            assert all(d.headers["raw"] == b"\x00\xff" for d in got)

    async def test_release_comes_again_with_higher_attempt(self, harness: Harness) -> None:
        """E07: a record that fails again and again does not stop its neighbours."""
        await harness.produce(b"poison", key="a")
        attempts: list[int] = []
        good: set[bytes | None] = set()
        async with running(harness.options()) as transport:
            while attempts != [1, 2, 3, 4] or len(good) < 3:
                for delivery in await collect(transport.source, 1, settle=False):
                    if delivery.body != b"poison":
                        good.add(delivery.body)
                        delivery.settle()
                        continue
                    attempts.append(delivery.attempt)
                    if delivery.attempt < 4:
                        await harness.produce(b"good%d" % delivery.attempt, key="b")
                        delivery.release("try again")
                    else:
                        delivery.settle()
            await flushed(transport.source)
            assert await harness.unsettled() == 0

    async def test_first_outcome_wins(self, harness: Harness) -> None:
        await harness.produce(b"a")
        async with running(harness.options()) as transport:
            (first,) = await collect(transport.source, 1, settle=False)
            first.release("later")
            first.settle()
            first.release("twice")
            (second,) = await collect(transport.source, 1, settle=False)
            second.settle()
            second.release("too late")
            second.settle()
            assert await nothing_comes(transport.source)
            await flushed(transport.source)
            assert await harness.unsettled() == 0

    async def test_restart_resumes_at_the_lowest_unsettled(self, harness: Harness) -> None:
        """E05: offset 1 is slow, the others are done; after a restart 1 comes again, 0 does not."""
        for i in range(6):
            await harness.produce(b"%d" % i, key="one-partition")
        async with running(harness.options()) as transport:
            got = await collect(transport.source, 6, settle=False)
            for delivery in got:
                if delivery.body != b"1":
                    delivery.settle()
            await flushed(transport.source)
        async with running(harness.options()) as transport:
            again = await collect(transport.source, 1)
            assert again[0].body == b"1"
            assert b"0" not in {d.body for d in again}
            await harness.produce(b"marker", key="one-partition")
            while b"marker" not in {d.body for d in again}:
                again += await collect(transport.source, 1)
            await flushed(transport.source)
            assert await harness.unsettled() == 0

    async def test_settle_of_a_closed_source_changes_nothing(self, harness: Harness) -> None:
        """E01: outcomes that come after the work was given to others are ignored."""
        await harness.produce(b"a")
        async with running(harness.options()) as transport:
            (late,) = await collect(transport.source, 1, settle=False)
        late.settle()
        late.release("late")
        async with running(harness.options()) as transport:
            (again,) = await collect(transport.source, 1)
            assert again.body == b"a"

    async def test_pause_holds_back_and_resume_goes_on(self, harness: Harness) -> None:
        """C10: back-pressure pauses intake; nothing is lost or answered with a refusal."""
        async with running(harness.options()) as transport:
            await harness.produce(b"before")
            await collect(transport.source, 1)
            transport.source.pause()
            transport.source.pause()
            for i in range(5):
                await harness.produce(b"%d" % i)
            assert await nothing_comes(transport.source)
            assert transport.source.status().connected
            transport.source.resume()
            got = await collect(transport.source, 5)
            assert sorted(d.body or b"" for d in got) == [b"%d" % i for i in range(5)]

    async def test_in_flight_is_bounded(self, harness: Harness) -> None:
        """E06: no more than the bound is handed out until something is settled."""
        for i in range(40):
            await harness.produce(b"%d" % i, key="one-partition")
        async with running(harness.options(max_in_flight=8)) as transport:
            held = await collect(transport.source, 8, settle=False)
            assert len(held) == 8
            assert await nothing_comes(transport.source)
            assert transport.source.status().in_flight == 8
            seen = len(held)
            while seen < 40:
                for delivery in held:
                    delivery.settle()
                held = await collect(transport.source, 1, settle=False)
                assert len(held) <= 8
                seen += len(held)
            for delivery in held:
                delivery.settle()

    async def test_stop_intake_closes_and_held_ones_still_settle(self, harness: Harness) -> None:
        """G01: no new intake, what is held can finish, what was not handed out goes to others."""
        for i in range(20):
            await harness.produce(b"%d" % i, key="one-partition")
        async with running(harness.options(max_receive=5)) as transport:
            held = await collect(transport.source, 5, settle=False)
            transport.source.stop_intake()
            with pytest.raises(SourceClosed):
                await transport.source.receive()
            done = {d.body for d in held}
            for delivery in held:
                delivery.settle()
            await flushed(transport.source)
        async with running(harness.options()) as transport:
            rest: set[bytes | None] = set()
            while len(rest | done) < 20:
                rest |= {d.body for d in await collect(transport.source, 1)}
            assert rest | done == {b"%d" % i for i in range(20)}

    async def test_cancelling_receive_loses_nothing(self, harness: Harness) -> None:
        chance = random.Random(7)
        seen: set[bytes | None] = set()
        async with running(harness.options(max_receive=3)) as transport:

            async def produce() -> None:
                for i in range(120):
                    await harness.produce(b"%d" % i, key=f"{i % 5}")

            async with asyncio.TaskGroup() as group, asyncio.timeout(WAIT_S):
                group.create_task(produce())
                while len(seen) < 120:
                    receiving = group.create_task(transport.source.receive())
                    for _ in range(chance.randrange(6)):
                        await asyncio.sleep(0)
                    receiving.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        for delivery in await receiving:
                            seen.add(delivery.body)
                            delivery.settle()
                    await asyncio.wait([group.create_task(asyncio.sleep(0.001))])
            assert len(seen) == 120

    async def test_publish_is_durable_when_it_returns(self, harness: Harness) -> None:
        async with running(harness.options()) as transport:
            destination = harness.reply_destination()
            assert transport.sink.check_destination(destination) is None
            headers = {"content-type": b"application/json", "request-id": b"r"}
            await transport.sink.publish(destination, "r", b'{"a":1}', headers)
            assert await harness.replies(destination, bool) == [b'{"a":1}']

    async def test_many_publishes_at_once(self, harness: Harness) -> None:
        """E11: every send is awaited; all of them arrive."""
        async with running(harness.options()) as transport:
            destination = harness.reply_destination()
            bodies = [b"%d" % i for i in range(300)]
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(
                    *(
                        transport.sink.publish(destination, f"r{i}", b, {})
                        for i, b in enumerate(bodies)
                    )
                )
            arrived = await harness.replies(destination, lambda found: len(found) >= 300)
            assert sorted(arrived) == sorted(bodies)

    async def test_cancelled_publishes_hurt_no_neighbour(self, harness: Harness) -> None:
        async with running(harness.options()) as transport:
            destination = harness.reply_destination()
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(transport.sink.publish(destination, "r", b"%d" % i, {}))
                    for i in range(100)
                ]
                for task in tasks[::3]:
                    await asyncio.sleep(0)
                    task.cancel()
            kept = {b"%d" % i for i in range(100) if i % 3}
            arrived = await harness.replies(destination, lambda found: kept <= set(found))
            assert kept <= set(arrived)

    async def test_a_list_is_published_as_its_records_would_be(self, harness: Harness) -> None:
        """One that cannot be published fails alone; each is told once, and durable when it is told."""
        place = harness.reply_destination()
        async with running(harness.options()) as transport:
            sink, limit = transport.sink, transport.sink.max_record_bytes
            assert isinstance(sink, ListSink) and limit is not None
            await sink.publish(place, "first", b"first", {})
            bodies = [b"%d" % i for i in range(300)]
            bodies[7] = b"L" * (limit + 4096)
            told: list[tuple[int, PublishError | None]] = []
            records = [Record(place, f"k{i}", body, {}) for i, body in enumerate(bodies)]
            async with asyncio.timeout(WAIT_S):
                await sink.publish_all(records, lambda *outcome: told.append(outcome))
            assert sorted(number for number, _ in told) == list(range(300))
            assert [number for number, error in told if error is not None] == [7]
            assert Counter(
                await harness.replies(place, lambda found: len(found) >= 300)
            ) == Counter([b"first", *bodies[:7], *bodies[8:]])

    async def test_a_cancelled_list_hurts_no_neighbour(self, harness: Harness) -> None:
        places = [harness.reply_destination() for _ in range(2)]
        async with running(harness.options()) as transport:
            sink = transport.sink
            assert isinstance(sink, ListSink)
            for place in places:
                await sink.publish(place, "first", b"first", {})
            lists = [[Record(p, f"{p}{i}", b"%d" % i, {}) for i in range(200)] for p in places]
            told: list[int] = []
            cut = asyncio.ensure_future(sink.publish_all(lists[0], lambda *_: None))
            kept = asyncio.ensure_future(sink.publish_all(lists[1], lambda n, _: told.append(n)))
            await asyncio.sleep(0)
            cut.cancel()
            async with asyncio.timeout(WAIT_S):
                await kept
                await asyncio.gather(cut, return_exceptions=True)
                await sink.publish(places[1], "last", b"last", {})
            assert sorted(told) == list(range(200))
            found = await harness.replies(places[1], lambda found: b"last" in found)
            assert len(found) == 202

    async def test_destinations_outside_the_allow_list_are_refused(self, harness: Harness) -> None:
        async with running(harness.options()) as transport:
            for destination in harness.bad_destinations:
                assert transport.sink.check_destination(destination), destination
            assert transport.sink.check_destination(transport.sink.dead_letter_destination)
            default = transport.sink.default_destination("some-id")
            assert transport.sink.check_destination(default) is None

    async def test_too_large_a_record_is_refused_with_sizes(self, harness: Harness) -> None:
        """E12: the error names the limit and what was given; smaller ones still pass."""
        async with running(harness.options()) as transport:
            limit = transport.sink.max_record_bytes
            if limit is None:
                pytest.skip("this transport has no limit")
            destination = harness.reply_destination()
            with pytest.raises(RecordTooLargeForBroker) as caught:
                await transport.sink.publish(destination, "r", b"x" * (limit + 4096), {})
            assert caught.value.given_bytes >= limit
            assert not caught.value.retryable
            await transport.sink.publish(destination, "r", b"x" * limit, {})
            assert [len(body) for body in await harness.replies(destination, bool)] == [limit]

    async def test_close_is_bounded_and_idempotent(self, harness: Harness) -> None:
        """G02: closing returns, twice as well, and nothing is handed out after it."""
        async with running(harness.options()) as transport:
            await harness.produce(b"a")
            await collect(transport.source, 1, settle=False)
            async with asyncio.timeout(WAIT_S):
                await transport.source.aclose()
                await transport.source.aclose()
            with pytest.raises(SourceClosed):
                await transport.source.receive()
            assert not transport.source.status().connected

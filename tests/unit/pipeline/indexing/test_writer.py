"""The index writer: batches, order per document, retries, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actors.ports import Clock, NoMetrics, SystemClock
from pipeline.indexing.records import DELETED, Entry, Outcome, Version, Write
from pipeline.indexing.sinks.base import StoreUnavailable
from pipeline.indexing.writer import FEWEST_BULK, LIVE_IN_A_ROW, SLOW_S, IndexWriter, WritePolicy
from tests.conformance.collection_suite import IDENTITY, contents, delete, expected, put
from tests.support.fakes import ManualClock
from tests.support.memory_collection import MemoryCollection

QUICK = WritePolicy(linger_s=0, first_backoff_s=0, max_backoff_s=0, attempts=4)


@contextlib.asynccontextmanager
async def writing(
    policy: WritePolicy = QUICK, clock: Clock | None = None
) -> AsyncIterator[tuple[IndexWriter, MemoryCollection]]:
    """A writer whose task is not started: `submit`s gather until `started`."""
    collection = MemoryCollection(uuid.uuid4().hex)
    await collection.open(IDENTITY)
    yield (
        IndexWriter(collection, policy=policy, clock=clock or SystemClock(), metrics=NoMetrics()),
        collection,
    )
    await collection.drop()


async def outcomes_of(
    writer: IndexWriter, writes: list[Write], lanes: list[str] | None = None
) -> list[Outcome | BaseException]:
    """Submit all at once, then let the writer run until each has its outcome."""
    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(_kept(writer.submit(w, lane)))  # type: ignore[arg-type]
            for w, lane in zip(writes, lanes or ["bulk"] * len(writes), strict=True)
        ]
        while len(writer) == 0:
            await asyncio.sleep(0)
        running = group.create_task(writer.run())
        await asyncio.wait(waiting)
        running.cancel()
    return [task.result() for task in waiting]


async def _kept(work: Any) -> Any:
    try:
        return await work
    except StoreUnavailable as error:
        return error


def kinds(outcomes: list[Any]) -> list[str]:
    """What became of each."""
    return [getattr(outcome, "kind", type(outcome).__name__) for outcome in outcomes]


async def test_versions_of_one_document_collapse_to_the_newest_whatever_their_order() -> None:
    """H04: one write, the others are superseded by it."""
    async with writing() as (writer, collection):
        writes = [put("a", n, [f"v{n}"]) for n in (3, 1, 4, 2)] + [put("b", 1, ["b"])]
        assert kinds(await outcomes_of(writer, writes)) == [
            "stale",
            "stale",
            "written",
            "stale",
            "written",
        ]
        assert sorted(map(sorted, collection.batches)) == [["a", "b"]]
        assert await contents(collection) == expected({"a": writes[2], "b": writes[4]})


async def test_a_delete_and_an_insert_in_one_batch_end_with_the_later_one() -> None:
    """H07."""
    async with writing() as (writer, collection):
        await outcomes_of(writer, [put("a", 1, ["x"]), delete("a", 2), put("a", 3, ["y"])])
        await outcomes_of(writer, [put("b", 1, ["x"]), delete("b", 2)])
        rows = await contents(collection)
        assert [row[2] for row in rows.values()] == ["y"]


async def test_a_refused_version_leaves_the_newest_good_one() -> None:
    async with writing() as (writer, collection):
        bad = Write("a", Version("topic/0", 3), "h", put("a", 3, ["bad"]).chunks)
        bad.chunks[0].vector[:] = float("nan")  # type: ignore[index]
        outcomes = await outcomes_of(writer, [put("a", 1, ["1"]), put("a", 2, ["2"]), bad])
        assert kinds(outcomes) == ["stale", "written", "refused"]
        rows = await contents(collection)
        assert [row[2] for row in rows.values()] == ["2"]


async def test_one_refused_document_does_not_hold_up_its_batch() -> None:
    """H06."""
    async with writing() as (writer, collection):
        collection.refused = {"d3"}
        writes = [put(f"d{i}", 1, [str(i)]) for i in range(8)]
        outcomes = await outcomes_of(writer, writes)
        assert kinds(outcomes) == ["written"] * 3 + ["refused"] + ["written"] * 4


async def test_an_outage_is_waited_out_and_told_meanwhile() -> None:
    """H08: the same ids are written again."""
    async with writing() as (writer, collection):
        collection.down = [StoreUnavailable("full"), StoreUnavailable("busy", retry_after_s=0.01)]
        assert kinds(await outcomes_of(writer, [put("a", 1, ["x"])])) == ["written"]
        assert collection.batches == [["a"]] * 3
        assert writer.trouble is None


async def test_what_is_given_up_raises_and_says_where() -> None:
    async with writing() as (writer, collection):
        collection.down = [StoreUnavailable("full")] * 4
        outcomes = await outcomes_of(writer, [put("a", 1, ["x"]), put("a", 2, ["y"])])
        assert kinds(outcomes) == ["StoreUnavailable"] * 2
        assert "full" in str(outcomes[0]) and writer.trouble is not None


async def test_a_store_that_does_not_answer_is_asked_again() -> None:
    policy = WritePolicy(linger_s=0, first_backoff_s=0, max_backoff_s=0, write_timeout_s=0.05)
    async with writing(policy) as (writer, collection):
        hung = collection.put_chunks
        calls = 0

        async def hang_once(writes: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                await asyncio.Event().wait()
            await hung(writes)

        collection.put_chunks = hang_once  # type: ignore[method-assign]
        assert kinds(await outcomes_of(writer, [put("a", 1, ["x"])])) == ["written"]
        assert calls == 2


async def test_a_call_that_takes_long_is_told_while_it_is_waited_for() -> None:
    clock = ManualClock()
    async with writing(clock=clock) as (writer, collection):
        asked, answer = asyncio.Event(), asyncio.Event()
        read = collection.read_entries

        async def slow(names: Sequence[str]) -> dict[str, Entry]:
            asked.set()
            await answer.wait()
            return await read(names)

        collection.read_entries = slow  # type: ignore[method-assign]
        look_up = asyncio.create_task(writer.known(["a"]))
        await asked.wait()
        assert writer.problem() is None
        clock.advance(SLOW_S + 1)
        assert "6 s so far" in str(writer.problem())
        answer.set()
        await look_up
        assert writer.problem() is None


async def test_interactive_writes_go_first_and_batches_are_bounded() -> None:
    policy = WritePolicy(linger_s=0, max_documents=2)
    async with writing(policy) as (writer, collection):
        writes = [put(f"d{i}", 1, [str(i)]) for i in range(5)]
        lanes = ["bulk", "bulk", "bulk", "interactive", "bulk"]
        await outcomes_of(writer, writes, lanes)
        assert collection.batches == [["d3"], ["d0", "d1"], ["d2", "d4"]]


async def test_live_writes_that_never_end_leave_bulk_ones_a_place() -> None:
    """A call of its own for a live change, but for one call in five."""
    async with writing() as (writer, collection):

        async def live() -> None:
            for number in range(20):
                await writer.submit(put(f"live-{number}", 1, ["x"]), "interactive")

        async with asyncio.TaskGroup() as group:
            changes = group.create_task(live())
            bulk = group.create_task(writer.submit(put("old", 1, ["y"])))
            running = group.create_task(writer.run())
            await asyncio.wait([changes, bulk])
            running.cancel()
        place = next(i for i, names in enumerate(collection.batches) if "old" in names)
        assert place <= LIVE_IN_A_ROW


async def test_bulk_calls_are_short_while_live_changes_come() -> None:
    """What a call may hold follows from how long calls took; without live changes it is the policy's."""
    clock = ManualClock()
    async with writing(WritePolicy(linger_s=0, beside_live_s=0.01), clock) as (writer, collection):
        stored = collection.put_chunks

        async def slow(writes: list[Write]) -> None:
            clock.advance(0.0005 * len(writes))
            await stored(writes)

        collection.put_chunks = slow  # type: ignore[method-assign]
        documents = [put(f"d{i}", 1, [str(i)]) for i in range(400)]
        await outcomes_of(writer, documents)
        assert [len(batch) for batch in collection.batches] == [400]
        collection.batches.clear()
        documents = [put(f"d{i}", 2, [f"{i}."]) for i in range(200)]
        lanes = ["interactive", *["bulk"] * 199]
        await outcomes_of(writer, documents, lanes)
        assert [len(batch) for batch in collection.batches][:3] == [1, FEWEST_BULK, FEWEST_BULK]
        assert (await collection.status()).n_documents == 400


async def test_a_look_up_for_live_changes_passes_those_of_a_backfill() -> None:
    async with writing() as (writer, collection):
        asked: list[str] = []
        read, first = collection.read_entries, asyncio.Event()

        async def noted(names: Sequence[str]) -> dict[str, Entry]:
            asked.extend(names)
            await first.wait()
            return await read(names)

        collection.read_entries = noted  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            for name, lane in (("a", "bulk"), ("b", "bulk"), ("c", "interactive")):
                group.create_task(writer.known([name], lane))  # type: ignore[arg-type]
            while not asked:
                await asyncio.sleep(0)
            first.set()
        assert asked == ["a", "c", "b"]


async def test_bytes_bound_a_batch_and_a_larger_document_goes_alone() -> None:
    """H02."""
    policy = WritePolicy(linger_s=0, max_bytes=1000)
    async with writing(policy) as (writer, collection):
        writes = [put("a", 1, ["x" * 5000]), put("b", 1, ["y" * 10]), put("c", 1, ["z" * 10])]
        await outcomes_of(writer, writes)
        assert collection.batches == [["a"], ["b", "c"]]


async def test_a_touch_whose_document_changed_meanwhile_is_to_be_embedded() -> None:
    async with writing() as (writer, _):
        await outcomes_of(writer, [put("a", 1, ["x"])])
        touch = Write("a", Version("topic/0", 3), put("a", 1, ["other"]).content_hash, None)
        assert kinds(await outcomes_of(writer, [touch])) == ["moved"]


async def test_equal_content_under_a_new_version_is_not_written_again() -> None:
    async with writing() as (writer, collection):
        await outcomes_of(writer, [put("a", 1, ["x"])])
        assert kinds(await outcomes_of(writer, [put("a", 2, ["x"])])) == ["unchanged"]
        late = Write("a", Version("topic/0", 1), DELETED, ())
        assert kinds(await outcomes_of(writer, [late])) == ["stale"]
        assert (await collection.status()).n_documents == 1


async def test_the_numbers_of_two_logs_are_not_compared() -> None:
    """A topic that got more partitions: a key's offsets start anew, and its changes go on."""
    async with writing() as (writer, collection):
        await outcomes_of(writer, [put("a", 900, ["old"])])
        moved = put("a", 0, ["new"])
        moved = Write("a", Version("topic/5", 3), moved.content_hash, moved.chunks)
        assert kinds(await outcomes_of(writer, [moved])) == ["written"]
        assert [row[2] for row in (await contents(collection)).values()] == ["new"]


async def test_stopping_leaves_what_waits_to_its_deliveries() -> None:
    async with writing() as (writer, collection):
        collection.down = [StoreUnavailable("full")] * 1000
        blocked = asyncio.Event()

        async def never(_: Any) -> None:
            blocked.set()
            await asyncio.Event().wait()

        collection.put_chunks = never  # type: ignore[method-assign]
        collection.down = []
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_kept(writer.submit(put("a", 1, ["x"]))))
            running = group.create_task(writer.run())
            await blocked.wait()
            running.cancel()
            assert isinstance(await waiting, StoreUnavailable)


async def test_a_closed_writer_asks_its_store_nothing_more() -> None:
    """A drain that ran out of budget: publishers still hold documents when the store is left."""
    async with writing() as (writer, collection):
        await writer.aclose()
        assert kinds(await outcomes_of(writer, [put("a", 1, ["x"])])) == ["StoreUnavailable"]
        with pytest.raises(StoreUnavailable):
            await writer.known(["a"])
        assert collection.batches == []


@pytest.fixture(autouse=True)
def forget() -> None:
    """No collection outlives its test."""
    MemoryCollection.stores.clear()

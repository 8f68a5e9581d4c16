"""The whole graph in this process, with a fake model: every outcome a record can have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.ports import PublishError, RecordTooLargeForBroker
from gpu.batch import EncodedRequest, PackedBatch
from pipeline.oneoff import InprocService, run_inproc
from pipeline.settings.load import (
    AdmissionSettings,
    AttemptsSettings,
    BatchingSettings,
    LaneAdmission,
    PublishSettings,
    Settings,
)
from schemas.codec import decode_reply, join_parts
from schemas.requests import LANES, AnyRequest
from schemas.results import FailureReply, Reply
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_ids, fake_vector
from tests.support.inproc_faults import FaultyBroker

MSGPACK = {"content-type": b"application/msgpack"}


@asynccontextmanager
async def service(
    runner: FakeRunner | None = None,
    *,
    settings: Settings | None = None,
    metrics: RecordingMetrics | None = None,
    **more: FakeRunner,
) -> AsyncIterator[InprocService]:
    runners = {"fake": runner or FakeRunner(), **more}
    factories: dict[str, Callable[[], Any]] = {
        name: (lambda one=one: one) for name, one in runners.items()
    }
    async with run_inproc(
        settings or Settings(),
        metrics=metrics,
        runner_factories=factories,
        broker=FaultyBroker(),
    ) as running:
        yield running


async def ask(
    running: InprocService,
    record: Mapping[str, Any] | bytes,
    headers: Mapping[str, bytes] | None = None,
) -> Reply | FailureReply:
    body = record if isinstance(record, bytes) else msgpack.packb(record)
    replies = await running.request(body, headers)
    parts = [decode_reply(reply.body, reply.headers) for reply in replies]
    if len(parts) == 1:
        return parts[0]
    return join_parts([part for part in parts if isinstance(part, Reply)])


def until(gate: threading.Event) -> Callable[[PackedBatch], None]:
    """A forward that does not come back before the test opens the gate."""

    def wait(batch: PackedBatch) -> None:
        assert gate.wait(20), "the test never opened the gate"

    return wait


def vectors(reply: Reply | FailureReply) -> list[np.ndarray]:
    assert isinstance(reply, Reply), reply
    return [np.frombuffer(item.embedding or b"", dtype="<f4") for item in reply.items]


def error_codes(reply: Reply | FailureReply) -> list[str | None]:
    assert isinstance(reply, Reply), reply
    return [item.error.code if item.error is not None else None for item in reply.items]


async def test_an_embed_request_is_answered_in_order() -> None:
    """A07, D02, D05: result i is input i; every item carries its index and tokens."""
    texts = [f"word{i} " * (1 + i % 9) for i in range(300)]
    async with service() as running:
        reply = await ask(running, {"id": "a", "input": texts})
    assert isinstance(reply, Reply)
    assert reply.id == "a" and reply.n == 300
    assert [item.index for item in reply.items] == list(range(300))
    for text, vector, item in zip(texts, vectors(reply), reply.items, strict=True):
        np.testing.assert_array_equal(vector, fake_vector(fake_ids(text)))
        assert item.tokens == len(fake_ids(text))
    assert reply.usage.total_tokens == sum(len(fake_ids(text)) for text in texts)


async def test_a_string_and_a_list_of_one_give_the_same_vector() -> None:
    """B01"""
    async with service() as running:
        one = await ask(running, {"id": "a", "input": "hello world"})
        many = await ask(running, {"id": "b", "input": ["hello world"]})
    np.testing.assert_array_equal(vectors(one)[0], vectors(many)[0])


async def test_one_bad_item_never_fails_its_neighbours() -> None:
    """B10, B12, D06, A03: empty, too long and poisoned items sit at their own index."""
    poison = fake_ids("poison")[0]
    runner = FakeRunner(max_tokens=10, poison_id=poison, nan_id=fake_ids("nan")[0])
    texts = ["good", "", "w " * 11, "poison", "nan", "fine"]
    async with service(runner) as running:
        reply = await ask(running, {"id": "a", "input": texts})
    assert error_codes(reply) == [
        None, "empty_input", "too_long", "model_error", "non_finite", None,
    ]  # fmt: skip
    assert isinstance(reply, Reply)
    too_long = reply.items[2].error
    assert too_long is not None and (too_long.limit, too_long.given) == (10, 11)
    assert too_long.items == (2,)


async def test_item_indexes_of_errors_are_those_of_the_whole_request() -> None:
    """D06: 100 texts, items 7 and 92 too long, although encoding happens in slices."""
    texts = ["good"] * 100
    texts[7] = texts[92] = "w " * 20
    async with service(FakeRunner(max_tokens=10)) as running:
        reply = await ask(running, {"id": "a", "input": texts})
    assert isinstance(reply, Reply)
    failed = [item for item in reply.items if item.error is not None]
    assert [(item.index, item.error.items) for item in failed if item.error] == [
        (7, (7,)),
        (92, (92,)),
    ]


async def test_a_request_above_the_batch_budget_is_split_inside_the_service() -> None:
    """C09: 1,000 texts against a budget of 64 tokens: one reply, in order."""
    runner = FakeRunner(max_batch_tokens=64)
    async with service(runner) as running:
        reply = await ask(running, {"id": "a", "input": [f"t{i}" for i in range(1000)]})
    assert isinstance(reply, Reply) and [i.index for i in reply.items] == list(range(1000))
    assert max(batch.n_tokens for batch in runner.batches) <= 64


async def test_rerank_is_sorted_ties_by_index_and_cut_to_top_n() -> None:
    """D03, D04, A17: best first, `index` is the input position, a score depends on its pair only."""
    documents = [{"id": f"d{i}", "text": f"document number {i}"} for i in range(6)]
    async with service() as running:
        record = {"query": "which", "documents": documents, "return_documents": True}
        full = await ask(running, {"id": "a", **record})
        top = await ask(running, {"id": "b", **record, "top_n": 2})
        more = await ask(running, {"id": "c", **record, "top_n": 99})
        unsorted = await ask(running, {"id": "d", **record, "sort": False})
        alone = await ask(running, {"id": "e", **record, "documents": documents[3:4]})
    assert isinstance(full, Reply) and isinstance(top, Reply) and isinstance(more, Reply)
    assert isinstance(unsorted, Reply) and isinstance(alone, Reply)
    scores = [item.relevance_score for item in full.items]
    assert scores == sorted(scores, key=lambda s: -(s or 0)) and len(scores) == 6
    assert [i.index for i in top.items] == [i.index for i in full.items][:2]
    assert [i.index for i in more.items] == [i.index for i in full.items]
    assert [i.index for i in unsorted.items] == list(range(6))
    assert full.items[0].document == documents[full.items[0].index]["text"]
    assert full.items[0].id == f"d{full.items[0].index}"
    assert alone.items[0].relevance_score == unsorted.items[3].relevance_score


async def test_classify_names_its_labels() -> None:
    """A18"""
    async with service(FakeRunner(labels=("no", "yes", "maybe"))) as running:
        reply = await ask(running, {"id": "a", "task": "classify", "input": ["x", "y"]})
    assert isinstance(reply, Reply)
    assert [list(item.scores or {}) for item in reply.items] == [["no", "yes", "maybe"]] * 2


@pytest.mark.parametrize("task", ["embed", "classify", "rerank"])
async def test_an_empty_list_is_a_defined_failure(task: str) -> None:
    """B14: never a crash, the same for all tasks."""
    record: dict[str, Any] = {"id": "a", "task": task}
    record |= {"query": "q", "documents": []} if task == "rerank" else {"input": []}
    async with service() as running:
        reply = await ask(running, record)
    assert isinstance(reply, FailureReply) and reply.error.code == "empty_input"


async def test_failures_reach_the_sender_with_the_id_and_path() -> None:
    """D07, B03: unknown field, unknown model, forbidden destination: typed, with the path."""
    async with service() as running:
        unknown = await ask(running, {"id": "a", "input": "x", "dimensionz": 3})
        model = await ask(running, {"id": "b", "input": "x", "model": "gpt"})
    assert isinstance(unknown, FailureReply) and unknown.id == "a"
    assert (unknown.error.code, unknown.error.path) == ("invalid_request", "$.dimensionz")
    assert isinstance(model, FailureReply) and model.error.code == "unknown_model"
    assert "fake" in model.error.message


async def test_undecodable_bytes_become_a_dead_letter_and_the_next_record_works() -> None:
    """E13, D08: raw bytes, origin and error in the dead letter; the intake goes on."""
    async with service() as running:
        broker = running._broker
        for body in (b"\xff\x00", b"\x82\xa2id", b"[1, 2]", b"", b"\x80\x04\x95K\x01."):
            await broker.put(body, {"trace": b"kept"})
        reply = await ask(running, {"id": "a", "input": "x"})
        while broker.unsettled:
            await asyncio.sleep(0)
    assert isinstance(reply, Reply)
    letters = list(broker.dead_letters)
    assert [letter.body for letter in letters][:2] == [b"\xff\x00", b"\x82\xa2id"]
    assert len(letters) == 5
    headers = letters[0].headers
    assert headers["embedstream-kind"] == b"unprocessable" and headers["trace"] == b"kept"
    assert b'"transport":"inproc"' in headers["embedstream-origin"]


async def test_a_tombstone_is_skipped_with_a_counter() -> None:
    """E14: None is not b""."""
    metrics = RecordingMetrics()
    async with service(metrics=metrics) as running:
        assert await running._broker.submit(None, {}, key="k") == []
    assert metrics.counts["tombstones_skipped_total"] == 1
    assert "dead_letters_total" not in metrics.counts


async def test_expired_requests_are_answered_and_never_computed() -> None:
    """G10: 1,000 queued ahead, a deadline that passes meanwhile, no forward for it."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    marker = fake_ids("marker")[0]
    async with service(runner) as running:
        ahead = [
            asyncio.ensure_future(ask(running, {"id": f"a{i}", "input": "text " * 40}))
            for i in range(50)
        ]
        while running.app.graph is None or len(running.app.graph.table) < 50:
            await asyncio.sleep(0)
        late = await ask(
            running,
            {"id": "late", "input": "marker " * 40, "deadline_ms": int(time.time() * 1000) + 150},
        )
        gate.set()
        replies = await asyncio.gather(*ahead)
    assert isinstance(late, FailureReply) and late.error.code == "expired" and late.error.retryable
    assert all(isinstance(reply, Reply) for reply in replies)
    assert all(marker not in batch.input_ids for batch in runner.batches)


async def test_a_cancel_record_withdraws_queued_work() -> None:
    """G10: cancel honoured while queued; the sender of the request hears `cancelled`."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    async with service(runner) as running:
        first = asyncio.ensure_future(ask(running, {"id": "first", "input": "busy " * 60}))
        queued = asyncio.ensure_future(ask(running, {"id": "queued", "input": "marker " * 60}))
        while running.app.graph is None or len(running.app.graph.table) < 2:
            await asyncio.sleep(0)
        assert await running.request(msgpack.packb({"task": "cancel", "id": "queued"})) == []
        reply = await queued
        gate.set()
        assert isinstance(await first, Reply)
    assert isinstance(reply, FailureReply) and reply.error.code == "cancelled"


async def test_the_same_request_twice_at_once_is_computed_once() -> None:
    """F10: same id, same bytes, same destination while running: joined, both settled."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    metrics = RecordingMetrics()
    async with service(runner, metrics=metrics) as running:
        broker = running._broker
        body = msgpack.packb({"id": "twin", "input": "same text"})
        headers = {"reply-to": b"inproc:twin"}
        await broker.put(body, headers)
        await broker.put(body, headers)
        while metrics.counts.get("joined_duplicates_total", 0) < 1:
            await asyncio.sleep(0)
        gate.set()
        while broker.unsettled:
            await asyncio.sleep(0)
        replies = broker.replies("inproc:twin")
    assert len(replies) == 1 and len(runner.batches) == 1 and broker.settled == 2


async def test_an_interactive_record_does_not_wait_for_the_bulk_record_ahead_of_it() -> None:
    """One route, 1,000 bulk items ahead: what comes behind them is in the next batch that is packed."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    quick = fake_ids("quick")[0]
    settings = Settings(batching=BatchingSettings(result_cache_bytes=0))  # these words share ids
    async with service(runner, settings=settings) as running:
        bulk = {"id": "bulk", "priority": "bulk", "input": [f"text {n}" for n in range(1000)]}
        ahead = asyncio.ensure_future(ask(running, bulk))
        while not runner.batches:
            await asyncio.sleep(0)
        behind = asyncio.ensure_future(
            ask(running, {"id": "now", "priority": "interactive", "input": "quick"})
        )
        graph = running.app.graph
        assert graph is not None
        while not graph.coalescer.queued_tokens("interactive"):
            await asyncio.sleep(0)
        gate.set()
        assert len(vectors(await behind)) == 1
        assert len(vectors(await ahead)) == 1000
    (number,) = [n for n, batch in enumerate(runner.batches) if quick in batch.input_ids]
    assert number <= 4, "beside those that ran and were ready"
    assert len(runner.batches) > 20


async def test_the_same_request_again_gets_the_first_answer() -> None:
    """F10: after the reply: the same bytes, parts too, without a forward; another body under the same id
    is another request; what failed is tried again; a restart remembers nothing and computes the same."""
    metrics, runner = RecordingMetrics(), FakeRunner(poison_id=fake_ids("poison")[0])
    record = {"id": "same", "input": [f"text number{i}" for i in range(40)], "dimensions": 8}
    first_body, other_body = msgpack.packb(record), msgpack.packb({**record, "input": "other"})
    failing = msgpack.packb({"id": "bad", "input": "poison"})
    async with service(runner, metrics=metrics) as running:
        broker = running._broker

        async def asked(body: bytes) -> list[Any]:
            """What came to the one destination once this request is settled."""
            await broker.put(body, {"reply-to": b"inproc:same"})
            while broker.unsettled:
                await asyncio.sleep(0)
            return broker.replies("inproc:same")

        (first,) = await asked(first_body)
        n_forwards = len(runner.batches)
        (again,) = await asked(first_body)
        assert (again.body, again.headers) == (first.body, first.headers)
        assert len(runner.batches) == n_forwards
        assert metrics.counts["answered_again_total"] == 1
        (another,) = await asked(other_body)
        other = decode_reply(another.body, another.headers)
        np.testing.assert_array_equal(vectors(other)[0], fake_vector(fake_ids("other")))
        n_forwards = len(runner.batches)
        assert len(await asked(failing)) == len(await asked(failing)) == 1
        assert len(runner.batches) >= n_forwards + 2
        assert metrics.counts["answered_again_total"] == 1
    async with service() as restarted:
        anew = await ask(restarted, first_body)
    before = decode_reply(first.body, first.headers)
    for old, new in zip(vectors(before), vectors(anew), strict=True):
        np.testing.assert_array_equal(old, new)


async def test_a_request_sent_again_after_its_cancel_is_answered() -> None:
    """F10: never silence: a withdrawn twin, not yet answered, takes no new delivery with it."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    async with service(runner) as running:
        broker = running._broker
        await broker.put(msgpack.packb({"id": "busy", "input": "busy " * 60}))
        body = msgpack.packb({"id": "again", "input": "some text"})
        headers = {"reply-to": b"inproc:again"}
        await broker.put(body, headers)
        await broker.put(msgpack.packb({"task": "cancel", "id": "again"}))
        await broker.put(body, headers)
        gate.set()
        while broker.unsettled:
            await asyncio.sleep(0)
        replies = [decode_reply(one.body, one.headers) for one in broker.replies("inproc:again")]
        assert running.app.graph is not None and len(running.app.graph.table) == 0
        assert all(running.app.graph.table.count(lane) == 0 for lane in LANES)
    assert len(replies) == 2, "the second request was settled without an answer of its own"
    assert isinstance(replies[0], FailureReply) and replies[0].error.code == "cancelled"
    assert isinstance(replies[1], Reply)


async def test_a_twin_with_another_deadline_is_not_joined() -> None:
    """F10, G10: the same bytes under a later `deadline-ms` header do not expire with their twin."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    async with service(runner) as running:
        broker = running._broker
        await broker.put(msgpack.packb({"id": "busy", "input": "busy " * 60}))
        body = msgpack.packb({"id": "late", "input": "some text"})
        soon = int(time.time() * 1000) + 300
        for deadline_ms in (soon, soon + 3_600_000):
            await broker.put(body, {"reply-to": b"inproc:late", "deadline-ms": b"%d" % deadline_ms})
        while broker.unsettled == 3:  # until the sweep has answered the first one
            await asyncio.sleep(0.01)
        gate.set()
        while broker.unsettled:
            await asyncio.sleep(0)
        replies = [decode_reply(one.body, one.headers) for one in broker.replies("inproc:late")]
    assert [type(reply) for reply in replies] == [FailureReply, Reply]


async def test_publish_failures_are_retried_and_nothing_is_lost() -> None:
    """E11, F07: the broker refuses three times, then takes the reply; settled only afterwards."""
    metrics = RecordingMetrics()
    settings = Settings()
    async with service(settings=settings, metrics=metrics) as running:
        running._broker.faults.fail_publishes = 3
        reply = await ask(running, {"id": "a", "input": "x"})
    assert isinstance(reply, Reply)
    assert metrics.counts["publish_retries_total"] == 3


async def test_a_reply_above_the_broker_limit_is_split_into_numbered_parts() -> None:
    """E12: 300 vectors against a small record limit."""
    async with service() as running:
        running.app.graph.routes[0].sink.max_record_bytes = 4096
        replies = await running.request(
            msgpack.packb({"id": "a", "input": [f"text {i}" for i in range(300)]})
        )
        parts = [decode_reply(reply.body, reply.headers) for reply in replies]
    assert len(parts) > 1 and all(len(reply.body) <= 4096 for reply in replies)
    assert [part.part for part in parts if isinstance(part, Reply)] == list(range(len(parts)))
    whole = join_parts([part for part in parts if isinstance(part, Reply)])
    assert [item.index for item in whole.items] == list(range(300))
    np.testing.assert_array_equal(vectors(whole)[123], fake_vector(fake_ids("text 123")))


async def test_user_text_never_reaches_the_log() -> None:
    """I05: over-long, malformed and failing records with a marker string."""
    marker = "MARKER-4711"
    runner = FakeRunner(max_tokens=5, poison_id=fake_ids("poison")[0])
    with capture_logs() as events:
        async with service(runner) as running:
            for record in (
                {"id": "a", "input": f"{marker} " * 9},
                {"id": "b", "input": marker, "prompt_name": marker},
                {"id": "c", "input": f"poison {marker}"},
                {"id": "d", "input": marker, "model": marker},
                {"id": "e", "input": [marker], marker: 1},
            ):
                reply = await ask(running, record)
                if record["id"] != "e":  # names of unknown fields are shown, values never
                    assert marker not in repr(reply)
            await running._broker.put(marker.encode())
            while running._broker.unsettled:
                await asyncio.sleep(0)
    assert events and marker not in repr([e for e in events if e.get("path") != f"$.{marker}"])


async def test_gauges_follow_the_queue_and_return_to_zero() -> None:
    """I01, I02: 200 requests against a slow model: the gauge rises and returns to zero."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    metrics = RecordingMetrics()
    async with service(runner, metrics=metrics) as running:
        tasks = [
            asyncio.ensure_future(ask(running, {"id": f"r{i}", "input": f"word{i}"}))
            for i in range(200)
        ]
        while max(metrics.gauges.get("in_flight", [0])) < 200:
            await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*tasks)
        while metrics.gauges["in_flight"][-1] != 0:
            await asyncio.sleep(0.01)
    assert min(metrics.gauges["queue_tokens"]) >= 0 and metrics.gauges["queue_tokens"][-1] == 0
    for name in ("queue_wait_seconds", "batch_items", "batch_tokens", "forward_seconds"):
        assert metrics.observed[name], name
    assert metrics.observed["publish_seconds"] and metrics.observed["request_seconds"]


async def test_an_interactive_request_is_refused_when_its_lane_is_full_and_bulk_waits() -> None:
    """C10"""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    settings = Settings(
        admission=AdmissionSettings(
            interactive=LaneAdmission(max_in_flight_requests=1, when_full="reject"),
            bulk=LaneAdmission(max_in_flight_requests=2, when_full="wait"),
        )
    )
    async with service(runner, settings=settings) as running:
        lane = {"priority": "interactive", "input": "x"}
        first = asyncio.ensure_future(ask(running, {"id": "i1", **lane}))
        while running.app.graph is None or len(running.app.graph.table) < 1:
            await asyncio.sleep(0)
        for record in ({"id": "i2", **lane}, {"id": "i3", **lane, "input": ["x"]}):
            refused = await ask(running, record)
            assert isinstance(refused, FailureReply) and refused.error.code == "overloaded"
        bulk = [
            asyncio.ensure_future(ask(running, {"id": f"b{i}", "input": f"w{i}"})) for i in range(9)
        ]
        while len(running.app.graph.table) < 3:
            await asyncio.sleep(0)
        gate.set()
        replies = await asyncio.gather(first, *bulk)
    assert all(isinstance(reply, Reply) for reply in replies)


async def test_a_request_that_expires_while_its_lane_is_full_is_answered_then() -> None:
    """G10: waiting for room ends at the deadline, not when something leaves."""
    gate = threading.Event()
    runner = FakeRunner(before_forward=until(gate))
    settings = Settings(admission=AdmissionSettings(bulk=LaneAdmission(max_in_flight_requests=1)))
    async with service(runner, settings=settings) as running:
        first = asyncio.ensure_future(ask(running, {"id": "first", "input": "x"}))
        while running.app.graph is None or not len(running.app.graph.table):
            await asyncio.sleep(0)
        soon = int(time.time() * 1000) + 200
        async with asyncio.timeout(10):
            reply = await ask(running, {"id": "second", "input": "y", "deadline_ms": soon})
        assert not first.done()
        gate.set()
        assert isinstance(await first, Reply)
    assert isinstance(reply, FailureReply) and reply.error.code == "expired"


async def test_an_encoder_that_leaves_items_out_fails_the_request_and_nothing_waits() -> None:
    """C11: a contract broken inside the service is a typed failure, not a request without an end."""
    runner = FakeRunner()
    whole = runner.encoder._encode

    def too_few(request: AnyRequest) -> EncodedRequest:
        encoded = whole(request)
        assert isinstance(encoded, EncodedRequest)
        return EncodedRequest(encoded.items[:-1])

    runner.encoder._encode = too_few  # type: ignore[method-assign]
    async with service(runner) as running, asyncio.timeout(10):
        reply = await ask(running, {"id": "a", "input": ["x", "y"]})
    assert isinstance(reply, FailureReply) and reply.error.code == "internal"


async def test_the_model_loop_survives_a_raising_model() -> None:
    """C01: the 3rd forward raises; its items fail or succeed alone; the 4th works."""
    calls = 0

    def third_raises(batch: PackedBatch) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("boom")

    async with service(FakeRunner(before_forward=third_raises)) as running:
        texts = ["a", "b", "c", "d", "e"]
        replies = [await ask(running, {"id": f"r{i}", "input": t}) for i, t in enumerate(texts)]
        health = running.app.readiness()
    assert [isinstance(reply, Reply) for reply in replies] == [True] * 5
    assert [error_codes(reply) for reply in replies] == [
        [None],
        [None],
        ["model_error"],
        [None],
        [None],
    ]
    assert health.ready, health


async def test_float16_int8_and_binary_outputs_say_their_dtype() -> None:
    """D01, D09 (wire side), D10: dtype and normalized are in the reply."""
    async with service() as running:
        plain = vectors(await ask(running, {"id": "a", "input": "x y"}))[0]
        half = await ask(running, {"id": "b", "input": "x y", "dtype": "float16"})
        small = await ask(running, {"id": "c", "input": "x y", "dtype": "int8"})
        bits = await ask(running, {"id": "d", "input": "x y", "dtype": "binary"})
    assert isinstance(half, Reply) and isinstance(small, Reply) and isinstance(bits, Reply)
    assert (half.dtype, small.dtype, bits.dtype) == ("float16", "int8", "binary")
    assert half.normalized is False
    np.testing.assert_allclose(
        np.frombuffer(half.items[0].embedding or b"", "<f2").astype(np.float32), plain, atol=2e-3
    )
    scale = small.items[0].scale
    assert scale is not None
    restored = np.frombuffer(small.items[0].embedding or b"", np.int8) * scale
    np.testing.assert_allclose(restored, plain, atol=scale * 0.51)
    unpacked = np.unpackbits(np.frombuffer(bits.items[0].embedding or b"", np.uint8))
    np.testing.assert_array_equal(unpacked.astype(bool), plain > 0)


async def test_an_unwritable_reply_destination_ends_in_a_dead_letter() -> None:
    """E10: a refused reply goes to dead letter; the record neither loops nor gets lost."""

    async def refuse(destination: str, body: bytes) -> None:
        if destination.startswith("inproc:embedstream.gone"):
            raise PublishError("topic does not exist", retryable=False)

    async with service() as running:
        broker = running._broker
        broker.faults.before_publish = refuse
        body = msgpack.packb({"id": "a", "input": "x"})
        await broker.put(body, {"reply-to": b"inproc:embedstream.gone"})
        while broker.unsettled:
            await asyncio.sleep(0)
    assert [letter.body for letter in broker.dead_letters] == [body]
    assert broker.dead_letters[0].headers["embedstream-kind"] == b"failed"


async def test_a_reply_that_never_passes_is_given_up_after_max_attempts() -> None:
    """E09, E11, F07: released and tried again, nothing settled without a reply or a dead letter."""
    settings = Settings(
        publish=PublishSettings(attempts=1, backoff_ms=1.0),
        attempts=AttemptsSettings(max_attempts=2),
    )
    metrics = RecordingMetrics()
    tried = 0

    async def refuse(destination: str, body: bytes) -> None:
        nonlocal tried
        if "dead-letters" not in destination:
            tried += 1
            assert broker.settled == 0
            raise PublishError("broker away", retryable=True)

    async with service(settings=settings, metrics=metrics) as running:
        broker = running._broker
        broker.faults.before_publish = refuse
        await broker.put(msgpack.packb({"id": "a", "input": "x"}))
        while broker.unsettled:
            await asyncio.sleep(0.005)
    assert tried == 3 and len(broker.dead_letters) == 1
    assert broker.dead_letters[0].headers["embedstream-attempts"] == b"3"
    assert metrics.counts["redelivered_total"] == 2


async def test_a_reply_that_cannot_be_written_is_a_failure_not_a_loop() -> None:
    """E12: metadata above the broker's room: `record_too_large`, once, settled."""
    async with service() as running:
        running.app.graph.routes[0].sink.max_record_bytes = 2048
        reply = await ask(running, {"id": "a", "input": "x", "metadata": {"k": "v" * 4000}})
        assert running._broker.unsettled == 0
    assert isinstance(reply, FailureReply) and reply.error.code == "record_too_large"


async def test_a_reply_is_cut_until_its_destination_takes_it() -> None:
    """E12: the destination's own limit is far below the client's."""

    async def small(destination: str, body: bytes) -> None:
        if len(body) > 3000 and "dead-letters" not in destination:
            raise RecordTooLargeForBroker("too large", limit_bytes=None, given_bytes=len(body))

    async with service() as running:
        running._broker.faults.before_publish = small
        replies = await running.request(
            msgpack.packb({"id": "a", "input": [f"text {i}" for i in range(300)]})
        )
    parts = [decode_reply(reply.body, reply.headers) for reply in replies]
    last = [part for part in parts if isinstance(part, Reply) and part.parts == parts[-1].parts]
    assert [item.index for item in join_parts(last).items] == list(range(300))


async def test_equal_items_of_many_senders_are_computed_once_and_answered_with_the_same_bytes() -> (
    None
):
    """H07: repeated texts, in one request and over requests."""
    texts = [f"word{i % 12}" for i in range(240)]
    computed = FakeRunner()
    metrics = RecordingMetrics()
    async with service(computed, metrics=metrics) as running:
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(ask(running, {"id": f"r{i}", "input": texts[i : i + 60]}))
                for i in range(0, 240, 60)
            ]
        again = await ask(running, {"id": "again", "input": texts})
    n_computed = sum(batch.n_items for batch in computed.batches)
    # Batches that run at the same time know nothing of each other.
    assert 12 <= n_computed < 240
    assert metrics.counts["items_reused_total"] == 240 + 240 - n_computed
    for i, text in enumerate(texts):
        np.testing.assert_array_equal(vectors(again)[i], fake_vector(fake_ids(text)))
        np.testing.assert_array_equal(vectors(asked[i // 60].result())[i % 60], vectors(again)[i])
    assert isinstance(again, Reply) and again.usage.total_tokens == sum(
        len(fake_ids(text)) for text in texts
    )


async def test_an_error_is_computed_again_and_told_at_each_items_own_index() -> None:
    runner = FakeRunner(nan_id=fake_ids("nan")[0])
    async with service(runner) as running:
        first = await ask(running, {"id": "a", "input": ["nan", "good", "nan"]})
        before = len(runner.batches)
        again = await ask(running, {"id": "b", "input": ["good", "nan"]})
    assert error_codes(first) == ["non_finite", None, "non_finite"]
    assert error_codes(again) == [None, "non_finite"] and len(runner.batches) > before
    for reply in (first, again):
        assert isinstance(reply, Reply)
        assert [item.error.items for item in reply.items if item.error] == [
            (i,) for i, item in enumerate(reply.items) if item.error
        ]


async def test_without_a_cache_each_item_is_computed() -> None:
    runner = FakeRunner()
    settings = Settings(batching=BatchingSettings(result_cache_bytes=0))
    async with service(runner, settings=settings) as running:
        for _ in range(2):
            await ask(running, {"id": "a", "input": ["same"] * 5})
    assert sum(batch.n_items for batch in runner.batches) == 10

"""The demo against a service that answers right, and against services that do not."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
from rich.console import Console

from pipeline.demo import doors as demo_doors
from pipeline.demo import run as demo
from pipeline.demo.clients import DemoBrokerError
from pipeline.demo.corpus import Corpus, Document, Question
from pipeline.demo.run import DemoOptions, run_demo
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.local.server import LocalServerError

METRICS = """\
# HELP embedstream_batch_tokens Tokens of a pack.
embedstream_batch_tokens_sum{model="all-MiniLM-L6-v2"} 900.0
embedstream_batch_tokens_count{model="all-MiniLM-L6-v2"} 2.0
embedstream_padding_avoided_tokens_total{model="all-MiniLM-L6-v2"} 300.0
"""


def vector_of(text: str) -> bytes:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    vector = np.random.default_rng(seed).normal(size=16)
    packed: bytes = (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
    return packed


class FakeDoor:
    """A service by the wire contract, with places where a test can make it lie."""

    max_batch_tokens = 500

    def __init__(
        self, change: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None
    ) -> None:
        self.facts = ["a fake service"]
        self.asked: list[dict[str, Any]] = []
        self.metrics = METRICS
        self._change = change or (lambda reply: [reply])

    def answer(self, record: bytes) -> list[bytes]:
        request = msgpack.unpackb(record)
        self.asked.append(request)
        reply: dict[str, Any] = {"id": request["id"]}
        if "query" in request:
            scores = [len(text) / 1000 for text in request["documents"]]
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            reply["results"] = [{"index": i, "relevance_score": scores[i]} for i in order]
        else:
            texts = request["input"] if isinstance(request["input"], list) else [request["input"]]
            reply["data"] = [
                {"index": i, "embedding": vector_of(text), "tokens": 4, "truncated": False}
                for i, text in enumerate(texts)
            ]
        return [msgpack.packb(changed) for changed in self._change(reply)]

    async def exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        on_reply: Callable[[str, bytes], bool],
        *,
        patience_s: float,
    ) -> None:
        for request_id, record in requests:
            for reply in self.answer(record):
                on_reply(request_id, reply)

    async def ask(self, request_id: str, record: bytes, *, timeout_s: float) -> bytes:
        return self.answer(record)[0]

    async def metrics_text(self) -> str:
        return self.metrics


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tuple(Document(f"word {i}", f"word {i}: meaning {'x' * i}") for i in range(40))
    questions = tuple(Question(f"what is {i}?", f"word {i}") for i in range(5))
    made = Corpus("test dictionary", "MIT", documents, questions)
    monkeypatch.setattr(demo, "load_corpus", lambda n: made)

    async def nothing_to_fetch(console: Console) -> None:
        pass

    monkeypatch.setattr(demo, "_fetch_models", nothing_to_fetch)


async def run(
    monkeypatch: pytest.MonkeyPatch, door: FakeDoor, *, terminal: bool = False
) -> tuple[ExitStatus, str]:
    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[FakeDoor]:
        yield door

    monkeypatch.setattr(demo, "_door", opened)
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=terminal)
    status = await run_demo(DemoOptions(documents=40), console=console)
    return status, output.getvalue()


async def test_a_first_answer_comes_before_all_the_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = FakeDoor()
    _, shown = await run(monkeypatch, door)
    first, query, rank = door.asked[:3]
    assert len(first["input"]) == demo.FEW and first["input"][0].startswith("word 0:")
    assert query["input"] == ["what is 0?"] and rank["query"] == "what is 0?"
    assert shown.index("A first answer, from 12 documents") < shown.index("embedding")
    assert "from the start to the first answer" in shown


async def test_a_right_service_is_shown_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDoor()
    status, shown = await run(monkeypatch, door)
    assert status is ExitStatus.OK
    lines = {
        cells[1].strip(): cells[2].strip()
        for line in shown.splitlines()
        if len(cells := line.split("│")) == 4
    }
    assert lines["documents embedded, every one answered"] == "40"
    assert lines["answered more than once"] == "0"
    assert lines["batch fill (tokens of the budget)"] == "90%"
    assert lines["padding avoided (of what padding would cost)"] == "25%"
    assert " / " in lines["RPC p50 / p99 of 50"]
    assert "Everything shown above was checked." in shown
    batches = [len(r["input"]) for r in door.asked if r["id"].startswith("doc-")]
    assert batches == [16, 16, 8]
    ids = [request["id"] for request in door.asked]
    assert len(set(ids)) == len(ids), "request ids are dedup keys: each is used once"
    reranks = [request for request in door.asked if "query" in request]
    assert len(reranks) == 6  # the first answer and five questions
    assert all(len(request["documents"]) == 10 for request in reranks)


async def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the prompt was opened")

    monkeypatch.setattr(demo, "_prompt", refuse)
    status, _ = await run(monkeypatch, FakeDoor())
    assert status is ExitStatus.OK
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a terminal to write to, none to read from
    status, _ = await run(monkeypatch, FakeDoor(), terminal=True)
    assert status is ExitStatus.OK


async def test_duplicates_are_counted_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    status, shown = await run(monkeypatch, FakeDoor(lambda reply: [reply, reply]))
    assert status is ExitStatus.OK
    assert any("answered more than once" in line and " 40 " in line for line in shown.splitlines())


def lose_one(reply: dict[str, Any]) -> list[dict[str, Any]]:
    if reply["id"] == "doc-000016":
        reply["data"].pop()
    return [reply]


def break_vector(reply: dict[str, Any]) -> list[dict[str, Any]]:
    if reply["id"] == "doc-000016":
        reply["data"][3]["embedding"] = np.full(16, np.inf, dtype="<f4").tobytes()
    return [reply]


def break_score(reply: dict[str, Any]) -> list[dict[str, Any]]:
    for result in reply.get("results", ()):
        result["relevance_score"] = float("nan")
    return [reply]


def fail_rerank(reply: dict[str, Any]) -> list[dict[str, Any]]:
    if "results" in reply:
        return [{"id": reply["id"], "error": {"code": "overloaded"}}]
    return [reply]


def wrong_id(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**reply, "id": "ask-0"}] if reply["id"].startswith("ask") else [reply]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lose_one, "1 of 40 documents were never answered"),
        (break_vector, "document 3 of doc-000016: the vector is not finite"),
        (break_score, "a rerank score is not finite"),
        (fail_rerank, "a question failed: overloaded"),
        (wrong_id, "an answer names another request"),
    ],
)
async def test_whatever_is_wrong_ends_the_demo_with_a_clear_line(
    lie: Callable[[dict[str, Any]], list[dict[str, Any]]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OperatorError, match=message) as caught:
        await run(monkeypatch, FakeDoor(lie))
    assert caught.value.exit_status is ExitStatus.ERROR
    assert "\n" not in str(caught.value)


async def test_metrics_that_say_nothing_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDoor()
    door.metrics = ""
    with pytest.raises(OperatorError, match="its metrics are broken"):
        await run(monkeypatch, door)


async def test_a_silent_broker_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDoor()

    async def silence(*_: object, **__: object) -> None:
        raise DemoBrokerError("no reply on embedstream.replies for 60 s")

    monkeypatch.setattr(door, "exchange", silence)
    with pytest.raises(OperatorError, match=r"no reply on embedstream\.replies"):
        await run(monkeypatch, door)


async def test_ctrl_c_ends_a_download_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real _fetch_models
    started, ended = threading.Event(), threading.Event()

    def endless(name: str, *, progress: Callable[[str, int, int], None]) -> None:
        try:
            while True:
                progress("downloading", 1, 2)
                started.set()
        finally:
            ended.set()

    monkeypatch.setattr("pipeline.demo.fetch.resolve_model", endless)
    monkeypatch.setattr(demo, "is_fetched", lambda model: False)
    fetching = asyncio.ensure_future(demo._fetch_models(Console(file=io.StringIO())))
    await asyncio.to_thread(started.wait, 10)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert await asyncio.to_thread(ended.wait, 10), "the thread has ended as well"


def test_without_packaged_brokers_the_demo_goes_on_in_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> str:
        raise LocalServerError("no packaged Kafka broker here; use the in-process transport")

    monkeypatch.setattr(demo, "packaged_kafka_binary", missing)
    monkeypatch.setattr(demo, "inproc_door", lambda settings: "in process")
    monkeypatch.setattr(demo, "broker_door", lambda: "brokers")
    output = io.StringIO()
    console = Console(file=output, width=200)
    assert demo._door(DemoOptions(), None, console) == "in process"
    assert "use the in-process transport" in output.getvalue()
    assert demo._door(DemoOptions(has_kafka=True), None, console) == "brokers"
    assert demo._door(DemoOptions(in_process=True), None, console) == "in process"


async def test_a_service_that_does_not_start_is_quoted() -> None:
    import sys

    command = [sys.executable, "-c", "import sys; sys.exit('embedstream: no such model')"]
    with pytest.raises(OperatorError, match="did not start: embedstream: no such model"):
        async with demo_doors.broker_door(command):
            raise AssertionError("it never becomes ready")

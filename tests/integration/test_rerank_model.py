"""A language model as reranker and as label scorer, through the whole graph in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from gpu.batch import pack, scatter
from gpu.load import make_runner_factory
from pipeline.oneoff import run_inproc
from pipeline.settings.load import Settings
from schemas.codec import decode_reply
from schemas.requests import Document, RerankRequest
from schemas.results import FailureReply, Reply
from tests.support.models_decoders import write_causal

DOCUMENTS = ["Beijing is the capital.", "Nanjing was.", "a river " * 12, "Tokyo", ""]
MSGPACK = {"content-type": b"application/msgpack"}


async def ask(running: Any, record: dict[str, Any]) -> Reply | FailureReply:
    (reply,) = await running.request(msgpack.packb(record), MSGPACK)
    answer = decode_reply(reply.body, reply.headers)
    assert isinstance(answer, Reply | FailureReply)
    return answer


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_causal(tmp_path_factory.mktemp("model") / "m")
    return {
        "judge": make_runner_factory("judge", folder, rerank_template="qwen3", multi_item=True),
        "labels": make_runner_factory("labels", folder, label_tokens=("yes", "no")),
    }


async def test_rerank_with_an_instruction(factories: dict[str, Any]) -> None:
    """A13, A15: best first, the instruction echoed, one empty document failing alone."""
    runner = factories["judge"]()
    request = RerankRequest(
        id="r", query="capital of China?", documents=tuple(map(Document, DOCUMENTS[:4])),
        instruction="Find the capital.",
    )  # fmt: skip
    batch = pack(runner.encoder.encode([request])[0].items)
    want = [float(o.scores[0]) for o in scatter(batch, runner.forward(batch))]
    async with run_inproc(Settings(), runner_factories=factories) as running:
        record = {
            "id": "r1", "task": "rerank", "model": "judge", "query": "capital of China?",
            "documents": DOCUMENTS, "instruction": "Find the capital.",
        }  # fmt: skip
        told = await ask(running, record)
        plain = await ask(running, {**record, "id": "r2", "instruction": None, "top_n": 2})
        refused = await ask(
            running,
            {"id": "r3", "task": "embed", "model": "judge", "input": ["x"]},
        )
    assert isinstance(told, Reply) and told.prompt == "Find the capital."
    ranked = [item for item in told.items if item.error is None]
    scores = [item.relevance_score for item in ranked]
    assert scores == sorted(scores, reverse=True) and len(scores) == 4
    for item in ranked:
        assert item.relevance_score == pytest.approx(want[item.index], abs=1e-5)
    (failed,) = [item for item in told.items if item.error is not None]
    assert failed.index == 4 and failed.error is not None and failed.error.code == "empty_input"
    assert isinstance(plain, Reply) and (plain.prompt or "").startswith("Given a web search query")
    assert isinstance(refused, FailureReply) and refused.error.code == "unsupported"


async def test_label_tokens_are_labels(factories: dict[str, Any]) -> None:
    async with run_inproc(Settings(), runner_factories=factories) as running:
        reply = await ask(
            running,
            {"id": "c", "task": "classify", "model": "labels", "input": ["Is it? Answer:", "x"]},
        )
    assert isinstance(reply, Reply)
    for item in reply.items:
        assert item.scores is not None
        assert set(item.scores) == {"yes", "no"}
        assert sum(item.scores.values()) == pytest.approx(1.0, abs=1e-6)


async def test_labels_of_a_request(factories: dict[str, Any]) -> None:
    """Two requests with other labels and one without, at the same time: each its own, by name."""
    record = {"task": "score", "model": "judge", "query": "capital?", "documents": DOCUMENTS}
    async with run_inproc(Settings(), runner_factories=factories) as running:
        named, ids, own, refused = await asyncio.gather(
            ask(running, {**record, "id": "s1", "labels": ["yes", "no", "x"]}),
            ask(running, {**record, "id": "s2", "labels": [5, 6], "raw_scores": True}),
            ask(running, {**record, "id": "s3"}),
            ask(running, {**record, "id": "s4", "labels": ["yes", "two words"]}),
        )
    assert isinstance(named, Reply) and isinstance(ids, Reply) and isinstance(own, Reply)
    for item in named.items[:4]:
        assert item.scores is not None and list(item.scores) == ["yes", "no", "x"]
        assert sum(item.scores.values()) == pytest.approx(1.0, abs=1e-6)
        assert item.relevance_score is None
    for item in ids.items[:4]:
        assert item.scores is not None and list(item.scores) == ["5", "6"]
    for item in own.items[:4]:
        assert item.relevance_score is not None and item.scores is None
    for reply in (named, ids, own):
        assert [item.index for item in reply.items] == [0, 1, 2, 3, 4]
        failed = reply.items[4].error  # the empty document
        assert failed is not None and failed.code == "empty_input"
    assert isinstance(refused, FailureReply) and refused.error.path == "$.labels[1]"
    assert "two words" not in refused.error.message

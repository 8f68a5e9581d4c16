"""Token ids and labels through the client, sync and async, against real models behind a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedstream_client import AsyncClient, Client
from embedstream_client.errors import BadReply, EmbedstreamError, InvalidRequest, Unsupported
from gpu.load import make_runner_factory
from tests.support.client import ScriptedService, service
from tests.support.models import write_model
from tests.support.models_decoders import chat_tokenizer, write_causal
from tests.support.servers import ServerInfo, redis_ladder, unique

pytestmark = pytest.mark.redis

QUERY, DOCUMENTS = "hello world", ["the capital of china", "x", "a river"]


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


@pytest.fixture
def stream() -> str:
    return unique("embedstream.test")


@pytest.fixture
def url(redis_info: ServerInfo, stream: str) -> str:
    return f"redis://{redis_info.address}/0?stream={stream}"


@pytest.fixture
def source(redis_info: ServerInfo, stream: str) -> str:
    return f"redis://{redis_info.address}/{stream}"


async def test_ids_of_query_and_documents_score_as_their_texts(
    url: str, source: str, tmp_path: Path
) -> None:
    """S11: lists, tuples and numpy arrays of ids, for `rerank` and `score`; ids beside texts and maps."""
    from transformers import AutoTokenizer

    folder = write_model(tmp_path / "m", "bert", labels=1)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    query, *ids = (tokenizer.encode(t, add_special_tokens=False) for t in (QUERY, *DOCUMENTS))
    as_ids: list[Any] = [ids[0], tuple(ids[1]), np.array(ids[2])]
    async with service(source, runner=make_runner_factory("fake", folder)):
        async with AsyncClient.from_url(url) as client:
            want = (await client.score(QUERY, DOCUMENTS)).scores
            assert (await client.score(query, as_ids)).scores == want
            mixed = [ids[0], {"id": "second", "text": DOCUMENTS[1]}, DOCUMENTS[2]]
            assert (await client.score(np.array(query), mixed)).scores == want
            ranking = await client.rerank(query, mixed)
            assert [r.score for r in ranking] == sorted(want, reverse=True)
            assert {r.document for r in ranking} == {"", *DOCUMENTS[1:]}
            for wrong, path in (
                ((query, [ids[0], [1, 2.5]]), "$.documents[1]"),
                (([True], DOCUMENTS), "$.query"),
                ((None, DOCUMENTS), "$.query"),
                ((query, [["two", "texts"]]), "$.documents[0]"),
                ((query, [[10**9]]), "$.documents[0]"),
            ):
                error = await _error_of(client.score(*wrong))  # type: ignore[arg-type]
                assert isinstance(error, InvalidRequest) and (error.path or "").startswith(path)
            unknown = await _error_of(client.score(QUERY, DOCUMENTS, labels=["yes"]))
            assert isinstance(unknown, Unsupported) and unknown.path == "$.labels"

        def blocking() -> list[float]:
            with Client.from_url(url) as client:
                ranked = client.rerank(query, as_ids)
                assert [r.score for r in ranked] == sorted(want, reverse=True)
                return client.score(query, as_ids).scores

        assert await asyncio.to_thread(blocking) == want


async def test_labels_give_a_score_each(url: str, source: str, tmp_path: Path) -> None:
    """S9: texts or ids, probabilities or logits; what is no label is refused with its path."""
    folder = write_causal(tmp_path / "m")
    ids = [chat_tokenizer()[0].token_to_id(text) for text in ("yes", "no")]
    factory = make_runner_factory(
        "fake", folder, rerank_template="plain", label_tokens=("yes", "no")
    )
    async with service(source, runner=factory):
        async with AsyncClient.from_url(url) as client:
            own = await client.score(QUERY, DOCUMENTS)
            with pytest.raises(ValueError, match="see score"):
                _ = own[0].scores["yes"]  # there is one score
            named = await client.score(QUERY, DOCUMENTS, labels=["yes", "no"])
            raw = await client.score(QUERY, DOCUMENTS, labels=np.array(ids), raw_scores=True)  # type: ignore[arg-type]
            for one, score, logits in zip(named, own, raw, strict=True):
                assert list(one.scores) == ["yes", "no"]
                assert list(logits.scores) == [str(i) for i in ids]
                assert one.scores["yes"] == pytest.approx(score.score, abs=1e-6)
                odds = logits.scores[str(ids[0])] - logits.scores[str(ids[1])]
                assert one.scores["yes"] == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-6)
                with pytest.raises(ValueError, match="see scores"):
                    _ = one.score
            for labels, path in (
                ([], "$.labels"), (["yes", "two words"], "$.labels[1]"), (["yes", 7], "$.labels[1]"),
                ("yes", "$.labels"), (["yes", "yes"], "$.labels"),
            ):  # fmt: skip
                error = await _error_of(client.score(QUERY, DOCUMENTS, labels=labels))  # type: ignore[arg-type]
                assert isinstance(error, InvalidRequest) and error.path == path, labels

        def blocking() -> list[dict[str, float]]:
            with Client.from_url(url) as client:
                found = client.score(QUERY, DOCUMENTS, labels=["yes", "no"])
                return [one.scores for one in found]

        assert await asyncio.to_thread(blocking) == [one.scores for one in named]


async def test_a_reply_without_the_labels_is_refused(
    redis_info: ServerInfo, stream: str, url: str
) -> None:
    """An older service, which would answer one score where labels were asked for."""
    script = ScriptedService(redis_info.address, stream)
    reply = {
        "task": "score", "model": {"name": "m", "fingerprint": "f", "dtype": "float32"},
        "results": [{"index": 0, "relevance_score": 0.5}], "n": 1,
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }  # fmt: skip
    async with AsyncClient.from_url(url) as client, asyncio.TaskGroup() as group:
        asking = group.create_task(_error_of(client.score("q", ["d"], labels=["yes"])))
        request = await script.request()
        assert request["labels"] == ["yes"]
        await script.reply(request, reply)
        assert isinstance(await asking, BadReply)
        plain = group.create_task(_score_of(client))
        await script.reply(await script.request(), reply)
        assert await plain == 0.5
    await script.aclose()


async def _error_of(call: Any) -> EmbedstreamError:
    with pytest.raises(EmbedstreamError) as caught:
        await call
    return caught.value


async def _score_of(client: AsyncClient) -> float:
    return (await client.score("q", ["d"]))[0].score


async def test_conversations_for_reward_models(url: str, source: str, tmp_path: Path) -> None:
    """S12: messages beside a text, sync and async; what is no message is refused with its path."""
    folder = write_causal(tmp_path / "m", "qwen2", labels=1)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    talk = {
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    }
    async with service(source, runner=make_runner_factory("fake", folder)):
        async with AsyncClient.from_url(url) as client:
            found = await client.classify([talk, "a text"], raw_scores=True)
            (alone,) = await client.classify(talk, raw_scores=True)
            assert found[0].scores == alone.scores != found[1].scores
            assert list(alone.scores) == ["LABEL_0"]
            for wrong, path in (
                ([], ""), ("hi", ""), (["hi"], "[0]"), ([{"role": "user"}], "[0].content"),
                ([{"role": "tool", "content": "x"}], "[0].role"),
                ([{"role": "user", "content": "x", "name": "y"}], "[0].name"),
            ):  # fmt: skip
                error = await _error_of(client.classify(["x", {"messages": wrong}]))
                assert error.path == f"$.input[1].messages{path}", wrong
            refused = await _error_of(client.embed(talk))
            assert isinstance(refused, Unsupported) and refused.path == "$.input[0].messages"

        def blocking() -> dict[str, float]:
            with Client.from_url(url) as client:
                return client.classify(talk, raw_scores=True)[0].scores

        assert await asyncio.to_thread(blocking) == alone.scores

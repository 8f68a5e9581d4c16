"""The real MiniLM encoder and reranker against their own libraries, and against themselves in a crowd."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.load import make_runner_factory
from schemas.errors import TooLong
from schemas.requests import Document, EmbedRequest, RerankRequest, ScoreRequest, Text
from tests.support.models import WORDS

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

Folder = Callable[[str], Path]
BERLIN = "How many people live in Berlin?"
PASSAGES = (
    "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 "
    "square kilometers.",
    "Berlin is well known for its museums.",
)


@pytest.fixture(scope="module")
def minilm(packaged_model: Folder) -> Any:
    return make_runner_factory("minilm", packaged_model("all-MiniLM-L6-v2"))()


@pytest.fixture(scope="module")
def reranker(packaged_model: Folder) -> Any:
    return make_runner_factory("reranker", packaged_model("ms-marco-MiniLM-L-12-v2"))()


@pytest.fixture(scope="module")
def st(packaged_model: Folder) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(packaged_model("all-MiniLM-L6-v2")), device="cpu")


def mixed_texts(n: int, seed: int = 0) -> list[str]:
    """Texts of 1 to about 300 words, some with odd characters, some twice."""
    rng = random.Random(seed)
    texts = ["trust", "5.2", "a", "Ärger, 漢字 und 🙂!", "importance"]
    while len(texts) < n:
        words = rng.choices(WORDS, k=max(1, int(rng.lognormvariate(3, 1.2))))
        texts.append(" ".join(words[:300]))
    return [*texts[: n - 2], texts[7], texts[0]]


def encode(runner: Any, texts: list[str], **fields: Any) -> list[Any]:
    request = EmbedRequest(id="r", input=tuple(Text(t) for t in texts), **fields)
    return list(runner.encoder.encode([request])[0].items)


def dense(runner: Any, items: list[Any]) -> np.ndarray:
    batch = pack(items)
    return np.stack([o.dense for o in scatter(batch, runner.forward(batch))])


def test_minilm_equals_sentence_transformers(minilm: Any, st: Any) -> None:
    """A06, A07, A10, J07: 160 mixed texts, some past 256 tokens: max abs 1e-5, cosine 1 - 1e-6."""
    texts = mixed_texts(160)
    items = encode(minilm, texts, truncate="right")
    got = np.concatenate([dense(minilm, items[i : i + 16]) for i in range(0, len(items), 16)])
    want = st.encode(texts)
    assert np.abs(got - want).max() <= 1e-5
    assert (got.astype(np.float64) * want.astype(np.float64)).sum(1).min() >= 1 - 1e-6
    assert any(item.truncated for item in items) and minilm.info.max_tokens == 256


def test_minilm_gives_the_same_bytes_in_any_batch(minilm: Any) -> None:
    """A01, A02, A06: alone, and in random packs of 1 to 30 neighbours: equal bit for bit."""
    items = encode(minilm, mixed_texts(60, seed=3), truncate="right")
    alone = [dense(minilm, [item])[0] for item in items]
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(3):
        order = list(rng.permutation(len(items)))
        while order:
            n = int(rng.integers(1, 31))
            part, order = order[:n], order[n:]
            for i, row in zip(part, dense(minilm, [items[i] for i in part]), strict=True):
                assert np.array_equal(row, alone[i]), items[i].n_tokens
                compared += 1
    assert compared == 180 and "depend" not in " ".join(minilm.info.notes)


def test_all_of_256_tokens_are_used(minilm: Any, st: Any) -> None:
    """A23: the folder's tokenizer.json pads and cuts to 128; token 200 still counts."""
    words = ["the"] * 254
    other = [*words[:200], "volcano", *words[201:]]
    lengths = [1, 126, 127, 198, 254]
    items = encode(minilm, [" ".join(words[:n]) for n in lengths])
    assert [item.n_tokens for item in items] == [n + 2 for n in lengths]
    got = dense(minilm, encode(minilm, [" ".join(words), " ".join(other)]))
    assert float(got[0] @ got[1]) < 0.999
    assert np.abs(got - st.encode([" ".join(words), " ".join(other)])).max() <= 1e-5


def test_exactly_the_limit_is_answered(minilm: Any) -> None:
    """B05, B06."""
    items = encode(minilm, ["the " * n for n in (253, 254, 255)])
    assert [getattr(item, "n_tokens", None) for item in items] == [255, 256, None]
    assert isinstance(items[2], TooLong) and items[2].given == 257
    assert np.isfinite(dense(minilm, items[:2])).all()


def test_the_reranker_gives_the_published_logits(reranker: Any) -> None:
    """A16: 9.085 and -3.934 on the dequantised weights; sigmoid by default, order unchanged."""
    logits = _score(reranker, raw_scores=True)
    assert abs(logits[0] - 9.085) <= 1e-3 and abs(logits[1] + 3.934) <= 1e-3
    scores = _score(reranker, raw_scores=False)
    assert np.abs(scores - 1 / (1 + np.exp(-logits))).max() <= 1e-6
    assert ((scores >= 0) & (scores <= 1)).all()


def _score(runner: Any, **fields: Any) -> np.ndarray:
    request = ScoreRequest(
        id="r", query=BERLIN, documents=tuple(Document(p) for p in PASSAGES), **fields
    )
    batch = pack(runner.encoder.encode([request])[0].items)
    return np.array([o.scores[0] for o in scatter(batch, runner.forward(batch))])


@pytest.mark.parametrize("side", ["right", "left"])
def test_cut_pairs_score_as_transformers_does(
    reranker: Any, packaged_model: Folder, side: str
) -> None:
    """A19, A20: one document of 600 tokens among short ones, cut on either side; the reference is
    transformers on the ids and segment ids of `only_second` truncation."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = packaged_model("ms-marco-MiniLM-L-12-v2")
    long = " ".join(f"{w} {PASSAGES[i % 2]}" for i, w in enumerate(WORDS * 2))
    documents = [PASSAGES[0], long, PASSAGES[1]]
    request = RerankRequest(
        id="r",
        query=BERLIN,
        documents=tuple(Document(d) for d in documents),
        truncate=side,  # type: ignore[arg-type]
        raw_scores=True,
    )
    items = reranker.encoder.encode([request])[0].items
    assert [item.truncated for item in items] == [False, True, False]
    batch = pack(items)
    got = [float(o.scores[0]) for o in scatter(batch, reranker.forward(batch))]
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for document, score in zip(documents, got, strict=True):
        inputs = tokenizer(
            BERLIN, document, truncation="only_second", max_length=512, return_tensors="pt"
        )
        with torch.inference_mode():
            assert abs(float(model(**inputs).logits[0, 0]) - score) <= 1e-4


def test_a_score_does_not_depend_on_its_neighbours(reranker: Any) -> None:
    """A17, A21: the same bytes alone and among others; as many distinct scores as distinct pairs."""
    documents = [f"{PASSAGES[i % 2]} {' '.join(WORDS[: i % 40])} {i}" for i in range(24)]

    def scores(part: list[str]) -> list[np.ndarray]:
        request = RerankRequest(
            id="r", query=BERLIN, documents=tuple(Document(d) for d in part), raw_scores=True
        )
        batch = pack(reranker.encoder.encode([request])[0].items)
        return [o.scores for o in scatter(batch, reranker.forward(batch))]

    together = scores(documents)
    for document, score in zip(documents, together, strict=True):
        assert np.array_equal(scores([document])[0], score)
    assert len({float(score[0]) for score in together}) == len(set(documents))

"""Multi-item scoring: every item as if it were alone with the query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.load import make_runner_factory
from schemas.requests import Document, RerankRequest, ScoreRequest
from tests.support.models_decoders import END, write_causal

DOCUMENTS = [
    "The capital of China is Beijing.", "Tokyo", "a river. " * 9, "x", "Tokyo", "\n two\nlines", "1 2 3",
]  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"rerank_template": "qwen3"},
    "bge-gemma": {"rerank_template": "bge-gemma"},
    "plain": {"rerank_template": "plain", "label_tokens": ("yes", "no")},
    "own": {
        "rerank_template": "<|im_start|>{instruction}\nQ: {query}\nD: {document}\n<|im_end|>",
        "label_tokens": ("yes",),
    },
}


def items_of(runner: Any, query: str, documents: list[str], kind: Any = RerankRequest) -> list[Any]:
    request = kind(id="r", query=query, documents=tuple(Document(d) for d in documents))
    return list(runner.encoder.encode([request])[0].items)


def run(runner: Any, items: list[Any]) -> np.ndarray:
    batch = pack(items)
    return np.array([o.scores[0] for o in scatter(batch, runner.forward(batch))])


@pytest.mark.parametrize("template", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "phi3"])
def test_every_item_scores_as_if_alone(tmp_path: Path, family: str, template: str) -> None:
    """One query and 7 documents in one sequence equal 7 sequences to 1e-5, item by item."""
    fields = {"sliding_window": None} if family == "phi3" else {}
    folder = write_causal(tmp_path / "m", family, bos=True, **fields)
    settings = SETTINGS[template]
    joined = make_runner_factory("m", folder, multi_item=True, **settings)()
    single = make_runner_factory("m", folder, **settings)()
    assert not any("multi_item is off" in note for note in joined.info.notes)
    for kind in (RerankRequest, ScoreRequest):
        items = items_of(joined, "capital of China?", DOCUMENTS, kind)
        want = np.array([run(single, [item])[0] for item in items])
        got = run(joined, items)
        assert np.abs(got - want).max() <= 1e-5, (got, want)
    assert np.ptp(want) > 1e-3


def test_a_classifier_reads_the_same_token_in_a_joined_sequence(tmp_path: Path) -> None:
    """The last token that is not the pad token, where a prompt closes pairs with just that token."""
    folder = write_causal(tmp_path / "m", labels=1)
    template = f"{{query}}{{cut}}{{document}}{END}"
    joined = make_runner_factory("m", folder, multi_item=True, rerank_template=template)()
    single = make_runner_factory("m", folder, rerank_template=template)()
    assert joined._sharing is not None
    items = items_of(joined, "capital of China?", DOCUMENTS)
    want = [run(single, [item])[0] for item in items]
    assert np.abs(run(joined, items) - want).max() <= 1e-5


def test_the_query_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 documents, two queries and a stranger: rows that the model computes, counted."""
    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, multi_item=True, rerank_template="qwen3")()
    first = items_of(runner, "capital of China?", DOCUMENTS)
    second = items_of(runner, "a river", DOCUMENTS[:2])
    stranger = items_of(runner, "one alone", ["x"])
    seen: list[int] = []
    inner = runner._sharing.packed.run

    def counting(batch: Any, *args: Any) -> Any:
        seen.append(batch.n_tokens)
        return inner(batch, *args)

    monkeypatch.setattr(runner._sharing.packed, "run", counting)
    mixed = [*first[:3], *second, *stranger, *first[3:]]
    got = run(runner, mixed)
    all_tokens = sum(item.n_tokens for item in mixed)
    saved = 6 * first[0].extras["n_shared"] + second[0].extras["n_shared"]
    assert seen == [all_tokens - saved] and saved > all_tokens // 2
    for item, score in zip(mixed, got, strict=True):
        assert abs(run(runner, [item])[0] - score) <= 1e-5


def test_long_joined_sequences_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The square mask of a joined sequence is bounded."""
    from gpu.forward import shared_prefix

    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, multi_item=True, rerank_template="qwen3")()
    items = items_of(runner, "capital of China?", DOCUMENTS)
    want = run(runner, items)
    monkeypatch.setattr(shared_prefix, "MAX_JOINED", items[0].n_tokens + 20)
    groups = shared_prefix._groups(pack(items))
    assert len(groups) > 1
    assert np.abs(run(runner, items) - want).max() <= 1e-5


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [("mistral", {}, "sliding window"), ("gemma2", {}, "sliding window")],
)
def test_where_distances_matter_items_go_one_by_one(
    tmp_path: Path, family: str, fields: dict[str, Any], why: str
) -> None:
    """A window counts tokens in between, which a joined sequence has more of; said in the notes."""
    folder = write_causal(tmp_path / "m", family, bos=True, **fields)
    runner = make_runner_factory("m", folder, multi_item=True, rerank_template="bge-gemma")()
    assert runner._sharing is None
    assert any("multi_item is off" in n and why in n for n in runner.info.notes), runner.info.notes
    assert len(run(runner, items_of(runner, "q", DOCUMENTS))) == len(DOCUMENTS)


def test_a_bad_item_in_a_joined_sequence_costs_itself(tmp_path: Path) -> None:
    """B12: an id past the vocabulary in one document; its neighbours keep their scores."""
    import dataclasses

    from schemas.errors import InvalidRequest

    folder = write_causal(tmp_path / "m")
    runner = make_runner_factory("m", folder, multi_item=True, rerank_template="qwen3")()
    items = items_of(runner, "capital of China?", DOCUMENTS)
    want = run(runner, items)
    ids = items[2].input_ids.copy()
    ids[-1] = 10**6
    items[2] = dataclasses.replace(items[2], input_ids=ids)
    batch = pack(items)
    outcomes = scatter(batch, runner.forward(batch))
    assert isinstance(outcomes[2], InvalidRequest)
    for i, outcome in enumerate(outcomes):
        if i != 2:
            assert abs(float(outcome.scores[0]) - want[i]) <= 1e-5

"""Layerwise MiniCPM rerankers: equal to FlagEmbedding's formula at every layer, in its words around a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.requests import Document, RerankRequest
from tests.support.models import edit_json, write_model
from tests.support.models_decoders import END, write_layerwise
from tests.support.references import layerwise_score

QUERY = "What is the capital of China?"
DOCUMENTS = [
    "The capital of China is Beijing.",
    "Tokyo",
    "a river. " * 9,
    END,
    "\n two lines\nof text",
]
ASK = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layerwise(tmp_path_factory.mktemp("layerwise") / "m")


def asked(runner: Any, **fields: Any) -> list[Any]:
    documents = tuple(map(Document, DOCUMENTS))
    request = RerankRequest(id="r", query=QUERY, documents=documents, raw_scores=True, **fields)
    return list(runner.encoder.encode([request])[0].items)


def scores(runner: Any, items: list[Any]) -> list[bytes]:
    batch = pack(items)
    return [one.scores.tobytes() for one in scatter(batch, runner.forward(batch))]


@pytest.mark.parametrize(("cut", "multi"), [("auto", True), (2, True), (3, True), (3, False)])
def test_scores_are_those_of_the_layer_that_is_asked_for(
    tmp_path: Path, cut: Any, multi: bool
) -> None:
    """A15, A06: alone and in any pack the same bytes."""
    folder = write_layerwise(tmp_path / "m", multi=multi)
    runner = make_runner_factory("m", folder, cutoff_layer=cut)()
    layer = 4 if cut == "auto" else cut
    assert runner.info.packed, runner.info.notes
    assert f"the score is read behind layer {layer} of 4" in runner.info.notes
    assert runner.info.tasks == {"rerank", "score"}
    items = asked(runner)
    got = np.array([np.frombuffer(one, np.float32)[0] for one in scores(runner, items)])
    want = np.array([layerwise_score(folder, item.input_ids, layer) for item in items])
    assert np.abs(got - want).max() <= 1e-5
    alone = [scores(runner, [item])[0] for item in items]
    assert scores(runner, items) == alone
    assert scores(runner, items[::-1]) == alone[::-1]


def test_pairs_are_written_as_flagembedding_writes_them(folder: Path) -> None:
    """Start, "A: " and the query, line break, "B: " and the passage, line break, the question: each on its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        found = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(found)

    runner = make_runner_factory("m", folder)()
    for item, document in zip(asked(runner), DOCUMENTS, strict=True):
        line = ids("\n")
        want = [tokenizer.bos_token_id, *ids(f"A: {QUERY}"), *line, *ids(f"B: {document}"), *line]
        assert item.input_ids.tolist() == [*want, *ids(ASK)]


def test_the_layer_is_part_of_the_fingerprint_and_the_rest_is_not_loaded(folder: Path) -> None:
    """K09"""
    made = [make_runner_factory("m", folder, cutoff_layer=n)() for n in (2, 4)]
    assert made[0].info.fingerprint != made[1].info.fingerprint
    assert [len(runner._forward.base.layers) for runner in made] == [2, 4]


@pytest.mark.parametrize(
    ("change", "setting", "words"),
    [
        ({}, {"cutoff_layer": 1}, "cutoff_layer = 1: this model has heads behind 2 to 4"),
        ({}, {"cutoff_layer": 5}, "cutoff_layer = 5"),
        ({}, {"pooling": "mean"}, "pooling is not for a layerwise reranker"),
        ({}, {"label_tokens": ("yes", "no")}, "label_tokens is not for"),
        ({"head_type": "complex"}, {}, "every token of the vocabulary"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope_scaling"),
        ({"embedding_multiplier": 12}, {}, "embedding_multiplier .*ignore_keys"),
        ({"num_hidden_layers": 5}, {}, r"missing tensors: .*layers\.4"),
        ({"num_hidden_layers": 3}, {}, r"layers\.3|lm_head\.2"),
        ({"architectures": ["MiniCPMForCausalLM"]}, {}, "only the layerwise reranker"),
    ],
)
def test_what_would_change_a_score_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], setting: dict[str, Any], words: str
) -> None:
    folder = write_layerwise(tmp_path / "m")
    edit_json(folder / "config.json", **change)
    with pytest.raises(ModelLoadError, match=words):
        make_runner_factory("m", folder, **setting)()


def test_the_layer_is_a_setting_of_these_models_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert")
    with pytest.raises(ModelLoadError, match="cutoff_layer is for layerwise rerankers"):
        load_spec(folder, cutoff_layer=2)

"""Bidirectional Llamas (NVIDIA's llama_bidirec): equal to the formula of their code, over transformers' Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.requests import ClassifyRequest, Document, EmbedRequest, RerankRequest, Text
from tests.support.models import edit_json, write_bidirectional, write_model
from tests.support.references import bidirectional_scores, bidirectional_states

TEXTS = ["hello world", "kafka", "the capital of china is beijing", "x", "a river " * 9]
TEMPLATE = "question:{query} \n \n passage:{document}"


def expected_scores(folder: Path, items: list[Any], pooling: str, temperature: float) -> np.ndarray:
    return np.stack(
        [bidirectional_scores(folder, item.input_ids, pooling, temperature) for item in items]
    )


def computed(runner: Any, items: list[Any]) -> list[np.ndarray]:
    batch = pack(items)
    found = scatter(batch, runner.forward(batch))
    return [one.scores if one.dense is None else one.dense for one in found]


def same_bytes(runner: Any, items: list[Any]) -> None:
    alone = [computed(runner, [item])[0].tobytes() for item in items]
    assert [one.tobytes() for one in computed(runner, items)] == alone
    assert [one.tobytes() for one in computed(runner, items[::-1])] == alone[::-1]


@pytest.mark.parametrize(
    ("pooling", "temperature"), [(None, None), ("avg", 0.5), ("last", 1.0), ("cls", 2.0)]
)
def test_a_bidirectional_reranker_equals_its_own_formula(
    tmp_path: Path, pooling: str | None, temperature: float | None
) -> None:
    """A15, A06: in the words that its card puts around a pair, the logit as it comes."""
    folder = write_bidirectional(tmp_path / "m", labels=1, pooling=pooling, temperature=temperature)
    runner = make_runner_factory("m", folder, rerank_template=TEMPLATE)()
    assert runner.info.packed and "attention is bidirectional" in runner.info.notes
    request = RerankRequest(
        id="r", query="a capital?", documents=tuple(map(Document, TEXTS)), raw_scores=True
    )
    items = list(runner.encoder.encode([request])[0].items)
    got = np.stack(computed(runner, items))
    want = expected_scores(folder, items, pooling or "avg", temperature or 1.0)
    assert np.abs(got - want).max() <= 1e-5
    same_bytes(runner, items)


def test_a_bidirectional_classifier_of_several_labels(tmp_path: Path) -> None:
    folder = write_bidirectional(tmp_path / "m", labels=3, pooling="avg")
    runner = make_runner_factory("m", folder)()
    request = ClassifyRequest(id="r", input=tuple(map(Text, TEXTS)), raw_scores=True)
    items = list(runner.encoder.encode([request])[0].items)
    want = expected_scores(folder, items, "avg", 1.0)
    assert np.abs(np.stack(computed(runner, items)) - want).max() <= 1e-5


@pytest.mark.parametrize("modules", [False, True])
def test_a_bidirectional_embedder_pools_as_its_folder_says(tmp_path: Path, modules: bool) -> None:
    """By modules.json, else by `pooling` of its config."""
    named = {"pooling": "mean", "normalize": False} if modules else {}
    folder = tmp_path / "m"
    if modules:
        write_model(folder, "llama", **named)
        edit_json(folder / "config.json", model_type="llama_bidirec", pooling="last")
    else:
        write_bidirectional(folder, pooling="avg")
    runner = make_runner_factory("m", folder)()
    request = EmbedRequest(id="r", input=tuple(map(Text, TEXTS)))
    items = list(runner.encoder.encode([request])[0].items)
    want = np.stack(
        [bidirectional_states(folder, item.input_ids).mean(0).numpy() for item in items]
    )
    got = np.stack(computed(runner, items))
    if runner.info.normalized:
        want /= np.linalg.norm(want, axis=1, keepdims=True)
    assert np.abs(got - want).max() <= 1e-5
    same_bytes(runner, items)


def test_what_is_said_about_causality_counts(tmp_path: Path) -> None:
    """`is_causal` of the config, and the setting above it."""
    folder = write_bidirectional(tmp_path / "m", pooling="avg")
    assert load_spec(folder).causal is False
    assert load_spec(folder, causal=True).causal is True
    edit_json(folder / "config.json", is_causal=True)
    assert load_spec(folder).causal is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pooling": "colbert"}, "pooling = 'colbert'"),
        ({"temperature": 0}, "temperature = 0 is not above 0"),
        ({"scale_of_the_moon": 2}, r"scale_of_the_moon .*ignore_keys"),
    ],
)
def test_a_bidirectional_llama_with_another_key_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_bidirectional(tmp_path / "m", labels=1)
    edit_json(folder / "config.json", **change)
    with pytest.raises(ModelLoadError, match=words):
        load_spec(folder)

"""GTE in its first form (model type `new`): equal to the formula of its own code, over transformers' Gte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.requests import ClassifyRequest, EmbedRequest, Text
from tests.support.models import edit_json, write_new
from tests.support.references import new_logits, new_states

TEXTS = ["hello world", "kafka", "the capital of china is beijing", "x", "a river " * 9]


def computed(runner: Any, items: list[Any]) -> list[np.ndarray]:
    batch = pack(items)
    found = scatter(batch, runner.forward(batch))
    return [one.scores if one.dense is None else one.dense for one in found]


@pytest.mark.parametrize("scaling", [None, 2.0, 8.0])
def test_vectors_equal_its_own_formula(tmp_path: Path, scaling: float | None) -> None:
    """A10, A06: NTK frequencies at every length, and the same bytes alone and in any pack."""
    folder = write_new(tmp_path / "m", scaling=scaling, pooling="cls", normalize=False)
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed, runner.info.notes
    request = EmbedRequest(id="r", input=tuple(map(Text, TEXTS)))
    items = list(runner.encoder.encode([request])[0].items)
    got = computed(runner, items)
    for item, row in zip(items, got, strict=True):
        assert np.abs(row - new_states(folder, item.input_ids)[0].numpy()).max() <= 1e-5
    alone = [computed(runner, [item])[0].tobytes() for item in items]
    assert [one.tobytes() for one in got] == alone
    assert [one.tobytes() for one in computed(runner, items[::-1])] == alone[::-1]


def test_a_classifier_equals_its_own_formula(tmp_path: Path) -> None:
    folder = write_new(tmp_path / "m", labels=3)
    runner = make_runner_factory("m", folder)()
    request = ClassifyRequest(id="r", input=tuple(map(Text, TEXTS)), raw_scores=True)
    items = list(runner.encoder.encode([request])[0].items)
    for item, row in zip(items, computed(runner, items), strict=True):
        assert np.abs(row - new_logits(folder, item.input_ids)).max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}, "mixed_b"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "dynamic"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({"logn_attention_scale": True}, "logn_attention_scale"),
        ({"scale_of_the_moon": 2}, r"scale_of_the_moon .*ignore_keys"),
    ],
)
def test_another_form_of_it_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_new(tmp_path / "m")
    edit_json(folder / "config.json", **change)
    with pytest.raises(ModelLoadError, match=words):
        make_runner_factory("m", folder)()

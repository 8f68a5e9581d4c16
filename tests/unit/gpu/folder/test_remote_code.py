"""Model types that only code in the folder knows: refused, or trusted, checked, and padded if need be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from tests.support.models import edit_json, write_model

# A BERT under another name, whose attention is its own and knows nothing of the interface.
OWN_ATTENTION = """
import torch
from transformers import BertConfig, BertModel


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnModel(BertModel):
    config_class = OwnConfig
    _supports_sdpa = False

    def __init__(self, config, add_pooling_layer=True):
        super().__init__(config, add_pooling_layer)
        for layer in self.encoder.layer:
            layer.attention.self.forward = attend(layer.attention.self)


def attend(module):
    def forward(hidden_states, attention_mask=None, *args, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
        q, k, v = (
            p(hidden_states).view(shape).transpose(1, 2)
            for p in (module.query, module.key, module.value)
        )
        scores = q @ k.transpose(-1, -2) * module.attention_head_size**-0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(hidden_states.shape)
        return out, None

    return forward
"""


def write_remote(folder: Path, code: str = OWN_ATTENTION, pooling: str | None = "mean") -> Path:
    write_model(folder, "bert", pooling=pooling)
    (folder / "modeling_own.py").write_text(code)
    edit_json(
        folder / "config.json",
        model_type="own_bert",
        architectures=["OwnModel"],
        auto_map={
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModel": "modeling_own.OwnModel",
        },
    )
    return folder


def test_code_in_a_folder_is_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    folder = write_remote(tmp_path / "m", "raise SystemExit('this must not run')")
    with pytest.raises(ModelLoadError, match=r"own_bert.*trust_remote_code = true"):
        make_runner_factory("m", folder)()


def test_trusted_code_that_bypasses_the_interface_runs_padded_and_right(tmp_path: Path) -> None:
    """B09: the self-check finds 0 attention calls; padded vectors are those of one item alone."""
    folder = write_remote(tmp_path / "m")
    runner = make_runner_factory("m", folder, trust_remote_code=True)()
    told = " ".join(runner.info.notes)
    assert runner.info.packed is False and "attention was reached 0 times" in told
    assert "Python code of the model folder runs" in told
    plain = make_runner_factory("m", write_model(tmp_path / "plain", "bert"))()
    rng = np.random.default_rng(0)
    items = [EncodedItem(rng.integers(5, 50, n).astype(np.int32)) for n in (1, 3, 17, 40, 40, 64)]
    batch = pack(items)
    for got, expected in zip(
        scatter(batch, runner.forward(batch)), scatter(batch, plain.forward(batch)), strict=True
    ):
        assert isinstance(got, ItemResult) and isinstance(expected, ItemResult)
        assert np.abs(got.dense - expected.dense).max() <= 1e-5  # type: ignore[operator]


def test_trusted_code_has_to_name_its_pooling(tmp_path: Path) -> None:
    folder = write_remote(tmp_path / "m", pooling=None)
    with pytest.raises(ModelLoadError, match="names no pooling"):
        make_runner_factory("m", folder, trust_remote_code=True)()

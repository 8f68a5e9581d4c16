"""NV-Embed on a seeded tiny folder, against the published formula written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.folder.read import load_spec
from gpu.load import make_runner_factory
from schemas.requests import EmbedRequest, Text
from tests.support.models import edit_json
from tests.support.models_nvembed import INSTRUCTION, nvembed_reference, write_nvembed

TEXTS = ("a river of text", "kafka", "the stream of one broker in the queue of two topics", "x")
TRUSTED = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nvembed(tmp_path_factory.mktemp("nv") / "m")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    return make_runner_factory("nv", folder, **TRUSTED)()


def vectors(runner: Any, *texts: str, **fields: Any) -> list[np.ndarray]:
    request = EmbedRequest(id="r", input=tuple(map(Text, texts)), **fields)
    items = runner.encoder.encode([request])[0].items
    batch = pack(list(items))
    out = scatter(batch, runner.forward(batch))
    assert all(isinstance(o, ItemResult) for o in out), out
    return [o.dense for o in out]


@pytest.mark.parametrize("prompt", [None, "query"])
def test_nvembed_equals_the_published_formula(
    runner: Any, folder: Path, prompt: str | None
) -> None:
    """A11, A14: bidirectional without a window, latent attention, masked instruction, one end token."""
    told = INSTRUCTION if prompt else ""
    for text, got in zip(TEXTS, vectors(runner, *TEXTS, prompt_name=prompt), strict=True):
        expected = nvembed_reference(folder, text, told)
        assert np.abs(got - expected).max() <= 1e-5
        assert got @ expected >= 1 - 1e-6
    (item,) = runner.encoder.encode([EmbedRequest(id="r", input=(Text("x"),))])[0].items
    end = runner.encoder._tokenizer.token_to_id("</s>")
    assert list(item.input_ids).count(end) == 1 and item.input_ids[-1] == end


def test_the_same_bytes_alone_and_in_any_batch(runner: Any) -> None:
    """A06: latent attention and packing do not meet."""
    assert runner.info.packed and runner.info.attention == "sdpa"
    assert runner.info.linears == "onednn-prepacked"
    rng = np.random.default_rng(1)
    pool = [
        EncodedItem(rng.integers(5, 50, size=n).astype(np.int32))
        for n in (1, 1, 2, 3, 5, 8, 16, 31, 32, 33, 60, 64, 65, 100)
    ]

    def run(items: list[EncodedItem]) -> list[Any]:
        batch = pack(items)
        return [o.dense for o in scatter(batch, runner.forward(batch))]

    alone = [run([item])[0] for item in pool]
    for _ in range(5):
        order = rng.permutation(len(pool))
        for got, i in zip(run([pool[i] for i in order]), order, strict=True):
            assert np.array_equal(got, alone[i]), pool[i].n_tokens
    assert not any("depend" in note for note in runner.info.notes)


def test_without_trust_it_is_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"modeling_nvembed\.py.*trust_remote_code = true"):
        make_runner_factory("nv", folder)()


def test_with_trust_it_says_what_runs(runner: Any) -> None:
    told = " ".join(runner.info.notes)
    assert "own code is not run" in told and "latent attention" in told
    assert runner.info.normalized and runner.info.pooling == "mean"


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_nvembed(tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    lacking = {k: v for k, v in state.items() if not k.endswith("latents")}
    save_file(lacking, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensors: latent_attention_model\.latents"):
        make_runner_factory("nv", folder, **TRUSTED)()
    save_file({**state, "latent_attention_model.extra": state["embedding_model.norm.weight"].clone()},
              folder / "model.safetensors")  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"does not have: latent_attention_model\.extra"):
        make_runner_factory("nv", folder, **TRUSTED)()
    save_file(state, folder / "model.safetensors")
    edit_json(folder / "config.json", latent_attention_config={"hidden_dim": 64})
    with pytest.raises(ModelLoadError, match="have to be equal"):
        load_spec(folder, trust_remote_code=True)

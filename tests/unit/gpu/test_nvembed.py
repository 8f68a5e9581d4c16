"""NV-Embed on a seeded tiny folder, against the published formula written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.artifacts import load_spec
from gpu.batch import EncodedItem, ItemResult, pack, scatter
from gpu.faults import ModelLoadError
from gpu.loader import make_runner_factory
from schemas.requests import EmbedRequest, Text
from tests.support.models import _bytes, edit_json, write_tokenizer

HIDDEN, LATENTS, HEADS, SIZE = 32, 12, 2, 24
TEXTS = ("a river of text", "kafka", "the stream of one broker in the queue of two topics", "x")
INSTRUCTION = "Instruct: find it\nQuery: "
TRUSTED = {"trust_remote_code": True}


def write_nvembed(folder: Path, *, seed: int = 0, **latent: Any) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import MistralConfig, MistralModel

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = _bytes(False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    write_tokenizer(folder, tokenizer, {**names, "bos_token": "<s>", "eos_token": "</s>"})
    raw = json.loads((folder / "tokenizer.json").read_text())
    start = tokenizer.token_to_id("<s>")
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [start], "tokens": ["<s>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    text = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "sliding_window": 8, "head_dim": 8,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MistralModel(MistralConfig(**{**text, "initializer_range": 0.3}))
        d = HIDDEN

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape) * 0.3

        block = {
            "latents": normal(LATENTS, d),
            "cross_attend_blocks.0.norm.weight": 1 + normal(d),
            "cross_attend_blocks.0.norm.bias": normal(d),
            "cross_attend_blocks.0.norm_context.weight": 1 + normal(d),
            "cross_attend_blocks.0.norm_context.bias": normal(d),
            "cross_attend_blocks.0.fn.to_q.weight": normal(HEADS * SIZE, d),
            "cross_attend_blocks.0.fn.to_kv.weight": normal(2 * HEADS * SIZE, d),
            "cross_attend_blocks.0.fn.to_out.weight": normal(d, HEADS * SIZE),
            "cross_attend_blocks.1.norm.weight": 1 + normal(d),
            "cross_attend_blocks.1.norm.bias": normal(d),
            "cross_attend_blocks.1.fn.net.0.weight": normal(8 * d, d),
            "cross_attend_blocks.1.fn.net.0.bias": normal(8 * d),
            "cross_attend_blocks.1.fn.net.2.weight": normal(d, 4 * d),
            "cross_attend_blocks.1.fn.net.2.bias": normal(d),
        }
    state = {f"embedding_model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    state |= {f"latent_attention_model.{k}": v.contiguous() for k, v in block.items()}
    save_file(state, folder / "model.safetensors")
    config = {
        "model_type": "nvembed", "architectures": ["NVEmbedModel"],
        "auto_map": {"AutoModel": "modeling_nvembed.NVEmbedModel"},
        "text_config": {**text, "model_type": "bidir_mistral", "architectures": ["MistralModel"]},
        "latent_attention_config": {
            "num_latents_value": LATENTS, "num_cross_heads": HEADS, "hidden_dim": HIDDEN,
            "latent_dim": HIDDEN, "cross_dim_head": SIZE, "output_normalize": True, **latent,
        },
        "is_mask_instruction": True, "add_eos": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": INSTRUCTION}})
    )
    return folder


def reference(folder: Path, text: str, instruction: str = "") -> np.ndarray:
    """modeling_nvembed.py in plain torch: float64 attention over the latents, masked mean, unit."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, MistralConfig, MistralModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["text_config"]
    model = MistralModel(
        MistralConfig(**{**config, "model_type": "mistral", "sliding_window": None})
    )
    own = {k.removeprefix("embedding_model."): v for k, v in state.items() if "latent" not in k}
    model.load_state_dict(own)
    model.eval()
    ids = tokenizer(instruction + text + "</s>", return_tensors="pt")["input_ids"]
    n = ids.shape[1]
    with torch.no_grad():
        everything = torch.zeros(1, 1, n, n)  # an additive mask that hides nothing
        h = model(input_ids=ids, attention_mask=everything).last_hidden_state[0].double()
        w = {
            k.removeprefix("latent_attention_model."): v.double()
            for k, v in state.items() if k.startswith("latent_attention_model.")
        }  # fmt: skip
        a, f = "cross_attend_blocks.0.", "cross_attend_blocks.1."

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return torch.nn.functional.layer_norm(
                x, (HIDDEN,), w[f"{name}.weight"], w[f"{name}.bias"]
            )

        q = norm(h, a + "norm") @ w[a + "fn.to_q.weight"].T
        k, v = (norm(w["latents"], a + "norm_context") @ w[a + "fn.to_kv.weight"].T).chunk(2, -1)
        outs = []
        for head in range(HEADS):
            cut = slice(head * SIZE, (head + 1) * SIZE)
            outs.append(torch.softmax(q[:, cut] @ k[:, cut].T / SIZE**0.5, -1) @ v[:, cut])
        h = h + torch.cat(outs, -1) @ w[a + "fn.to_out.weight"].T
        x, gate = (norm(h, f + "norm") @ w[f + "fn.net.0.weight"].T + w[f + "fn.net.0.bias"]).chunk(
            2, -1
        )
        h = (
            h
            + (x * torch.nn.functional.gelu(gate)) @ w[f + "fn.net.2.weight"].T
            + w[f + "fn.net.2.bias"]
        )
        masked = len(tokenizer.tokenize(instruction)) if instruction else 0
        mean = h[masked:].mean(0)
        return (mean / mean.norm()).numpy()


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
def test_a11_nvembed_equals_the_published_formula(
    runner: Any, folder: Path, prompt: str | None
) -> None:
    """A11, A14: bidirectional without a window, latent attention, masked instruction, one end token."""
    told = INSTRUCTION if prompt else ""
    for text, got in zip(TEXTS, vectors(runner, *TEXTS, prompt_name=prompt), strict=True):
        expected = reference(folder, text, told)
        assert np.abs(got - expected).max() <= 1e-5
        assert got @ expected >= 1 - 1e-6
    (item,) = runner.encoder.encode([EmbedRequest(id="r", input=(Text("x"),))])[0].items
    end = runner.encoder._tokenizer.token_to_id("</s>")
    assert list(item.input_ids).count(end) == 1 and item.input_ids[-1] == end


def test_a06_the_same_bytes_alone_and_in_any_batch(runner: Any) -> None:
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

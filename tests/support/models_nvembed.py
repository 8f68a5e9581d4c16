"""A tiny seeded NV-Embed folder, and the published formula written out in plain torch.

Who calls it: tests of latent attention, and `benchmarks.parity`.
What must stay true: tensor names as in the published checkpoint; nothing of `gpu` is used here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import _bytes, write_tokenizer

HIDDEN, LATENTS, HEADS, SIZE = 32, 12, 2, 24
INSTRUCTION = "Instruct: find it\nQuery: "


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


def nvembed_reference(folder: Path, text: str, instruction: str = "") -> np.ndarray:
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

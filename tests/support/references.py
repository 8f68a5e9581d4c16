"""What other libraries make of one item: the references that images are compared with.

Who calls it: tests of images, and `benchmarks.parity`.
What must stay true: one item at a time, through transformers' own classes; nothing of `gpu` is used here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def clip_reference(folder: Path, text: str | None, data: bytes | None) -> np.ndarray:
    """transformers' CLIPModel with the folder's tokenizer and PIL processor, one item at a time."""
    import io

    import torch
    from PIL import Image as Pil
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        if text is not None:
            ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
            return model.get_text_features(ids["input_ids"]).pooler_output[0].numpy()
        picture = Pil.open(io.BytesIO(data or b"")).convert("RGB")
        pixels = CLIPImageProcessorPil.from_pretrained(folder)(picture, return_tensors="pt")
        return model.get_image_features(**pixels).pooler_output[0].numpy()


def siglip_reference(folder: Path, text: str | None, data: bytes | None) -> np.ndarray:
    """transformers' SiglipModel, texts filled up to their full length as its documentation says."""
    import io

    import torch
    from PIL import Image as Pil
    from transformers import AutoTokenizer, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    model = SiglipModel.from_pretrained(folder).eval()
    with torch.no_grad():
        if text is not None:
            ids = AutoTokenizer.from_pretrained(folder)(
                text, padding="max_length", max_length=64, truncation=True, return_tensors="pt"
            )
            return model.get_text_features(**ids).pooler_output[0].numpy()
        picture = Pil.open(io.BytesIO(data or b"")).convert("RGB")
        pixels = SiglipImageProcessorPil.from_pretrained(folder)(picture, return_tensors="pt")
        return model.get_image_features(**pixels).pooler_output[0].numpy()


def bidirectional_states(folder: Path, ids: np.ndarray) -> Any:
    """[n_tokens, hidden]: transformers' Llama under a mask that hides nothing."""
    import torch
    from transformers import LlamaModel

    model = LlamaModel.from_pretrained(folder).eval()
    mask = torch.zeros(1, 1, len(ids), len(ids))
    with torch.no_grad():
        given = torch.from_numpy(ids.astype(np.int64))[None]
        return model(given, attention_mask=mask).last_hidden_state[0]


def bidirectional_scores(
    folder: Path, ids: np.ndarray, pooling: str, temperature: float
) -> np.ndarray:
    """[n_labels]: NVIDIA's LlamaBidirectionalForSequenceClassification in words: pool, score, divide."""
    from safetensors.torch import load_file

    states = bidirectional_states(folder, ids)
    pooled = {"avg": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
    weight = load_file(folder / "model.safetensors")["score.weight"]
    return (weight @ pooled / temperature).numpy()


def new_states(folder: Path, ids: np.ndarray) -> Any:
    """[n_tokens, hidden]: Alibaba's new-impl in words, float64: no positions but rotary halves with NTK
    frequencies, gated layers, norms behind the sums."""
    import json

    import torch
    from safetensors.torch import load_file
    from torch.nn import functional

    c = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors").items()
    w = {name.removeprefix("new."): t.double() for name, t in stored}
    n, heads, width = len(ids), c["num_attention_heads"], c["hidden_size"]
    size = width // heads
    by = float((c.get("rope_scaling") or {}).get("factor", 1.0))
    powers = torch.arange(0, size, 2, dtype=torch.float64) / size
    turns = 1 / (c["rope_theta"] * by) ** powers / by ** (2 / size)
    angles = torch.outer(torch.arange(n, dtype=torch.float64), turns).repeat(1, 2)

    def normed(x: Any, name: str) -> Any:
        return functional.layer_norm(
            x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], c["layer_norm_eps"]
        )

    def turned(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    x = w["embeddings.word_embeddings.weight"][torch.from_numpy(ids.astype(np.int64))]
    x = normed(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        qkv = x @ w[f"{at}attention.qkv_proj.weight"].T + w[f"{at}attention.qkv_proj.bias"]
        q, k, v = (t.view(n, heads, size).transpose(0, 1) for t in qkv.split(width, dim=-1))
        weights = torch.softmax(turned(q) @ turned(k).transpose(1, 2) / size**0.5, -1)
        mixed = (weights @ v).transpose(0, 1).reshape(n, width)
        mixed = mixed @ w[f"{at}attention.o_proj.weight"].T + w[f"{at}attention.o_proj.bias"]
        x = normed(x + mixed, f"{at}attn_ln")
        up, gate = (x @ w[f"{at}mlp.up_gate_proj.weight"].T).chunk(2, dim=-1)
        down = functional.gelu(gate) * up @ w[f"{at}mlp.down_proj.weight"].T
        x = normed(x + down + w[f"{at}mlp.down_proj.bias"], f"{at}mlp_ln")
    return x


def new_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """[n_labels]: its classifier behind BERT's pooler on the first token."""
    import torch
    from safetensors.torch import load_file

    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    first = new_states(folder, ids)[0]
    pooled = torch.tanh(w["new.pooler.dense.weight"] @ first + w["new.pooler.dense.bias"])
    return (w["classifier.weight"] @ pooled + w["classifier.bias"]).numpy()


def layerwise_score(folder: Path, ids: np.ndarray, cut: int) -> float:
    """FlagEmbedding's layerwise MiniCPM in words, float64: causal layers with rotary halves, embeddings and
    residuals scaled, the norm and the head behind layer `cut` on the last token."""
    import json

    import torch
    from safetensors.torch import load_file

    c = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    n, heads, groups = len(ids), c["num_attention_heads"], c["num_key_value_heads"]
    size = c["hidden_size"] // heads
    scale = c["scale_depth"] / c["num_hidden_layers"] ** 0.5
    turns = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(n, dtype=torch.float64), turns).repeat(1, 2)

    def normed(x: Any, name: str) -> Any:
        return w[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def turned(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    x = w["model.embed_tokens.weight"][torch.from_numpy(ids.astype(np.int64))] * c["scale_emb"]
    hidden_from = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    for i in range(cut):
        at = f"model.layers.{i}."
        seen = normed(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (seen @ w[f"{at}self_attn.{name}_proj.weight"].T).view(n, -1, size).transpose(0, 1)
            for name in "qkv"
        )
        k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (turned(k), v))
        weights = torch.softmax(turned(q) @ k.transpose(1, 2) / size**0.5 + hidden_from, -1)
        mixed = (weights @ v).transpose(0, 1).reshape(n, -1)
        x = x + scale * mixed @ w[f"{at}self_attn.o_proj.weight"].T
        seen = normed(x, f"{at}post_attention_layernorm.weight")
        gate, up = (seen @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + scale * (torch.nn.functional.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T
    name = f"{cut - c['start_layer']}." if c["head_multi"] else ""
    last = normed(x[-1], "model.norm.weight")
    return float(w[f"lm_head.{name}linear_head.weight"][0] @ last)


TEMPLATE = (
    "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n"
    "<|im_start|>assistant\n<|endoftext|>"
)
IMAGE_SLOT = "<|vision_start|>{image}<|vision_end|>"


def gme_reference(
    folder: Path, text: str | None, data: bytes | None, instruction: str, *, gme: bool = False
) -> np.ndarray:
    """gme_inference.py in words: one string with control tokens, last token, normalised."""
    import io

    import torch
    from PIL import Image as Pil
    from transformers import AutoTokenizer, Qwen2VLModel
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2VLModel.from_pretrained(folder).eval()
    content, more = text or "", {}
    if data is not None:
        processor = Qwen2VLImageProcessorPil.from_pretrained(
            folder, size={"shortest_edge": 256 * 784, "longest_edge": 1280 * 784},
            min_pixels=None, max_pixels=None,
        )  # fmt: skip
        picture = Pil.open(io.BytesIO(data)).convert("RGB")
        if gme:  # fetch_image: whole tokens of 28 pixels first, at least four
            size = [max(28, round(n / 28) * 28) for n in picture.size]
            if size[0] * size[1] < 4 * 784:
                beta = (4 * 784 / (picture.size[0] * picture.size[1])) ** 0.5
                size = [-(-n * beta // 28) * 28 for n in picture.size]
            picture = picture.resize((int(size[0]), int(size[1])))
        more = dict(processor(picture, return_tensors="pt"))
        count = int(more["image_grid_thw"].prod()) // 4
        content = IMAGE_SLOT.format(image="<|image_pad|>" * count) + content
    ids = tokenizer(TEMPLATE.format(instruction=instruction, content=content), return_tensors="pt")
    ids = ids["input_ids"]
    if gme:
        # What transformers 4.51 made of absent positions: one row, the same on all three axes.
        more["position_ids"] = torch.arange(ids.shape[1]).expand(3, 1, -1)
    if data is not None:
        more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        last = model(input_ids=ids, **more).last_hidden_state[0, -1]
    return (last / last.norm()).numpy()

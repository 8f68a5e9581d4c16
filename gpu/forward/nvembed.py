"""NV-Embed natively: Mistral without causality, then every token attends over trained latents.

Who calls it: `gpu.forward.weights` for a folder that `gpu.folder.nvembed` read.
What must stay true: the block works on each token alone (queries are tokens, keys and values are the
latents), so packing does not touch it, and a token's bits do not depend on how many others there are.
Formula: NV-Embed paper (Lee and others, 2024), section 3.1, in the form of the published
modeling_nvembed.py: ``h = h + to_out(attention(norm(h), norm(latents)))``, ``h = h + ff(norm(h))`` with a
gated GELU, then the mean over tokens (`gpu.pooler`). Checked with seeded weights only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu.faults import ModelLoadError
from gpu.folder.spec import ModelSpec

BLOCK_ROWS = 32
"""Tokens per attention call: one size, so that the kernel never chooses by the pack's."""


@dataclass(slots=True)
class States:
    """What a transformers model would return, as far as anyone reads it."""

    last_hidden_state: torch.Tensor


class LatentAttention(nn.Module):
    """[..., hidden] -> [..., hidden]. Keys and values come from the latents, once, at load."""

    keys: torch.Tensor  # [heads, n_latents, dim_head]
    values: torch.Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        dim, heads, size = config["hidden_dim"], config["num_cross_heads"], config["cross_dim_head"]
        self.heads, self.size = heads, size
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, heads * size, bias=False)
        self.to_out = nn.Linear(heads * size, dim, bias=False)
        self.ff_norm = nn.LayerNorm(dim)
        self.ff_in = nn.Linear(dim, dim * 8)
        self.ff_out = nn.Linear(dim * 4, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        x = x + self.to_out(self._attend(self.to_q(self.norm(x))))
        value, gate = self.ff_in(self.ff_norm(x)).chunk(2, dim=-1)
        # Fresh memory: kernels may treat the tail of a strided view in another way.
        x = x + self.ff_out(value.contiguous() * functional.gelu(gate.contiguous()))
        return x.view(hidden.shape)

    def _attend(self, q: torch.Tensor) -> torch.Tensor:
        """q: [n, heads * size] -> the same shape."""
        n = q.shape[0]
        blocks = -(-n // BLOCK_ROWS)
        q = functional.pad(q, (0, 0, 0, blocks * BLOCK_ROWS - n))
        q = q.view(blocks, BLOCK_ROWS, self.heads, self.size).transpose(1, 2).contiguous()
        k, v = (t.expand(blocks, -1, -1, -1) for t in (self.keys, self.values))
        out = functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(blocks * BLOCK_ROWS, -1)[:n].contiguous()


class NvEmbed(nn.Module):
    """Called like a transformers base model; `config` is the Mistral's."""

    _supports_sdpa = True

    def __init__(self, mistral: Any, latent: LatentAttention) -> None:
        super().__init__()
        self.embedding_model = mistral
        self.latent = latent
        self.config = mistral.config

    def set_attn_implementation(self, name: str) -> None:
        """As on a transformers model."""
        self.embedding_model.set_attn_implementation(name)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> States:
        out = self.embedding_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=use_cache,
        )
        return States(self.latent(out.last_hidden_state))


def load_nvembed(spec: ModelSpec, dtype: torch.dtype) -> tuple[NvEmbed, dict[str, Any]]:
    """The model on the host, and a report of keys like transformers' `output_loading_info`.

    Raises `ModelLoadError` for pickled weights.
    """
    from transformers import MistralConfig, MistralModel

    state = _read(spec, dtype)
    fields = {k: v for k, v in spec.config.items() if k not in ("model_type", "architectures")}
    # Its code masks nothing but padding: no causality, and no window either.
    sizes = fields.pop("latent_attention_config")
    config = MistralConfig(**{**fields, "sliding_window": None})
    config.is_causal = False
    with torch.device("meta"):
        mistral = MistralModel(config)
        latent = LatentAttention(sizes)
    mistral.rotary_emb = type(mistral.rotary_emb)(config)
    own = {
        name.removeprefix("embedding_model."): tensor
        for name, tensor in state.items()
        if name.startswith("embedding_model.")
    }
    found = mistral.load_state_dict(own, strict=False, assign=True)
    missing = [f"embedding_model.{name}" for name in found.missing_keys]
    unexpected = [f"embedding_model.{name}" for name in found.unexpected_keys]
    block, lacking, left = _block(state, sizes)
    missing += lacking
    unexpected += left
    wrong = [] if lacking else _assign(latent, block)
    return NvEmbed(mistral, latent), {
        "missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": wrong,
    }  # fmt: skip


def _read(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in spec.weights:
        if path.suffix != ".safetensors":
            raise ModelLoadError(f"{path}: NV-Embed's weights have to be safetensors")
        state.update({name: t.to(dtype) for name, t in load_file(path).items()})
    return state


_PREFIX = "latent_attention_model."
_NAMES = {
    "cross_attend_blocks.0.norm.weight": "norm.weight",
    "cross_attend_blocks.0.norm.bias": "norm.bias",
    "cross_attend_blocks.0.fn.to_q.weight": "to_q.weight",
    "cross_attend_blocks.0.fn.to_out.weight": "to_out.weight",
    "cross_attend_blocks.1.norm.weight": "ff_norm.weight",
    "cross_attend_blocks.1.norm.bias": "ff_norm.bias",
    "cross_attend_blocks.1.fn.net.0.weight": "ff_in.weight",
    "cross_attend_blocks.1.fn.net.0.bias": "ff_in.bias",
    "cross_attend_blocks.1.fn.net.2.weight": "ff_out.weight",
    "cross_attend_blocks.1.fn.net.2.bias": "ff_out.bias",
}
_LATENT = (
    "latents",
    "cross_attend_blocks.0.norm_context.weight",
    "cross_attend_blocks.0.norm_context.bias",
    "cross_attend_blocks.0.fn.to_kv.weight",
)


def _block(
    state: dict[str, torch.Tensor], sizes: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """(the block's tensors by our names, missing names, names that nobody reads)."""
    given = {n.removeprefix(_PREFIX): t for n, t in state.items() if n.startswith(_PREFIX)}
    missing = [_PREFIX + name for name in (*_NAMES, *_LATENT) if name not in given]
    others = [n for n in state if not n.startswith((_PREFIX, "embedding_model."))]
    left = [_PREFIX + name for name in given if name not in _NAMES and name not in _LATENT]
    if missing:
        return {}, missing, others + left
    block = {ours: given[theirs] for theirs, ours in _NAMES.items()}
    latents, weight, bias, to_kv = (given[name] for name in _LATENT)
    with torch.inference_mode():
        # In fp32, and once: the latents are the same for every token of every item.
        normed = functional.layer_norm(
            latents.float(), (latents.shape[-1],), weight.float(), bias.float()
        )
        k, v = (normed @ to_kv.float().T).chunk(2, dim=-1)
        for name, tensor in (("keys", k), ("values", v)):
            shaped = tensor.reshape(len(latents), sizes["num_cross_heads"], sizes["cross_dim_head"])
            block[name] = shaped.transpose(0, 1).contiguous().to(latents.dtype).clone()
    return block, [], others + left


def _assign(latent: LatentAttention, block: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of another shape than the config says, by name; none: the block is complete."""
    own = latent.state_dict()
    wrong = [name for name, t in own.items() if t.shape != block[name].shape]
    if not wrong:
        latent.register_buffer("keys", block.pop("keys"))
        latent.register_buffer("values", block.pop("values"))
        latent.load_state_dict(block, strict=False, assign=True)
    return wrong

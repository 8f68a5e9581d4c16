"""Attention modules of families that bypass transformers' attention interface, or build a bias per pack.

Who calls it: `gpu.forward.weights` once per model, after the weights are in.
What must stay true: outside of a packed context every module computes exactly what transformers wrote
(the self-check's reference and padded batches run through it); inside one, items are kept apart and
every wrapped layer is counted, so that the self-check sees it; an item's rows have the same bits
alone and in any pack. No weight is touched: wrappers read the modules' own linears at call time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu.attention import LayerKind, current_context
from gpu.attention.interface import attention
from gpu.folder.families import Family


def wrap(base: nn.Module, family: Family) -> None:
    """Apply the family's wrapper in place; nothing for families that need none."""
    if family.wrapper is not None:
        _WRAPPERS[family.wrapper](base)


def _t5(base: Any) -> None:
    """T5, mT5, UMT5: linears that may be replaced, and relative biases of the longest item instead of the whole pack.

    The bias depends on the distance of two tokens alone, so [1, heads, M, M] with M the longest item's
    length serves every item (`AttentionBackend.run`), and memory does not grow with the pack squared.
    """
    for module in base.modules():
        if getattr(module, "has_relative_attention_bias", False):
            module.compute_bias = _short_bias(module.compute_bias)
        if hasattr(module, "wo") and (hasattr(module, "wi") or hasattr(module, "wi_0")):
            module.forward = _t5_feed_forward(module)


def _t5_feed_forward(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' own reads `wo.weight`, which a prepacked linear does not have."""
    original = module.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(module.wo, nn.Linear):
            out: torch.Tensor = original(hidden)
            return out
        if hasattr(module, "wi"):
            out = module.wo(module.act(module.wi(hidden)))
        else:
            out = module.wo(module.act(module.wi_0(hidden)) * module.wi_1(hidden))
        return out

    return forward


def _short_bias(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute_bias(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        if context is not None:
            query_length = key_length = context.layout.max_seqlen
        return original(query_length, key_length, *args, **kwargs)

    return compute_bias


def _mpnet(base: Any) -> None:
    """MPNet: its attention is ``softmax(q k / sqrt(d) + bias) v``, which the seam computes."""
    encoder = base.encoder
    original_bias = encoder.compute_position_bias

    def compute_position_bias(
        x: torch.Tensor, position_ids: torch.Tensor | None = None, num_buckets: int = 32
    ) -> torch.Tensor:
        context = current_context()
        if context is None:
            bias: torch.Tensor = original_bias(x, position_ids, num_buckets)
            return bias
        longest = x.new_empty(1, context.layout.max_seqlen, 0)
        bias = original_bias(longest, None, num_buckets)
        return bias

    encoder.compute_position_bias = compute_position_bias
    for layer in encoder.layer:
        layer.attention.attn.forward = _mpnet_attention(layer.attention.attn)


def _mpnet_attention(module: Any) -> Callable[..., Any]:
    original = module.forward

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if current_context() is None:
            return original(
                hidden_states, attention_mask, position_bias, output_attentions, **kwargs
            )
        out = _through_the_seam(module, "q", "k", "v", hidden_states, position_bias)
        return (module.o(out),)

    return forward


def _rembert(base: Any) -> None:
    """RemBERT: BERT's attention, written before the interface existed."""
    for layer in base.encoder.layer:
        layer.attention.self.forward = _rembert_attention(layer.attention.self)


def _rembert_attention(module: Any) -> Callable[..., Any]:
    original = module.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if current_context() is None:
            return original(hidden_states, *args, **kwargs)
        return _through_the_seam(module, "query", "key", "value", hidden_states, None), None

    return forward


def _through_the_seam(
    module: Any, q: str, k: str, v: str, hidden: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[1, total_tokens, hidden_size] -> context of the same shape, before the output projection."""
    size = module.attention_head_size
    shape = (*hidden.shape[:-1], -1, size)
    query, key, value = (
        getattr(module, name)(hidden).view(shape).transpose(1, 2) for name in (q, k, v)
    )
    out, _ = attention(
        module,
        query,
        key,
        value,
        scaling=1.0 / math.sqrt(size),
        is_causal=False,
        position_bias=bias,
    )
    return out.reshape(*hidden.shape[:-1], -1)


def _deberta(base: Any) -> None:
    """DeBERTa-v2/v3: scores depend on distance and content together, which no backend computes.

    Its own attention runs item by item; everything around it stays packed. A convolution over the
    sequence (`conv_kernel_size`) would mix neighbours and is left to the self-check, which fails.
    """
    encoder = base.encoder
    original_mask, original_rel = encoder.get_attention_mask, encoder.get_rel_pos

    def get_attention_mask(attention_mask: torch.Tensor) -> Any:
        return attention_mask if current_context() is not None else original_mask(attention_mask)

    def get_rel_pos(
        hidden_states: torch.Tensor, query_states: Any = None, relative_pos: Any = None
    ) -> Any:
        context = current_context()
        if context is None:
            return original_rel(hidden_states, query_states, relative_pos)
        longest = hidden_states.new_empty(1, context.layout.max_seqlen, 0)
        return original_rel(longest, None, None)

    encoder.get_attention_mask, encoder.get_rel_pos = get_attention_mask, get_rel_pos
    for layer in encoder.layer:
        layer.attention.self.forward = _deberta_attention(layer.attention.self)


def _deberta_attention(module: Any) -> Callable[..., Any]:
    original = module.forward
    heads, size = module.num_attention_heads, module.attention_head_size
    kind = LayerKind(
        causal=False,
        window_left=None,
        window_right=None,
        softcap=None,
        scale=1.0,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=size,
        bias=True,
    )

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Any = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> Any:
        context = current_context()
        if context is None:
            return original(
                hidden_states,
                attention_mask,
                output_attentions,
                query_states,
                relative_pos,
                rel_embeddings,
            )
        context.record(kind, None)
        context.served_by[kind] = "deberta"
        parts: list[torch.Tensor] = []
        for start, length in zip(context.layout.cu_seqlens, context.layout.lengths, strict=False):
            if length == 0:
                continue
            rows = hidden_states[:, start : start + length].contiguous()
            near = None if relative_pos is None else relative_pos[..., :length, :length]
            seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=rows.device)
            parts.append(original(rows, seen, False, None, near, rel_embeddings)[0])
        return torch.cat(parts, dim=1), None

    return forward


def _moe(base: Any) -> None:
    """Mixtures of experts: how many rows reach an expert together changes their last digits, so inside a
    pack the block runs item by item."""
    for module in base.modules():
        if hasattr(module, "experts") and hasattr(module, "gate"):
            module.forward = _item_by_item(module.forward)


def _item_by_item(original: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        context = current_context()
        if context is None:
            return original(hidden_states)
        parts = torch.split(hidden_states, list(context.layout.lengths), dim=1)
        # Clones: an item's place in the pack decides the alignment of its view, and that the kernel.
        return torch.cat([original(part.clone()) for part in parts if part.shape[1]], dim=1)

    return forward


_WRAPPERS: dict[str, Callable[[Any], None]] = {
    "t5": _t5,
    "mpnet": _mpnet,
    "rembert": _rembert,
    "deberta": _deberta,
    "moe": _moe,
}

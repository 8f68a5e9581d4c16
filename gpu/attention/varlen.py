"""torch's own variable-length flash attention on CUDA: what FlashInfer refuses and SDPA does slowly.
Has never run on a GPU: docs/attention.md says what is unknown.

Who calls it: `interface.PackedContext` through `AttentionBackend`. Serves symmetric windows (ModernBERT,
EmbeddingGemma) and head sizes like 32 (MiniLM) or 96, which FlashInfer cannot take.
What must stay true: only parameters that the installed torch's `varlen_attn` has are used (2.9 brought
the function, later versions windows, grouped heads and `num_splits`); what it lacks is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpu.attention.base import LayerKind, PackLayout

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # flash attention's limit, in steps of 8
NEEDED = ("scale", "window_size", "enable_gqa")


@cache
def _function() -> tuple[Callable[..., Any] | None, str | None]:
    """(varlen_attn, None), or (None, why it cannot be used)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = [name for name in NEEDED if name not in inspect.signature(varlen_attn).parameters]
    if missing:
        return None, f"varlen_attn of torch {torch.__version__} lacks {', '.join(missing)}"
    return varlen_attn, None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """cu_seqlens: [n + 1] int32 on the device, empty items left out."""

    kind: LayerKind
    total_tokens: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    arguments: dict[str, Any]


class VarlenBackend:
    """`torch.nn.attention.varlen.varlen_attn`.

    Args:
        batch_invariant: `num_splits=1`; torch promises the same bits for an item in any batch then.
    """

    name = "varlen"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def refuses(self, kind: LayerKind, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, not on {device.type}"
        function, reason = _function()
        if function is None:
            return reason
        if self.batch_invariant and "num_splits" not in inspect.signature(function).parameters:
            return f"varlen_attn of torch {torch.__version__} lacks num_splits (batch invariance)"
        if _capability(device) < (8, 0):
            return "needs a device of compute capability 8.0 or later"
        if dtype not in DTYPES:
            return f"takes float16 and bfloat16, not {dtype}"
        if kind.head_dim % 8 or kind.head_dim > MAX_HEAD_DIM:
            return f"head size {kind.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        if kind.softcap is not None:
            return "has no soft cap"
        if kind.bias:
            return "has no additive bias"
        if kind.multi_item:
            return "has no multi-item mask"
        if kind.partial_keys:
            return "attends to whole items"
        return None

    def plan(self, layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> VarlenPlan:
        left = -1 if kind.window_left is None else kind.window_left
        right = -1 if kind.window_right is None else kind.window_right
        arguments: dict[str, Any] = {
            "scale": kind.scale,
            "window_size": (left, right),
            "enable_gqa": kind.n_heads != kind.n_kv_heads,
        }
        if self.batch_invariant:
            arguments["num_splits"] = 1
        if 0 in layout.lengths:
            kept = [
                0,
                *(end for end, n in zip(layout.cu_seqlens[1:], layout.lengths, strict=True) if n),
            ]
            cu_seqlens = torch.tensor(kept, dtype=torch.int32, device=layout.device)
        else:
            cu_seqlens = layout.cu_seqlens_device
        return VarlenPlan(kind, layout.total_tokens, cu_seqlens, layout.max_seqlen, arguments)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: VarlenPlan,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert bias is None, "refused: varlen_attn has no additive bias"
        kind = plan.kind
        assert q.shape == (plan.total_tokens, kind.n_heads, kind.head_dim), (q.shape, kind)
        assert k.shape == v.shape == (plan.total_tokens, kind.n_kv_heads, kind.head_dim), k.shape
        if plan.total_tokens == 0:
            return torch.empty_like(q)
        function, reason = _function()
        assert function is not None, reason
        return function(
            q.contiguous(), k.contiguous(), v.contiguous(),
            plan.cu_seqlens, plan.cu_seqlens, plan.max_seqlen, plan.max_seqlen,
            **plan.arguments,
        )  # fmt: skip

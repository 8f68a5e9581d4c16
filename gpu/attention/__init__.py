"""Attention over packs: which backends there are, and the seam to transformers.

Who calls it: the runner, through `register`, `packed_context`, `padded_context`, `backends_for`.
What must stay true: this package imports neither FlashInfer nor `torch.nn.attention.varlen` before a
CUDA device is asked for.
"""

from __future__ import annotations

from gpu.attention.base import (
    AttentionBackend,
    AttentionError,
    LayerKind,
    MultiItem,
    NoBackend,
    PackLayout,
    choose,
)
from gpu.attention.interface import (
    NAME,
    PackedContext,
    PaddedContext,
    current_context,
    packed_context,
    padded_context,
    register,
)
from gpu.attention.sdpa import SdpaBackend

__all__ = [
    "NAME", "AttentionBackend", "AttentionError", "LayerKind", "MultiItem", "NoBackend", "PackLayout",
    "PackedContext", "PaddedContext", "SdpaBackend", "choose", "current_context", "packed_context",
    "padded_context", "register",
]  # fmt: skip

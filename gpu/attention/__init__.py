"""Attention over packs: which backends there are, and the seam to transformers.

Who calls it: the runners, through `register`, `packed_context`, `backends_for`.
What must stay true: this package imports neither FlashInfer nor `torch.nn.attention.varlen` before a
CUDA device is asked for.
"""

from __future__ import annotations

import torch

from gpu.attention.base import (
    AttentionBackend,
    AttentionError,
    LayerKind,
    MultiItem,
    NoBackend,
    PackLayout,
    choose,
)
from gpu.attention.flashinfer import FlashInferBackend
from gpu.attention.interface import (
    NAME,
    PackedContext,
    current_context,
    packed_context,
    register,
)
from gpu.attention.sdpa import SdpaBackend
from gpu.attention.varlen import VarlenBackend

__all__ = [
    "NAME", "AttentionBackend", "AttentionError", "FlashInferBackend", "LayerKind", "MultiItem",
    "NoBackend", "PackLayout", "PackedContext", "SdpaBackend", "VarlenBackend",
    "backends_for", "choose", "current_context", "packed_context", "register",
]  # fmt: skip

NAMES = ("flashinfer", "varlen", "sdpa")


def backends_for(
    device: torch.device | str,
    dtype: torch.dtype,
    setting: str = "auto",
    *,
    batch_invariant: bool = False,
) -> tuple[AttentionBackend, ...]:
    """The backends to try, in order. Make them once per model: FlashInfer's keep their wrappers.

    Args:
        device, dtype: where and in what the model computes.
        setting: "auto" (CUDA in 16 bits: flashinfer, varlen, sdpa; otherwise sdpa), or one or more names
            with commas. A named backend that refuses a layer is not replaced by one that is not named.
        batch_invariant: an item's numbers must not depend on its neighbours; on CUDA varlen goes
            first then, see `flashinfer`. On CPU in fp32 this always holds.

    Raises:
        ValueError: for an unknown name.
    """
    if setting == "auto":
        names = ["flashinfer", "varlen", "sdpa"]
        if batch_invariant:
            names = ["varlen", "flashinfer", "sdpa"]
        if torch.device(device).type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
            names = ["sdpa"]
    else:
        names = [name.strip() for name in setting.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(
            f"attention backend {unknown[0]!r} is unknown; say auto, or any of {', '.join(NAMES)}"
        )
    made: dict[str, AttentionBackend] = {}
    for name in names:
        if name == "flashinfer":
            made[name] = FlashInferBackend(batch_invariant=batch_invariant)
        elif name == "varlen":
            made[name] = VarlenBackend(batch_invariant=batch_invariant)
        else:
            grouped = not batch_invariant or torch.device(device).type == "cpu"
            made[name] = SdpaBackend(group_equal_lengths=grouped)
    return tuple(made.values())

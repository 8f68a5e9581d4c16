"""The `speed` setting: what an operator may trade in digits for throughput, and where it may be had.

Who calls it: `gpu.load` (is the value known), `gpu.model_runner` (can this machine do it, which modules).
What must stay true: "off" is the default and changes nothing; a value that cannot be had is refused at
load with the reason, never ignored; pooling, heads, norms and residual sums stay in fp32, only the matrix
products of the base model and the attention of long items become bfloat16; `model.dtype` in the reply says so.

bf16, measured with all-MiniLM-L6-v2 (docs/engine.md): cosine to fp32 at least 0.99995, 2.3 to 2.8 times
the texts per CPU-second on a CPU with AMX.
int8 is not offered (docs/engine.md has the figures): the int8 products for the CPU that are faster than fp32 choose
the scale of the activations from all rows of a call, so that an item's vector would depend on its neighbours;
those with a scale per row or block keep a cosine of 0.999 and take 1.6 to 50 times as long as fp32.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from gpu.attention import SdpaBackend
from gpu.faults import ModelLoadError

Speed: TypeAlias = Literal["off", "bf16", "int8"]

HALF_ATTENTION_FROM = 96
"""Tokens from which the kernel is faster in bfloat16 with the casts around it, for heads of 32 and 64: 1.2 times at
96, 1.35 to 1.8 at 128, 1.5 to 1.7 at 256; below 64 it is slower, up to twice."""

_NO_INT8 = (
    'speed = "int8" is not offered: the int8 products there are for this job either make a vector '
    "depend on its neighbours, or are slower than fp32 (docs/engine.md); use bf16 or off"
)


def check_value(speed: str) -> None:
    """Raises `ModelLoadError` for a value that exists nowhere. Needs no torch device."""
    if speed not in get_args(Speed):
        raise ModelLoadError(f'speed = {speed!r} is not "off" or "bf16"')
    if speed == "int8":
        raise ModelLoadError(_NO_INT8)


def check_possible(
    speed: str, *, device: torch.device, dtype: torch.dtype, prepack: bool = True
) -> None:
    """Raises `ModelLoadError` when this machine or the other settings rule the speed out."""
    check_value(speed)
    if speed == "off":
        return
    if device.type != "cpu":
        raise ModelLoadError(
            f'speed = "{speed}" is for the CPU; on {device} set dtype (bfloat16 is the default there)'
        )
    if dtype != torch.float32:
        raise ModelLoadError(
            f'speed = "{speed}" starts from dtype = "float32"; leave dtype at "auto", or speed at "off"'
        )
    if not prepack:
        raise ModelLoadError(f'speed = "{speed}" needs prepacked linears: set prepack = true')
    if not cpu_has_bf16():
        raise ModelLoadError(
            'speed = "bf16" needs a CPU with avx512_bf16 or AMX, and this one has neither (it would be '
            'several times slower than fp32); set speed = "off"'
        )


def cpu_has_bf16() -> bool:
    """bfloat16 products in hardware, as torch sees it."""
    cpu: Any = torch.cpu
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(cpu, name, lambda: False)()) for name in probes)


def backends() -> tuple[SdpaBackend, ...]:
    """Attention for a base model whose linears are bfloat16."""
    return (SdpaBackend(half_from=HALF_ATTENTION_FROM),)


def half_parents(model: nn.Module, base: nn.Module) -> set[nn.Module]:
    """Modules whose linears may become bfloat16: those of the base model, without pooler and heads."""
    pooler = getattr(base, "pooler", None)
    kept = set(pooler.modules()) if isinstance(pooler, nn.Module) else set()
    return {module for module in base.modules() if module is not model or base is model} - kept


def rounded(*references: Any) -> tuple[Any, ...]:
    """References of the self-check in bfloat16, which makes it compare by cosine and not by digits."""
    return tuple(_rounded(reference) for reference in references)


def _rounded(reference: Any) -> Any:
    if isinstance(reference, torch.Tensor):
        return reference.to(torch.bfloat16)
    if isinstance(reference, list):
        return [(item, logits.to(torch.bfloat16)) for item, logits in reference]
    return reference


def cosine_note(states: torch.Tensor, reference: torch.Tensor) -> str:
    """What the speed cost in the self-check. Both: [total_tokens, hidden_size]."""
    cosine = torch.cosine_similarity(states.double(), reference.double(), dim=-1).min()
    return f"linears in bfloat16: token vectors at cosine {float(cosine):.5f} or more to fp32"

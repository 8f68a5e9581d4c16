"""CPU linears: `nn.Linear` replaced at load by prepacked oneDNN, with exact GELU as its epilogue.

Who calls it: `gpu.model_runner` after the weights are in; `gpu.pooler` for Dense modules.
What must stay true: a row of the output has the same bits whatever other rows are in the call. oneDNN
keeps this from a few rows up (a single row may take a matrix-vector path with another summation order),
so each shape's smallest safe row count is measured at load and shorter inputs are filled up with
zero rows. The ops are private to torch: looked up at load, each layer compared with `F.linear`
before its original weight is dropped, and left alone when it differs. Safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_REORDER_ROWS = (
    512  # the row count that the packed layout is laid out for; the budget of a CPU pack
)
_PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 65, 129)
_SMALL_ROWS = 33  # a shape that still differs above this is not made safe by filling up
# Relative, of one layer against F.linear in fp32. bfloat16 keeps 8 bits: 2e-3 to 6e-3 were measured.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

# (linear attribute, activation attribute) of modules that compute `activation(linear(x))`.
_FUSABLE = (("dense", "intermediate_act_fn"), ("lin1", "activation"))


def _ops() -> tuple[Any, Any] | None:
    """(reorder, linear), or None where this torch or CPU has none."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        ops = torch.ops.mkldnn
        return ops._reorder_linear_weight, ops._linear_pointwise
    except AttributeError:
        return None


class PackedLinear(nn.Module):
    """`act(x @ W.T + b)` on the CPU; act is exact GELU or nothing.

    x: [..., in_features] float32 or bfloat16. The weight lives only in oneDNN's own layout. With `dtype`
    bfloat16 the product is one of bfloat16, summed in fp32, and the result float32 again; except behind
    GELU, where it stays bfloat16: what follows is the block's second linear, which takes it as it is.
    """

    def __init__(
        self,
        linear: nn.Linear,
        ops: tuple[Any, Any],
        *,
        gelu: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        reorder, self._op = ops
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype, self._out_dtype = dtype, dtype if gelu else torch.float32
        self._weight = reorder(linear.weight.detach().to(dtype).contiguous(), _REORDER_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        self._attr = "gelu" if gelu else "none"
        self._algorithm = "none" if gelu else ""
        self.min_rows = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features).to(self._dtype)
        rows = flat.shape[0]
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=self._out_dtype)
        if rows < self.min_rows:
            flat = functional.pad(flat, (0, 0, 0, self.min_rows - rows))
        out = self._op(flat, self._weight, self._bias, self._attr, [], self._algorithm)
        return out[:rows].view(*x.shape[:-1], self.out_features).to(self._out_dtype)

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, act={self._attr}, "
            f"dtype={self._dtype}"
        )


@dataclass(slots=True)
class LinearReport:
    """replaced, kept: layers by outcome. unstable: shapes (out, in) whose rows depend on their
    neighbours even when filled up. min_rows: the largest filling that some shape needs.
    half: layers that compute in bfloat16."""

    replaced: int = 0
    half: int = 0
    kept: int = 0
    fused: int = 0
    min_rows: int = 1
    unstable: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """`ModelInfo.linears`."""
        packed = "onednn-prepacked-bf16" if self.half else "onednn-prepacked"
        return packed if self.replaced and not self.kept else "torch"


@torch.inference_mode()
def prepack(
    model: nn.Module,
    on_packed: Callable[[torch.Tensor], None] = lambda weight: None,
    *,
    half_parents: Container[nn.Module] = (),
) -> LinearReport:
    """Replace every fp32 CPU `nn.Linear` in place. A layer that cannot be replaced stays as it is.

    on_packed: called with each original weight once its packed copy is in place.
    half_parents: modules whose own linears are to compute in bfloat16.
    """
    report = LinearReport()
    ops = _ops()
    if ops is None:
        return report
    safe_rows: dict[tuple[tuple[int, int], bool, torch.dtype], int | None] = {}
    for parent in list(model.modules()):
        dtype = torch.bfloat16 if parent in half_parents else torch.float32
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            gelu = _fusable(parent, name)
            packed = _try_pack(child, ops, gelu=gelu is not None, dtype=dtype)
            if packed is None:
                report.kept += 1
                continue
            shape = (packed.out_features, packed.in_features)
            key = (shape, gelu is not None, dtype)
            if key not in safe_rows:
                safe_rows[key] = _safe_rows(packed)
            rows = safe_rows[key]
            if rows is None:
                report.unstable = (*report.unstable, shape)
            else:
                packed.min_rows = rows
                report.min_rows = max(report.min_rows, rows)
            setattr(parent, name, packed)
            on_packed(child.weight.data)
            if gelu is not None:
                setattr(parent, gelu, nn.Identity())
                report.fused += 1
            report.replaced += 1
            report.half += dtype == torch.bfloat16
    report.unstable = tuple(sorted(set(report.unstable)))
    return report


def prepack_one(linear: nn.Linear) -> nn.Module:
    """One linear, replaced if possible; for modules outside the model (Dense)."""
    holder = nn.Sequential(linear)
    prepack(holder)
    return holder[0]


def _fusable(parent: nn.Module, name: str) -> str | None:
    """The attribute that holds an exact GELU right behind this linear, or None."""
    for linear, activation in _FUSABLE:
        if linear != name:
            continue
        act: Any = getattr(parent, activation, None)
        exact = isinstance(act, nn.GELU) and act.approximate == "none"
        exact = exact or (type(act).__name__ == "GELUActivation" and act.act is functional.gelu)
        if exact:
            return activation
    return None


def _try_pack(
    linear: nn.Linear, ops: tuple[Any, Any], *, gelu: bool, dtype: torch.dtype
) -> PackedLinear | None:
    """The replacement, or None when the layer is not fp32 on the CPU or the result differs."""
    weight = linear.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    try:
        packed = PackedLinear(linear, ops, gelu=gelu, dtype=dtype)
        probe = _probe(4, linear.in_features)
        got = packed(probe)
    except (RuntimeError, TypeError):
        return None
    expected = linear(probe)
    if gelu:
        expected = functional.gelu(expected)
    bound = _TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    if not torch.isfinite(got).all() or float((got - expected).abs().max()) > bound:
        return None
    return packed


def _safe_rows(packed: PackedLinear) -> int | None:
    """Smallest row count from which a row's bits no longer depend on how many there are, or None."""
    x = _probe(2 * max(_PROBE_ROWS), packed.in_features)
    reference = packed(x)
    differing = 0
    for rows in _PROBE_ROWS:
        start = rows % 7  # rows must not depend on where in memory they begin either
        if not torch.equal(packed(x[start : start + rows]), reference[start : start + rows]):
            differing = rows
    if differing >= _SMALL_ROWS:
        return None
    larger = [rows for rows in _PROBE_ROWS if rows > differing]
    return larger[0]


def _probe(rows: int, features: int) -> torch.Tensor:
    """[rows, features] float32, the same every time and without touching the global generator."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + features)
    return torch.randn(rows, features, generator=generator)

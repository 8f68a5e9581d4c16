"""CPU linears: `nn.Linear` replaced at load by the kernel that suits the machine, exact GELU included.

Who calls it: the runners after the weights are in; `gpu.pooler` for Dense modules.
What must stay true: a row of the output has the same bits whatever other rows are in the call. Kernels
keep this from a few rows up (a single row may take a matrix-vector path with another summation order),
so each shape's smallest safe row count is measured at load and shorter inputs are filled up with
zero rows. oneDNN's ops are private to torch: looked up at load. Each layer is compared with `F.linear`
before its original weight is dropped, and left alone when it differs. Safe to share between threads.
Because rows do not depend on each other, threads without work of their own take some of a large product's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from gpu.device import intra_op, mlas
from gpu.device.kernels import DEFAULT, KernelChoice, KernelName

T = TypeVar("T")
_REORDER_ROWS = (
    512  # the row count that the packed layout is laid out for; the budget of a CPU pack
)
_PROBE_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 65, 129)
_LARGE_ROWS = (200, 255, 256, 300, 511, 512, 513)  # looked at once, when a kernel is chosen
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


class ReplacedLinear(nn.Module, ABC):
    """`act(x @ W.T + b)` on the CPU; act is exact GELU or nothing. x: [..., in_features] float32."""

    kernel: KernelName
    out_dtype = torch.float32

    def __init__(self, linear: nn.Linear, *, gelu: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.gelu = gelu
        self.min_rows: int | None = 1  # None: a row's bits depend on the others at any count
        self.rows = intra_op.Divisible()

    @abstractmethod
    def product(self, flat: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features] in memory of its own, without the activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=self.out_dtype)
        if self.min_rows is not None and rows < self.min_rows:
            flat = functional.pad(flat, (0, 0, 0, self.min_rows - rows))
        threads = intra_op.lent()
        if threads is None or self.min_rows is None:
            out = self.activated(flat)
        else:
            out = self._divided(flat, threads, max(self.min_rows, intra_op.PART_ROWS))
        return out[:rows].view(*x.shape[:-1], self.out_features)

    def _divided(self, flat: torch.Tensor, threads: intra_op.Lent, least: int) -> torch.Tensor:
        """`activated`, by several threads where that is worth it. least: rows of a part."""
        rows = flat.shape[0]
        n = self.rows.parts(rows, rows // least)
        with self.rows.timed(rows, n):
            if n == 1:
                return self.activated(flat)
            parts = [flat[start:end] for start, end in intra_op.even(rows, n)]
            return torch.cat(threads.map([partial(inferred, self.activated, p) for p in parts]))

    def activated(self, flat: torch.Tensor) -> torch.Tensor:
        """In place: fresh memory for the activation's result would cost as much as the activation."""
        out = self.product(flat)
        return torch.ops.aten.gelu_(out) if self.gelu else out

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        act = "gelu" if self.gelu else "none"
        return f"{self.in_features}, {self.out_features}, act={act}, kernel={self.kernel}"


@torch.inference_mode()
def inferred(work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`, in another thread: inference mode holds for a thread."""
    return work(*arguments)


class TorchLinear(ReplacedLinear):
    """What torch's own linear calls."""

    kernel = "torch"

    def __init__(self, linear: nn.Linear, *, gelu: bool) -> None:
        super().__init__(linear, gelu=gelu)
        self._weight = linear.weight.detach().clone()
        self._bias = None if linear.bias is None else linear.bias.detach().clone()

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        return functional.linear(flat, self._weight, self._bias)


class MlasLinear(ReplacedLinear):
    """ONNX Runtime's."""

    kernel = "mlas"

    def __init__(self, linear: nn.Linear, *, gelu: bool) -> None:
        super().__init__(linear, gelu=gelu)
        bias = None if linear.bias is None else linear.bias.detach()
        self._run = mlas.gemm(linear.weight.detach(), bias)

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        return self._run(flat)


class PackedLinear(ReplacedLinear):
    """oneDNN's. The weight lives only in its own layout.

    fused: GELU as an epilogue of the product. With `dtype` bfloat16 the product is one of bfloat16, summed
    in fp32, and the result float32 again; except behind GELU, where it stays bfloat16: what follows is the
    block's second linear, which takes it as it is.
    """

    def __init__(
        self,
        linear: nn.Linear,
        ops: tuple[Any, Any],
        *,
        gelu: bool = False,
        fused: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(linear, gelu=gelu)
        self.kernel = "onednn" if fused or not gelu else "onednn-apart"
        reorder, self._op = ops
        self._dtype, self.out_dtype = dtype, dtype if gelu else torch.float32
        self._weight = reorder(linear.weight.detach().to(dtype).contiguous(), _REORDER_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
        self._epilogue: tuple[str, list[Any], str]
        self._epilogue = ("gelu", [], "none") if gelu and fused else ("none", [], "")

    def product(self, flat: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._op(
            flat.to(self._dtype), self._weight, self._bias, *self._epilogue
        )
        return out.to(self.out_dtype)

    def activated(self, flat: torch.Tensor) -> torch.Tensor:
        return super().activated(flat) if self.kernel == "onednn-apart" else self.product(flat)


_SHOWN = {
    "onednn": "onednn-prepacked", "onednn-apart": "onednn-prepacked", "torch": "torch", "mlas": "mlas",
}  # fmt: skip


@dataclass(slots=True)
class LinearReport:
    """replaced, kept: layers by outcome. unstable: shapes (out, in) whose rows depend on their
    neighbours even when filled up. min_rows: the largest filling that some shape needs.
    half: layers that compute in bfloat16. kernels: of each shape, and whether GELU follows."""

    replaced: int = 0
    half: int = 0
    kept: int = 0
    fused: int = 0
    min_rows: int = 1
    unstable: tuple[tuple[int, int], ...] = ()
    kernels: dict[tuple[tuple[int, int], bool], KernelName] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`ModelInfo.linears`."""
        if not self.replaced or self.kept:
            return "torch"
        if self.half:
            return "onednn-prepacked-bf16"
        return "+".join(sorted({_SHOWN[name] for name in self.kernels.values()}))

    @property
    def note(self) -> str | None:
        """Which kernel serves which shape (out x in), where there are several."""
        if len(set(self.kernels.values())) < 2 or self.half:
            return None
        told = [
            f"{o}x{i}{' with GELU' if gelu else ''} {_SHOWN[name]}"
            for ((o, i), gelu), name in sorted(self.kernels.items())
        ]
        return f"linears by measurement: {', '.join(told)}"


@torch.inference_mode()
def prepack(
    model: nn.Module,
    on_packed: Callable[[torch.Tensor], None] = lambda weight: None,
    *,
    half_parents: Container[nn.Module] = (),
    choice: KernelChoice | None = None,
) -> LinearReport:
    """Replace every fp32 CPU `nn.Linear` in place. A layer that cannot be replaced stays as it is.

    on_packed: called with each original weight once its packed copy is in place.
    half_parents: modules whose own linears are to compute in bfloat16.
    choice: which kernel serves a shape; None: oneDNN.
    """
    report = LinearReport()
    if _ops() is None and choice is None:
        return report
    choice = choice or KernelChoice(DEFAULT)
    safe_rows: dict[tuple[tuple[int, int], bool, torch.dtype], int | None] = {}
    alike: dict[tuple[tuple[int, int], bool, torch.dtype], intra_op.Divisible] = {}
    for parent in list(model.modules()):
        dtype = torch.bfloat16 if parent in half_parents else torch.float32
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            gelu = _fusable(parent, name)
            packed = _replacement(child, gelu is not None, dtype, choice)
            if packed is None:
                report.kept += 1
                continue
            shape = (packed.out_features, packed.in_features)
            key = (shape, gelu is not None, dtype)
            if key not in safe_rows:
                safe_rows[key] = _safe_rows(packed)
            rows = safe_rows[key]
            packed.min_rows = rows
            packed.rows = alike.setdefault(key, packed.rows)
            if rows is None:
                report.unstable = (*report.unstable, shape)
            else:
                report.min_rows = max(report.min_rows, rows)
            setattr(parent, name, packed)
            on_packed(child.weight.data)
            if gelu is not None:
                setattr(parent, gelu, nn.Identity())
                report.fused += 1
            report.replaced += 1
            report.half += dtype == torch.bfloat16
            report.kernels[shape, gelu is not None] = packed.kernel
    report.unstable = tuple(sorted(set(report.unstable)))
    return report


def _replacement(
    linear: nn.Linear, gelu: bool, dtype: torch.dtype, choice: KernelChoice
) -> ReplacedLinear | None:
    """With the chosen kernel, else with oneDNN's; None when neither gives the layer's numbers."""
    if dtype != torch.float32:
        return _try(linear, DEFAULT, gelu=gelu, dtype=dtype)
    chosen = choice.of(
        (linear.out_features, linear.in_features),
        gelu,
        lambda name: _try(linear, name, gelu=gelu),
        lambda made: _safe_rows(made, (*_PROBE_ROWS, *_LARGE_ROWS)) is not None,
    )
    found = _try(linear, chosen, gelu=gelu)
    return _try(linear, DEFAULT, gelu=gelu) if found is None and chosen != DEFAULT else found


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


def _try(
    linear: nn.Linear, kernel: KernelName, *, gelu: bool, dtype: torch.dtype = torch.float32
) -> ReplacedLinear | None:
    """The replacement, or None when the layer is not fp32 on the CPU or the result differs."""
    weight = linear.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    try:
        made = _make(linear, kernel, gelu, dtype)
        if made is None:
            return None
        probe = _probe(4, linear.in_features)
        got = made(probe)
    except Exception:  # noqa: BLE001 - libraries raise what they like; the layer stays as it is
        return None
    expected = linear(probe)
    if gelu:
        expected = functional.gelu(expected)
    bound = _TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    if not torch.isfinite(got).all() or float((got - expected).abs().max()) > bound:
        return None
    return made


def _make(
    linear: nn.Linear, kernel: KernelName, gelu: bool, dtype: torch.dtype
) -> ReplacedLinear | None:
    """None where this torch, this CPU or this installation has no such kernel."""
    if kernel == "torch":
        return TorchLinear(linear, gelu=gelu)
    if kernel == "mlas":
        return None if mlas.version() is None else MlasLinear(linear, gelu=gelu)
    ops = _ops()
    fused = kernel == "onednn"
    return None if ops is None else PackedLinear(linear, ops, gelu=gelu, fused=fused, dtype=dtype)


def _safe_rows(layer: ReplacedLinear, counts: Sequence[int] = _PROBE_ROWS) -> int | None:
    """Smallest row count from which a row's bits no longer depend on how many there are, or None."""
    x = _probe(2 * max(counts), layer.in_features)
    reference = layer(x)
    differing = 0
    for rows in counts:
        start = rows % 7  # rows must not depend on where in memory they begin either
        if not torch.equal(layer(x[start : start + rows]), reference[start : start + rows]):
            differing = rows
    if differing >= _SMALL_ROWS:
        return None
    return min(rows for rows in counts if rows > differing)


def _probe(rows: int, features: int) -> torch.Tensor:
    """[rows, features] float32, the same every time and without touching the global generator."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + features)
    return torch.randn(rows, features, generator=generator)

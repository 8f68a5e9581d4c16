"""Prepacked linears: same numbers as F.linear, same bits whatever the row count, safe fallbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from gpu.device import linears
from gpu.device.linears import PackedLinear, prepack, prepack_one

SHAPES = [(384, 384), (1536, 384), (384, 1536), (96, 32), (1, 384), (3, 32), (65, 31)]

needs_ops = pytest.mark.skipif(linears._ops() is None, reason="this torch has no oneDNN linear ops")


def linear(out: int, features: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out * 7 + features)
    return nn.Linear(features, out, bias=bias).requires_grad_(False)


@needs_ops
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_numbers_as_torch(shape: tuple[int, int], bias: bool) -> None:
    plain = linear(*shape, bias=bias)
    packed = prepack_one(plain)
    assert isinstance(packed, PackedLinear)
    for lead in ((1, 7), (5,), (0,), (2, 0, 3), (40,)):
        x = torch.randn(*lead, shape[1])
        got, want = packed(x), functional.linear(x, plain.weight, plain.bias)
        assert got.shape == want.shape
        assert torch.allclose(got, want, atol=2e-5, rtol=1e-5)


@needs_ops
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_row_count(shape: tuple[int, int]) -> None:
    """A06: rows 1 to 40 and some larger, from any offset; a lone row took another code path."""
    packed = prepack_one(linear(*shape))
    x = torch.randn(600, shape[1])
    whole = packed(x)
    for rows in [*range(1, 41), 63, 64, 65, 127, 255, 257, 512]:
        for start in (0, 3, 31):
            assert torch.equal(packed(x[start : start + rows]), whole[start : start + rows]), rows


class Block(nn.Module):
    """`act(dense(x))` under the names that BERT-like classes use."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.dense = linear(64, 32)
        self.intermediate_act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(x))
        return out


@needs_ops
@pytest.mark.parametrize(
    ("activation", "fused"),
    [
        (ACT2FN["gelu"], 1),
        (nn.GELU(), 1),
        (nn.GELU(approximate="tanh"), 0),
        (ACT2FN["gelu_new"], 0),
        (ACT2FN["relu"], 0),
        (ACT2FN["gelu_python"], 0),
    ],
)
def test_only_exact_gelu_becomes_an_epilogue(activation: Any, fused: int) -> None:
    block = Block(activation)
    x = torch.randn(9, 32)
    want = block(x)
    report = prepack(block)
    assert (report.fused, report.replaced, report.kept) == (fused, 1, 0)
    assert torch.allclose(block(x), want, atol=1e-5)
    assert isinstance(block.intermediate_act_fn, nn.Identity) == bool(fused)


def test_without_the_ops_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_ops", lambda: None)
    block = Block(nn.GELU())
    report = prepack(block)
    assert type(block.dense) is nn.Linear and report.name == "torch"


@needs_ops
def test_a_layer_whose_result_differs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = linears._ops()
    assert ops is not None
    reorder, apply = ops

    def broken(*args: Any) -> torch.Tensor:
        return apply(*args) * 1.01

    monkeypatch.setattr(linears, "_ops", lambda: (reorder, broken))
    block = Block(nn.GELU())
    report = prepack(block)
    assert type(block.dense) is nn.Linear
    assert (report.replaced, report.kept, report.name) == (0, 1, "torch")


@needs_ops
def test_a_layer_of_another_dtype_is_left_alone() -> None:
    block = Block(nn.GELU()).to(torch.bfloat16)
    assert prepack(block).kept == 1 and type(block.dense) is nn.Linear


@needs_ops
def test_a_shape_that_no_filling_makes_stable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose kernel depends on the row count must not be promised as bit-equal."""
    ops = linears._ops()
    assert ops is not None
    reorder, apply = ops

    def moody(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return apply(x, *args) * (1.0 + 1e-6 * (x.shape[0] % 3))

    monkeypatch.setattr(linears, "_ops", lambda: (reorder, moody))
    report = prepack(Block(nn.ReLU()))
    assert report.unstable == ((64, 32),)


@needs_ops
def test_original_weights_are_handed_back_once_packed() -> None:
    freed: list[tuple[int, ...]] = []
    prepack(nn.Sequential(linear(8, 4), linear(3, 8)), lambda w: freed.append(tuple(w.shape)))
    assert freed == [(8, 4), (3, 8)]

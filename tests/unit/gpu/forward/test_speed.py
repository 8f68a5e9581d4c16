"""`speed`: refused with the reason where it cannot be had; where it can, close to fp32 and said in the reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from gpu.attention import LayerKind, PackLayout, SdpaBackend
from gpu.batch import EncodedItem, ItemOptions, ItemResult, pack
from gpu.device import linears
from gpu.device.linears import PackedLinear, prepack
from gpu.faults import ModelLoadError
from gpu.forward import speed
from gpu.load import make_runner_factory
from tests.support.models import write_model
from tests.support.models_outputs import write_static
from tests.support.models_vision import write_clip

CPU = torch.device("cpu")
needs_bf16 = pytest.mark.skipif(
    linears._ops() is None or not speed.cpu_has_bf16(), reason="this CPU has no bfloat16 products"
)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"speed": "int8"}, "int8.*not offered.*neighbours"),
        ({"speed": "fast"}, "fast"),
        ({"speed": "bf16", "device": torch.device("cuda", 0)}, "CPU.*dtype"),
        ({"speed": "bf16", "dtype": torch.bfloat16}, "float32"),
        ({"speed": "bf16", "prepack": False}, "prepack"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(given: dict[str, Any], told: str) -> None:
    arguments = {"device": CPU, "dtype": torch.float32, **given}
    with pytest.raises(ModelLoadError, match=told):
        speed.check_possible(arguments.pop("speed"), **arguments)


def test_a_cpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "cpu_has_bf16", lambda: False)
    with pytest.raises(ModelLoadError, match="avx512_bf16"):
        speed.check_possible("bf16", device=CPU, dtype=torch.float32)
    speed.check_possible("off", device=CPU, dtype=torch.float32, prepack=False)


def test_the_setting_is_checked_before_anything_is_read() -> None:
    with pytest.raises(ModelLoadError, match="speed"):
        make_runner_factory("m", "/nowhere", speed="turbo")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 96)
        self.intermediate_act_fn = ACT2FN["gelu"]


@needs_bf16
def test_only_the_layers_asked_for_become_bfloat16() -> None:
    torch.manual_seed(0)
    half, whole = _Block(), nn.Sequential(nn.Linear(96, 8))
    model = nn.ModuleList([half, whole]).requires_grad_(False).eval()
    x = torch.randn(33, 64)
    wanted = half.intermediate_act_fn(half.dense(x))
    report = prepack(model, half_parents={half})
    assert (report.half, report.replaced, report.fused) == (1, 2, 1)
    assert report.name == "onednn-prepacked-bf16"
    got = half.intermediate_act_fn(half.dense(x))
    assert got.dtype == torch.bfloat16  # the second linear of the block takes it as it is
    assert torch.nn.functional.cosine_similarity(got.float(), wanted).min() > 0.9999
    second = whole[0]
    assert isinstance(second, PackedLinear)
    assert second(x.new_zeros(0, 96)).dtype == second(got.float()).dtype == torch.float32
    assert half.dense(x[:0]).dtype == torch.bfloat16


def _runner(folder: Path, **settings: Any) -> Any:
    return make_runner_factory("m", folder, **settings)()


def _rows(runner: Any, task: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    items = [
        EncodedItem(rng.integers(5, 40, size=n).astype(np.int32), ItemOptions(task=task))
        for n in (1, 3, 3, 9, 30)
    ]
    outcomes = runner.forward(pack(items))
    assert all(isinstance(outcome, ItemResult) for outcome in outcomes), outcomes
    return np.stack([o.dense if task == "embed" else o.scores for o in outcomes])


@needs_bf16
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "qwen3"])
def test_vectors_stay_close_and_the_reply_says_bfloat16(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / family, family)
    exact, fast = _runner(folder), _runner(folder, speed="bf16")
    assert exact.info.dtype == "float32" and fast.info.dtype == "bfloat16"
    assert fast.info.fingerprint != exact.info.fingerprint, "the numbers are others"
    assert fast.info.linears == "onednn-prepacked-bf16"
    assert any("bfloat16" in note and "cosine" in note for note in fast.info.notes)
    a, b = _rows(exact, "embed"), _rows(fast, "embed")
    assert not np.array_equal(a, b)
    assert (a * b).sum(axis=1).min() > 0.9995


@needs_bf16
def test_heads_stay_in_fp32(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "bert", labels=3)
    runner = _runner(folder, speed="bf16")
    assert runner.info.dtype == "bfloat16"
    a, b = _rows(_runner(folder), "classify"), _rows(runner, "classify")
    assert np.abs(a - b).max() < 0.02 and not np.array_equal(a, b)
    model = torch.nn.Module()
    model.base = torch.nn.Module()
    model.base.layer, model.base.pooler = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    model.classifier = nn.Linear(2, 1)
    parents = speed.half_parents(model, model.base)
    assert model.base in parents
    assert model not in parents and model.base.pooler not in parents


@needs_bf16
@pytest.mark.parametrize("causal", [False, True])
def test_an_items_own_length_decides_about_its_attention(causal: bool) -> None:
    torch.manual_seed(1)
    backend = SdpaBackend(half_from=8)
    layer = LayerKind(causal, None, None, None, 0.25, 4, 2, 16)
    lengths = (7, 8, 20)
    layout = PackLayout.of(np.cumsum([0, *lengths]), CPU)
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    exact = SdpaBackend().run(q, k, v, SdpaBackend().plan(layout, layer, q.dtype))
    got = backend.run(q, k, v, backend.plan(layout, layer, q.dtype))
    assert got.dtype == torch.float32
    assert torch.equal(got[:7], exact[:7])
    assert not torch.equal(got[7:], exact[7:])
    assert torch.cosine_similarity(got.flatten(1), exact.flatten(1)).min() > 0.9999
    windowed = LayerKind(causal, 4, 4, None, 0.25, 4, 2, 16)
    plan = backend.plan(layout, windowed, q.dtype)
    assert torch.equal(backend.run(q, k, v, plan), SdpaBackend().run(q, k, v, plan))


@pytest.mark.parametrize("write", [write_static, write_clip])
def test_models_that_have_no_such_products_refuse_it(tmp_path: Path, write: Any) -> None:
    factory = make_runner_factory("m", write(tmp_path / "m"), speed="bf16")
    with pytest.raises(ModelLoadError, match="speed"):
        factory()

"""The attention contract over every backend, and what is particular to each."""

from __future__ import annotations

import inspect
import threading
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.attention import (
    FlashInferBackend,
    LayerKind,
    MultiItem,
    NoBackend,
    PackLayout,
    SdpaBackend,
    VarlenBackend,
    backends_for,
    choose,
    varlen,
)
from gpu.attention import flashinfer as flashinfer_module
from gpu.attention.base import AttentionError
from gpu.attention.sdpa import WINDOW_ROWS
from tests.support.attention import (
    FlashInferDouble,
    flashinfer_parameters,
    kind,
    qkv,
    reference,
    varlen_double,
)
from tests.support.attention_suite import KINDS, AttentionSuite, layout_of

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
FLASHINFER_REFUSES = frozenset(
    name
    for name, layer in KINDS.items()
    if layer.bias
    or layer.head_dim not in (64, 128, 256)
    or "symmetric" in name
    or name in ("lopsided window", "window of itself", "grouped window")
)
VARLEN_REFUSES = frozenset(
    name for name, layer in KINDS.items() if layer.bias or layer.softcap is not None
)


class TestSdpa(AttentionSuite):
    backend = SdpaBackend()


class TestSdpaUngrouped(AttentionSuite):
    backend = SdpaBackend(group_equal_lengths=False)


class TestSdpaBfloat16(AttentionSuite):
    backend = SdpaBackend()
    dtype = torch.bfloat16
    tolerance = 4e-2


class TestSdpaFloat16(AttentionSuite):
    """A05: half precision on CPU, masks included."""

    backend = SdpaBackend()
    dtype = torch.float16
    tolerance = 5e-3


class TestFlashInferDouble(AttentionSuite):
    """What we tell FlashInfer, carried out by a double that computes by its documentation."""

    backend = FlashInferBackend(make_wrapper=FlashInferDouble)
    asked_device = "cuda"
    tolerance = 2e-6
    refused = FLASHINFER_REFUSES


class TestVarlenDouble(AttentionSuite):
    """What we tell varlen_attn, carried out by a double that computes by its docstring."""

    backend = VarlenBackend()
    asked_device = "cuda"
    tolerance = 2e-6
    refused = VARLEN_REFUSES

    @pytest.fixture(autouse=True)
    def double(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(varlen, "_function", lambda: (varlen_double, None))
        monkeypatch.setattr(varlen, "_capability", lambda device: (9, 0))


if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestSdpaOnCuda(AttentionSuite):
        backend = SdpaBackend()
        device = "cuda"
        tolerance = 1e-3  # TF32 is off by default; this leaves room for it

    @pytest.mark.gpu
    @pytest.mark.skipif(flashinfer_module._missing() is not None, reason="needs flashinfer-python")
    class TestFlashInfer(AttentionSuite):
        backend = FlashInferBackend()
        device = "cuda"
        dtype = torch.bfloat16
        tolerance = 4e-2
        refused = FLASHINFER_REFUSES

    @pytest.mark.gpu
    class TestVarlen(AttentionSuite):
        backend = VarlenBackend()
        device = "cuda"
        dtype = torch.bfloat16
        tolerance = 4e-2
        refused = VARLEN_REFUSES


@pytest.mark.gpu
def test_the_suites_above_ran_on_a_device() -> None:
    """The three classes above exist only where there is a CUDA device; this says so elsewhere."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert choose(
        backends_for("cuda", torch.bfloat16), kind(head_dim=32), torch.bfloat16, CUDA
    ).name


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("head_dim", [20, 64])
def test_same_bits_alone_grouped_and_elsewhere(name: str, head_dim: int) -> None:
    """A06, A01: an item's attention has the same bits alone, among equals, and anywhere in a pack."""
    base = KINDS[name]
    layer = LayerKind(
        causal=base.causal,
        window_left=base.window_left,
        window_right=base.window_right,
        softcap=base.softcap,
        scale=head_dim**-0.5,
        n_heads=base.n_heads,
        n_kv_heads=base.n_kv_heads,
        head_dim=head_dim,
        bias=base.bias,
    )
    backend = SdpaBackend()
    lengths = (33, 33, 33, 7, WINDOW_ROWS + 21, 1, 5, 5, 33)
    source = torch.Generator().manual_seed(3)
    bias = torch.randn(1, layer.n_heads, 300, 300, generator=source) if layer.bias else None
    items = [qkv(layer, n, seed=i) for i, n in enumerate(lengths)]
    alone = []
    for n, (q, k, v) in zip(lengths, items, strict=True):
        layout = layout_of((n,), CPU)
        alone.append(backend.run(q, k, v, backend.plan(layout, layer, torch.float32), bias))
    for order in ([*range(9)], [8, 3, 0, 1, 2, 6, 7, 5, 4], [4, 7, 2, 8, 1, 6, 0, 5, 3]):
        layout = layout_of(tuple(lengths[i] for i in order), CPU)
        q, k, v = (torch.cat([items[i][part] for i in order]) for part in range(3))
        out = backend.run(q, k, v, backend.plan(layout, layer, torch.float32), bias)
        for start, i in zip(layout.cu_seqlens, order, strict=False):
            assert torch.equal(out[start : start + lengths[i]], alone[i]), (order, i, lengths[i])


def test_equal_lengths_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(q.shape[0])
        return real(q, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    layer = kind()
    backend = SdpaBackend()
    layout = layout_of((9, 9, 9, 0, 9, 4, 4, 2), CPU)
    backend.run(*qkv(layer, layout.total_tokens), backend.plan(layout, layer, torch.float32))
    assert calls == [4, 2, 1]


def test_windows_cost_length_times_window() -> None:
    """A long windowed item is never computed, nor masked, as length x length."""
    layer = kind(window_left=64, window_right=64)
    plan = SdpaBackend().plan(layout_of((8192,), CPU), layer, torch.float32)
    ((_, _, _, calls),) = plan.runs
    assert sum((c.q1 - c.q0) * (c.k1 - c.k0) for c in calls) <= 8192 * (WINDOW_ROWS + 128)
    masks = {id(c.mask): c.mask for c in calls if c.mask is not None}
    assert sum(mask.numel() for mask in masks.values()) <= 3 * WINDOW_ROWS * (WINDOW_ROWS + 128)


def test_window_that_reaches_everything_needs_no_mask() -> None:
    plan = SdpaBackend().plan(
        layout_of((8, 9), CPU), kind(window_left=7, window_right=7), torch.float32
    )
    masks = [call.mask is None for _, _, _, calls in plan.runs for call in calls]
    assert masks == [True, False]


def test_bias_that_covers_nothing_is_refused() -> None:
    layer = kind(bias=True)
    backend = SdpaBackend()
    plan = backend.plan(layout_of((5, 6), CPU), layer, torch.float32)
    with pytest.raises(AttentionError, match="covers neither the pack of 11 tokens"):
        backend.run(*qkv(layer, 11), plan, torch.zeros(1, 4, 4, 4))


class TestChoice:
    def test_first_that_does_not_refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(varlen, "_function", lambda: (varlen_double, None))
        monkeypatch.setattr(varlen, "_capability", lambda device: (9, 0))
        backends = (
            FlashInferBackend(make_wrapper=FlashInferDouble),
            VarlenBackend(),
            SdpaBackend(),
        )
        served = {
            name: choose(backends, layer, torch.bfloat16, CUDA).name
            for name, layer in KINDS.items()
        }
        assert served["causal window"] == served["soft cap causal window"] == "flashinfer"
        assert served["symmetric window"] == served["head size 32"] == "varlen"
        assert served["bias"] == "sdpa"
        multi = kind(causal=True, head_dim=64, multi_item=True)
        assert choose(backends, multi, torch.bfloat16, CUDA).name == "flashinfer"
        assert choose(backends[1:], multi, torch.bfloat16, CUDA).name == "sdpa"

    def test_every_refusal_is_named(self) -> None:
        backends = (FlashInferBackend(make_wrapper=FlashInferDouble), VarlenBackend())
        with pytest.raises(NoBackend) as caught:
            choose(backends, kind(), torch.float32, CPU)
        assert "flashinfer: runs on CUDA" in str(caught.value)
        assert "varlen: runs on CUDA" in str(caught.value)

    @pytest.mark.parametrize(
        ("layer", "dtype", "words"),
        [
            (kind(head_dim=64), torch.float32, "float16 and bfloat16"),
            (kind(head_dim=32), torch.bfloat16, "head size 32"),
            (kind(head_dim=96), torch.bfloat16, "head size 96"),
            (kind(head_dim=64, window_left=4, window_right=4), torch.bfloat16, "look back only"),
            (kind(head_dim=64, window_left=4), torch.bfloat16, "only in causal layers"),
            (kind(head_dim=64, bias=True), torch.bfloat16, "additive bias"),
        ],
    )
    def test_flashinfer_says_why(self, layer: LayerKind, dtype: torch.dtype, words: str) -> None:
        reason = FlashInferBackend(make_wrapper=FlashInferDouble).refuses(layer, dtype, CUDA)
        assert reason is not None and words in reason

    def test_flashinfer_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flashinfer_module, "_missing", lambda: "the package is not installed")
        reason = FlashInferBackend().refuses(kind(head_dim=64), torch.bfloat16, CUDA)
        assert reason == "the package is not installed"

    def test_varlen_of_an_older_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(varlen, "_function", lambda: (None, "varlen_attn lacks window_size"))
        reason = VarlenBackend().refuses(kind(), torch.bfloat16, CUDA)
        assert reason == "varlen_attn lacks window_size"

    def test_backends_for(self) -> None:
        def names(*args: object, **kwargs: object) -> list[str]:
            return [backend.name for backend in backends_for(*args, **kwargs)]  # type: ignore[arg-type]

        assert names("cpu", torch.float32) == ["sdpa"]
        assert names("cpu", torch.bfloat16) == ["sdpa"]
        assert names("cuda", torch.float32) == ["sdpa"]
        assert names("cuda:1", torch.bfloat16) == ["flashinfer", "varlen", "sdpa"]
        assert names("cuda", torch.float16, batch_invariant=True)[0] == "varlen"
        assert names("cuda", torch.float16, "varlen, sdpa") == ["varlen", "sdpa"]
        with pytest.raises(ValueError, match="say auto, or any of flashinfer, varlen, sdpa"):
            backends_for("cpu", torch.float32, "xformers")


class TestFlashInferCalls:
    def plans(self, backend: FlashInferBackend, layer: LayerKind, layout: PackLayout) -> dict:
        FlashInferDouble.made.clear()
        backend.plan(layout, layer, torch.bfloat16)
        return FlashInferDouble.made[0].plans[0]

    def test_parameters_of_the_wrappers_exist(self) -> None:
        """Against the installed FlashInfer, or the names read from the wheel named in the file."""
        version, classes = flashinfer_parameters()
        assert version
        layout = PackLayout.of([0, 5, 9], CPU, MultiItem((2, 4), ((1, 2, 3), ())))
        for multi, which in ((False, "Ragged"), (True, "Paged")):
            parameters = classes[f"BatchPrefillWith{which}KVCacheWrapper"]
            for options in (
                {},
                {"batch_invariant": True},
                {"batch_invariant": True, "fixed_split_size": 256},
            ):
                backend = FlashInferBackend(make_wrapper=FlashInferDouble, **options)  # type: ignore[arg-type]
                layer = kind(causal=True, head_dim=64, softcap=3.0, window_left=3, multi_item=multi)
                sent = self.plans(backend, layer, layout)
                assert set(sent) <= set(parameters["plan"])
            assert parameters["__init__"][1:3] == ["float_workspace_buffer", "kv_layout"]
            assert parameters["run"][1] == "q"
        assert classes["BatchPrefillWithRaggedKVCacheWrapper"]["run"][2:4] == ["k", "v"]
        assert classes["BatchPrefillWithPagedKVCacheWrapper"]["run"][2] == "paged_kv_cache"

    def test_values(self) -> None:
        layer = kind(
            causal=True,
            window_left=7,
            softcap=30.0,
            scale=0.3,
            n_heads=8,
            n_kv_heads=2,
            head_dim=64,
        )
        sent = self.plans(
            FlashInferBackend(make_wrapper=FlashInferDouble), layer, layout_of((3, 0, 4), CPU)
        )
        assert sent["qo_indptr"].tolist() == sent["kv_indptr"].tolist() == [0, 3, 7]
        assert (sent["causal"], sent["window_left"]) == (True, 7)
        assert (sent["logits_soft_cap"], sent["sm_scale"]) == (30.0, 0.3)
        assert (sent["num_qo_heads"], sent["num_kv_heads"], sent["head_dim_qk"]) == (8, 2, 64)
        assert sent["q_data_type"] is sent["kv_data_type"] is torch.bfloat16
        assert "disable_split_kv" not in sent and "fixed_split_size" not in sent

    def test_batch_invariant(self) -> None:
        """A06: the split over keys is off, or at fixed places."""
        layout, layer = layout_of((3, 4), CPU), kind(head_dim=64)
        whole = FlashInferBackend(batch_invariant=True, make_wrapper=FlashInferDouble)
        assert self.plans(whole, layer, layout)["disable_split_kv"] is True
        fixed = FlashInferBackend(
            batch_invariant=True, fixed_split_size=512, make_wrapper=FlashInferDouble
        )
        assert self.plans(fixed, layer, layout)["fixed_split_size"] == 512
        with pytest.raises(ValueError, match="only with batch_invariant"):
            FlashInferBackend(fixed_split_size=512)

    def test_wrappers_are_reused_and_share_a_workspace(self) -> None:
        FlashInferDouble.made.clear()
        backend = FlashInferBackend(make_wrapper=FlashInferDouble, workspace_bytes=64)
        for lengths in ((3, 4), (5,), (6, 1)):
            for layer in (kind(head_dim=64), kind(head_dim=64, causal=True)):
                backend.plan(layout_of(lengths, CPU), layer, torch.bfloat16)
        assert [len(double.plans) for double in FlashInferDouble.made] == [3, 3]
        assert FlashInferDouble.made[0].workspace is FlashInferDouble.made[1].workspace

    def test_wrappers_are_bounded(self) -> None:
        FlashInferDouble.made.clear()
        backend = FlashInferBackend(make_wrapper=FlashInferDouble, workspace_bytes=64)
        for window in range(40):
            layer = kind(head_dim=64, causal=True, window_left=window)
            backend.plan(layout_of((3,), CPU), layer, torch.bfloat16)
        assert len(backend._locals()[0]) == flashinfer_module.MAX_WRAPPERS

    def test_plan_taken_by_another_pack_is_made_again(self) -> None:
        """Two packs in flight on one thread share a wrapper and still get their own numbers."""
        backend = FlashInferBackend(make_wrapper=FlashInferDouble, workspace_bytes=64)
        layer = kind(head_dim=64)
        first, second = layout_of((3, 4), CPU), layout_of((5, 2), CPU)
        q, k, v = qkv(layer, 7)
        plan = backend.plan(first, layer, torch.float32)
        other = backend.plan(second, layer, torch.float32)
        for chosen, layout in ((plan, first), (other, second), (plan, first)):
            got = backend.run(q, k, v, chosen)
            want = reference(layer, layout, q, k, v)
            assert float((got.double() - want).abs().max()) < 2e-6

    def test_threads_do_not_share_wrappers(self) -> None:
        FlashInferDouble.made.clear()
        backend = FlashInferBackend(make_wrapper=FlashInferDouble, workspace_bytes=64)
        layer = kind(head_dim=64)
        threads = [
            threading.Thread(
                target=backend.plan, args=(layout_of((3,), CPU), layer, torch.bfloat16)
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
            thread.join()
        first, second = FlashInferDouble.made
        assert first.workspace is not second.workspace

    def test_item_longer_than_16_bits(self) -> None:
        layer = kind(causal=True, head_dim=64, multi_item=True)
        n = flashinfer_module.MAX_ITEM_TOKENS + 1
        items = MultiItem((1,), (tuple(range(1, n + 1)),))
        layout = PackLayout.of([0, n + 1], CPU, items)
        with pytest.raises(AttentionError, match="an item of 65536 tokens"):
            FlashInferBackend(make_wrapper=FlashInferDouble).plan(layout, layer, torch.bfloat16)


class TestVarlenCalls:
    def test_signature_of_the_installed_torch(self) -> None:
        function, reason = varlen._function()
        if function is None:
            pytest.skip(str(reason))
        real, double = inspect.signature(function), inspect.signature(varlen_double)
        assert set(double.parameters) <= set(real.parameters)
        backend = VarlenBackend(batch_invariant="num_splits" in real.parameters)
        plan = backend.plan(layout_of((3,), CPU), kind(), torch.bfloat16)
        real.bind(None, None, None, None, None, 1, 1, **plan.arguments)

    def test_real_function_on_meta_tensors(self) -> None:
        """The installed varlen_attn takes our call as far as shapes go; its kernel needs CUDA."""
        function, reason = varlen._function()
        if function is None:
            pytest.skip(str(reason))
        layer = kind(n_heads=6, n_kv_heads=2, window_left=4, window_right=4)
        layout = PackLayout.of([0, 3, 3, 9], "meta")
        backend = VarlenBackend()
        plan = backend.plan(layout, layer, torch.bfloat16)
        q, k, v = (t.to("meta") for t in qkv(layer, 9, dtype=torch.bfloat16))
        assert backend.run(q, k, v, plan).shape == (9, 6, 32)

    @pytest.mark.parametrize(
        ("layer", "window"),
        [
            (kind(), (-1, -1)),
            (kind(causal=True), (-1, 0)),
            (kind(causal=True, window_left=7), (7, 0)),
            (kind(window_left=5, window_right=5), (5, 5)),
        ],
    )
    def test_windows(self, layer: LayerKind, window: tuple[int, int]) -> None:
        plan = VarlenBackend().plan(layout_of((3,), CPU), layer, torch.bfloat16)
        assert plan.arguments["window_size"] == window
        assert "num_splits" not in plan.arguments

    def test_batch_invariant(self) -> None:
        """A06: no split over keys."""
        plan = VarlenBackend(batch_invariant=True).plan(
            layout_of((3,), CPU), kind(), torch.bfloat16
        )
        assert plan.arguments["num_splits"] == 1

    def test_empty_items_are_left_out(self) -> None:
        plan = VarlenBackend().plan(layout_of((0, 3, 0, 2), CPU), kind(), torch.bfloat16)
        assert plan.cu_seqlens.tolist() == [0, 3, 5] and plan.max_seqlen == 3


class TestLayout:
    def test_runs_join_adjacent_equal_lengths(self) -> None:
        runs = layout_of((5, 5, 0, 5, 2, 0, 0, 2, 5), CPU).runs
        assert [(run.start, run.length, run.count) for run in runs] == [
            (0, 5, 3),
            (15, 2, 2),
            (19, 5, 1),
        ]

    def test_tensors(self) -> None:
        layout = layout_of((5, 0, 2), CPU)
        assert layout.cu_seqlens_cpu.tolist() == [0, 5, 5, 7]
        assert layout.cu_seqlens_device.dtype == torch.int32
        assert (layout.n_items, layout.max_seqlen, layout.total_tokens) == (3, 5, 7)

    @pytest.mark.parametrize("bad", [[1, 2], [0, 5, 3]])
    def test_bad_prefix_sums(self, bad: list[int]) -> None:
        with pytest.raises(AssertionError):
            PackLayout.of(bad, CPU)

    def test_causal_kinds_are_one_key(self) -> None:
        assert kind(causal=True) == kind(causal=True, window_right=0)
        assert kind(causal=True, window_left=3, window_right=3).window_right == 0

    @pytest.mark.parametrize(
        ("prefixes", "positions"),
        [((0,), ((1,),)), ((1,), ((2,),)), ((1,), ((1, 3),)), ((1, 1), ((1,),))],
    )
    def test_bad_items(
        self, prefixes: tuple[int, ...], positions: tuple[tuple[int, ...], ...]
    ) -> None:
        with pytest.raises(AssertionError):
            MultiItem(prefixes, positions)

    def test_items_fill_their_sequence(self) -> None:
        with pytest.raises(AssertionError, match="fill their sequence"):
            PackLayout.of([0, *accumulate((4,))], CPU, MultiItem((2,), ((1,),)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    name=st.sampled_from(sorted(KINDS)),
    data=st.data(),
)
def test_any_pack(lengths: list[int], name: str, data: st.DataObject) -> None:
    """A06: any lengths, empty ones too: right by the reference, and each item as alone, to the bit."""
    layer = KINDS[name]
    backend = SdpaBackend()
    layout = layout_of(tuple(lengths), CPU)
    q, k, v = qkv(layer, layout.total_tokens, seed=data.draw(st.integers(0, 99)))
    bias = None
    if layer.bias:
        source = torch.Generator().manual_seed(1)
        # Larger than any pack here: a bias of exactly the pack's size would be read per item.
        bias = torch.randn(1, layer.n_heads, 321, 321, generator=source)
    out = backend.run(q, k, v, backend.plan(layout, layer, torch.float32), bias)
    want = reference(layer, layout, q, k, v, bias)
    # Scores without a scale reach 40, and what float32 loses of them shows in their values' size.
    bound = 1e-5 * max(1.0, float(want.abs().max())) if want.numel() else 0.0
    assert torch.allclose(out.double(), want, rtol=0, atol=bound)
    picked = data.draw(st.integers(0, len(lengths) - 1))
    rows = slice(layout.cu_seqlens[picked], layout.cu_seqlens[picked + 1])
    alone = layout_of((lengths[picked],), CPU)
    plan = backend.plan(alone, layer, torch.float32)
    assert torch.equal(
        backend.run(q[rows].clone(), k[rows].clone(), v[rows].clone(), plan, bias), out[rows]
    )

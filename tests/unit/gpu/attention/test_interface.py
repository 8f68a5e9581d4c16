"""The function that transformers calls, under tiny seeded models: packed == alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gpu.attention import (
    NAME,
    AttentionError,
    MultiItem,
    NoBackend,
    SdpaBackend,
    VarlenBackend,
    current_context,
    packed_context,
    register,
)
from gpu.attention.interface import attention
from gpu.batch import EncodedItem, pack
from tests.support.attention import kind, reference
from tests.support.attention_suite import layout_of

TOLERANCE = 2e-5  # fp32, on activations of size 4 to 22
LENGTHS = (1, 2, 7, 16, 16, 33, 50)
VOCAB = 100
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
LAYERS = ["sliding_attention", "full_attention"]

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "Bert": lambda: tf.BertModel(tf.BertConfig(**SMALL)),
    "XLMRoberta": lambda: tf.XLMRobertaModel(tf.XLMRobertaConfig(**SMALL, pad_token_id=1)),
    "Llama": lambda: tf.LlamaModel(tf.LlamaConfig(**GROUPED)),
    "Qwen3": lambda: tf.Qwen3Model(tf.Qwen3Config(**GROUPED)),
    "Qwen2 bidirectional": lambda: tf.Qwen2Model(tf.Qwen2Config(**GROUPED, is_causal=False)),
    "Mistral window": lambda: tf.MistralModel(tf.MistralConfig(**GROUPED, sliding_window=8)),
    "ModernBert": lambda: tf.ModernBertModel(
        tf.ModernBertConfig(**SMALL, local_attention=16, layer_types=LAYERS, pad_token_id=0)
    ),
    "Gemma2 soft cap": lambda: tf.Gemma2Model(
        tf.Gemma2Config(**GROUPED, sliding_window=8, layer_types=LAYERS, attn_logit_softcapping=2.0)
    ),
    "Gemma3 bidirectional": lambda: tf.Gemma3TextModel(
        tf.Gemma3TextConfig(
            **GROUPED, sliding_window=16, layer_types=LAYERS, use_bidirectional_attention=True
        )
    ),
    "T5": lambda: tf.T5EncoderModel(tf.T5Config(**T5)),
    "UMT5": lambda: tf.UMT5EncoderModel(tf.UMT5Config(**T5)),
}
CAUSAL = {"Llama", "Qwen3", "Mistral window", "Gemma2 soft cap"}
REFERENCES = {"Gemma2 soft cap": "eager"}  # transformers' sdpa has no soft cap


@pytest.fixture(scope="module", params=BUILDERS, ids=list(BUILDERS))
def model(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A tiny model, seeded and sharpened, and its states per item by transformers' own attention."""
    name: str = request.param
    torch.manual_seed(7)
    built = BUILDERS[name]().eval()
    for parameter in built.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3  # attention far from uniform, so that a leak is visible
    built.set_attn_implementation(REFERENCES.get(name, "sdpa"))  # type: ignore[operator]
    source = torch.Generator().manual_seed(1)
    items = [torch.randint(2, VOCAB, (n,), generator=source) for n in LENGTHS]
    fixed = {"use_cache": False} if "use_cache" in tf_parameters(built) else {}
    with torch.inference_mode():
        alone = [built(item[None], **fixed).last_hidden_state[0] for item in items]
    built.set_attn_implementation(register())  # type: ignore[operator]
    yield SimpleNamespace(name=name, built=built, items=items, fixed=fixed, alone=alone)


def tf_parameters(model: nn.Module) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def positions(model: SimpleNamespace, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    if "position_ids" not in tf_parameters(model.built):
        return {}
    offset = 2 if model.name == "XLMRoberta" else 0
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None] + offset}


def run_packed(
    model: SimpleNamespace, order: list[int], cu_seqlens: list[int] | None = None
) -> tuple[list[torch.Tensor], Any]:
    lengths = tuple(LENGTHS[i] for i in order)
    ids = torch.cat([model.items[i] for i in order])[None]
    bounds = cu_seqlens or [0, *accumulate(lengths)]
    with torch.inference_mode(), packed_context(bounds, "cpu") as context:
        out = model.built(ids, **positions(model, lengths), **model.fixed).last_hidden_state[0]
    return list(out.split(lengths)), context


def test_packed_equals_alone(model: SimpleNamespace) -> None:
    """A01, A11: every item of a pack, across the window, as transformers computes it alone."""
    got, context = run_packed(model, [*range(len(LENGTHS))])
    for states, want in zip(got, model.alone, strict=True):
        assert float((states - want).abs().max()) <= TOLERANCE
    assert context.calls == 2
    assert context.masks_seen == 0
    assert set(context.served_by.values()) == {"sdpa"}
    assert sum(context.layer_kinds.values()) == context.calls
    assert {layer.causal for layer in context.layer_kinds} == {model.name in CAUSAL}


def test_leak_would_be_seen(model: SimpleNamespace) -> None:
    """Control: the same call with one segment for all differs, so the test above can fail."""
    got, _ = run_packed(model, [*range(len(LENGTHS))], cu_seqlens=[0, sum(LENGTHS)])
    worst = max(float((s - w).abs().max()) for s, w in zip(got, model.alone, strict=True))
    assert worst > 100 * TOLERANCE


def test_order_does_not_matter(model: SimpleNamespace) -> None:
    """A06, A07: other neighbours, other place, other order."""
    order = [6, 3, 0, 5, 1, 4]
    got, _ = run_packed(model, order)
    for states, index in zip(got, order, strict=True):
        assert float((states - model.alone[index]).abs().max()) <= TOLERANCE


def test_a_call_outside_of_a_pack_is_refused(model: SimpleNamespace) -> None:
    """The function knows no batches: whoever forgot the pack must not get numbers."""
    with torch.inference_mode(), pytest.raises(AttentionError, match="outside of a pack"):
        model.built(torch.stack([model.items[3], model.items[4]]), **model.fixed)


class TestBiasOfT5:
    def test_bias_of_the_longest_item_alone(self) -> None:
        """The bias depends on the distance: max_seqlen x max_seqlen serves a pack of any size."""
        torch.manual_seed(3)
        built = tf.T5EncoderModel(tf.T5Config(**T5)).eval()
        built.set_attn_implementation(register())
        items = [torch.randint(2, VOCAB, (n,)) for n in LENGTHS]
        with torch.inference_mode():
            with packed_context([0, *accumulate(LENGTHS)], "cpu"):
                whole = built(torch.cat(items)[None]).last_hidden_state
            first = built.encoder.block[0].layer[0].SelfAttention
            compute = first.compute_bias
            shapes = []

            def limited(query_length: int, key_length: int, **kwargs: Any) -> torch.Tensor:
                context = current_context()
                longest = context.layout.max_seqlen  # type: ignore[union-attr]
                bias = compute(longest, longest, **kwargs)
                shapes.append(tuple(bias.shape))
                return bias

            first.compute_bias = limited
            with packed_context([0, *accumulate(LENGTHS)], "cpu"):
                small = built(torch.cat(items)[None]).last_hidden_state
        assert shapes == [(1, 4, max(LENGTHS), max(LENGTHS))]
        assert float((whole - small).abs().max()) <= 1e-6


class TestRegistration:
    def test_idempotent_and_without_masks(self) -> None:
        assert register() == register() == NAME
        assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS
        assert "flash" not in NAME
        assert tf.AttentionInterface()[NAME] is attention

    def test_a_mask_function_under_the_name_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, NAME, lambda: None)
        with pytest.raises(AttentionError, match="builds masks for 'packed'"):
            register()


def call(
    heads: int = 4, kv_heads: int = 4, total: int = 6, n: int = 1, dim: int = 32
) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(5)
    return tuple(
        torch.randn(n, total, h, dim, generator=source).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    )


class Module(nn.Module):
    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


class TestLayerKind:
    @pytest.mark.parametrize(
        ("module", "kwargs", "expected"),
        [
            (Module(True), {}, {"causal": True}),
            (Module(False), {}, {"causal": False}),
            (Module(None), {}, {"causal": True}),
            (Module(True), {"is_causal": False}, {"causal": False}),
            (Module(False), {"is_causal": True}, {"causal": True}),
            (Module(True), {"sliding_window": 8}, {"causal": True, "window_left": 7}),
            (
                Module(False),
                {"sliding_window": 8},
                {"causal": False, "window_left": 7, "window_right": 7},
            ),
            (Module(False), {"softcap": 30.0}, {"softcap": 30.0}),
            (Module(False), {"scaling": 0.25}, {"scale": 0.25}),
        ],
    )
    def test_read(self, module: nn.Module, kwargs: Any, expected: dict[str, Any]) -> None:
        """A11: the call's word beats the module's; windows are exclusive bounds."""
        with packed_context([0, 6], "cpu") as context:
            attention(module, *call(), None, dropout=0.1, **kwargs)
        assert list(context.layer_kinds) == [kind(**expected)]

    def test_grouped_heads_come_unrepeated(self) -> None:
        with packed_context([0, 6], "cpu") as context:
            attention(Module(True), *call(heads=8, kv_heads=2))
        (layer,) = context.layer_kinds
        assert (layer.n_heads, layer.n_kv_heads) == (8, 2)

    def test_sinks_are_refused(self) -> None:
        with packed_context([0, 6], "cpu"), pytest.raises(AttentionError, match="sinks"):
            attention(Module(True), *call(), None, s_aux=torch.zeros(4))

    def test_other_value_heads_are_refused(self) -> None:
        q, k, v = call()
        with (
            packed_context([0, 6], "cpu"),
            pytest.raises(AttentionError, match="value heads of 16"),
        ):
            attention(Module(True), q, k, v[..., :16])


class TestContexts:
    def test_call_of_another_shape_is_refused(self) -> None:
        """A vision tower inside the forward must not be cut along the text's items."""
        with packed_context([0, 4], "cpu"), pytest.raises(AttentionError, match="pack of 4 tokens"):
            attention(Module(False), *call(total=6))
        with packed_context([0, 6], "cpu"), pytest.raises(AttentionError, match="pack of 6 tokens"):
            attention(Module(False), *call(total=6, n=2))

    def test_masks_are_counted(self) -> None:
        """A model that builds a mask relies on it: the self-check must see that."""
        with packed_context([0, 6], "cpu") as context:
            attention(Module(False), *call(), torch.zeros(1, 1, 6, 6))
            attention(Module(False), *call())
        assert (context.calls, context.masks_seen) == (2, 1)

    def test_nested_contexts(self) -> None:
        assert current_context() is None
        with packed_context([0, 6], "cpu") as outer:
            with packed_context([0, 2, 6], "cpu") as inner:
                attention(Module(False), *call())
            attention(Module(False), *call())
            with pytest.raises(ZeroDivisionError), packed_context([0, 1], "cpu"):
                _ = 1 / 0
            assert current_context() is outer
        assert (outer.calls, inner.calls) == (1, 1)
        assert current_context() is None

    def test_threads_do_not_see_each_other(self) -> None:
        """Executor threads run one model object at once, each with its own pack."""
        inside, outcomes = threading.Barrier(2, timeout=30), {}
        q, k, v = call()

        def work(name: str, bounds: list[int]) -> None:
            with packed_context(bounds, "cpu"):
                inside.wait()
                outcomes[name] = attention(Module(False), q, k, v)[0]
                inside.wait()

        threads = [
            threading.Thread(target=work, args=("one", [0, 6])),
            threading.Thread(target=work, args=("two", [0, 2, 6])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_context() is None
        rows = [t[0].transpose(0, 1) for t in (q, k, v)]
        for name, lengths in (("one", (6,)), ("two", (2, 4))):
            want = reference(kind(), layout_of(lengths, "cpu"), *rows)
            assert float((outcomes[name][0].double() - want).abs().max()) < 1e-5

    def test_one_plan_per_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plans = []
        backend = SdpaBackend()
        real = backend.plan
        monkeypatch.setattr(
            backend, "plan", lambda *args: (plans.append(args[1]), real(*args))[1], raising=True
        )
        with packed_context([0, 2, 6], "cpu", [backend]) as context:
            for _ in range(5):
                attention(Module(False), *call())
                attention(Module(True), *call())
        assert context.calls == 10 and len(plans) == 2

    def test_packed_batch(self) -> None:
        import numpy as np

        batch = pack([EncodedItem(np.ones(n, np.int32)) for n in (1, 3, 2)])
        with packed_context(batch, "cpu") as context:
            assert attention(Module(False), *call())[0].shape == (1, 6, 4, 32)
        assert context.layout.lengths == (3, 2, 1)

    def test_no_backend_names_the_reason(self) -> None:
        with (
            packed_context([0, 6], "cpu", [VarlenBackend()]),
            pytest.raises(NoBackend, match="varlen: runs on CUDA, not on cpu"),
        ):
            attention(Module(False), *call())

    def test_multi_item_needs_a_causal_layer(self) -> None:
        items = MultiItem((2,), ((1, 2, 1, 2),))
        with packed_context([0, 6], "cpu", multi_item=items) as context:
            attention(Module(True), *call())
            with pytest.raises(AttentionError, match="causal model"):
                attention(Module(False), *call())
        assert [layer.multi_item for layer in context.layer_kinds] == [True]

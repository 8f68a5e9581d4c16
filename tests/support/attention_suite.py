"""The contract every attention backend passes, against the float64 reference.

`AttentionSuite` is subclassed once per backend (SDPA on CPU; FlashInfer and varlen through their doubles
on CPU; all three on CUDA under the `gpu` marker). A layer kind that a backend refuses has no numbers to
check; each subclass states which kinds those must be, so that a new refusal cannot pass unseen.
"""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import pytest
import torch

from gpu.attention.base import AttentionBackend, LayerKind, MultiItem, PackLayout
from tests.support.attention import kind, qkv, reference

KINDS: dict[str, LayerKind] = {
    "bidirectional": kind(head_dim=64),
    "causal": kind(causal=True, head_dim=64),
    "causal window": kind(causal=True, window_left=7, head_dim=64),
    "symmetric window": kind(window_left=5, window_right=5, head_dim=64),
    "lopsided window": kind(window_left=3, window_right=9, head_dim=64),
    "window of itself": kind(window_left=0, window_right=0, head_dim=64),
    "grouped heads": kind(n_heads=9, n_kv_heads=3, head_dim=64),
    "grouped causal": kind(n_heads=9, n_kv_heads=3, head_dim=64, causal=True),
    "grouped window": kind(n_heads=9, n_kv_heads=3, head_dim=64, window_left=6, window_right=6),
    "soft cap": kind(softcap=2.0, head_dim=64),
    "soft cap causal window": kind(softcap=2.0, causal=True, window_left=9, head_dim=64),
    "soft cap grouped": kind(softcap=2.0, n_heads=4, n_kv_heads=2, causal=True, head_dim=64),
    "scale": kind(scale=0.5, head_dim=64),
    "head size 32": kind(head_dim=32),
    "head size 32 causal": kind(head_dim=32, causal=True),
    "head size 96": kind(head_dim=96, causal=True),
    "head size 128": kind(head_dim=128, causal=True),
    "bias": kind(bias=True, head_dim=64),
    "bias causal": kind(bias=True, causal=True, scale=1.0, head_dim=64),
    "bias window": kind(bias=True, window_left=4, window_right=4, head_dim=64),
    "bias soft cap": kind(bias=True, softcap=3.0, head_dim=64),
}
LENGTHS: dict[str, tuple[int, ...]] = {
    "mixed": (40, 17, 9, 3, 2, 1),
    "ones": (1, 1, 1),
    "equal": (12, 12, 12, 5, 5),
    "empty items": (0, 8, 0, 8, 0, 0, 3, 0),
    "single": (50,),
    "equal apart": (6, 11, 6, 11),
}
LONG = 600  # crosses two of the SDPA backend's query blocks


def layout_of(lengths: tuple[int, ...], device: torch.device | str) -> PackLayout:
    return PackLayout.of([0, *accumulate(lengths)], device)


class AttentionSuite:
    """Subclasses set the four class attributes."""

    backend: ClassVar[AttentionBackend]
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    tolerance: ClassVar[float] = 1e-5
    refused: ClassVar[frozenset[str]] = frozenset()
    asked_device: ClassVar[str | None] = None  # what `refuses` is asked about, when not `device`

    def serves(self, layer: LayerKind) -> bool:
        """False for a refused kind, which must then be one of the stated ones."""
        reason = self.backend.refuses(
            layer, self.asked_dtype(), torch.device(self.asked_device or self.device)
        )
        if reason is None:
            return True
        stated = {KINDS[name] for name in self.refused} | ({layer} if layer.multi_item else set())
        assert layer in stated, f"{self.backend.name} refuses ({layer}): {reason}"
        return False

    def asked_dtype(self) -> torch.dtype:
        return self.dtype if self.asked_device is None else torch.bfloat16

    def attend(
        self,
        layer: LayerKind,
        layout: PackLayout,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = (t.to(self.device) for t in (q, k, v))
        bias = None if bias is None else bias.to(self.device)
        plan = self.backend.plan(layout, layer, self.dtype)
        out = self.backend.run(q, k, v, plan, bias)
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        return out.cpu()

    def inputs(self, layer: LayerKind, total: int) -> tuple[torch.Tensor, ...]:
        return qkv(layer, total, seed=total, dtype=self.dtype)

    def bias_for(self, layer: LayerKind, size: int) -> torch.Tensor | None:
        if not layer.bias:
            return None
        source = torch.Generator().manual_seed(size)
        return 2 * torch.randn(1, layer.n_heads, size, size, generator=source)

    def close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Of the largest value: rounding grows with it, and by instruction set."""
        if not got.numel():
            return
        worst = float((got.double() - want).abs().max())
        bound = self.tolerance * max(1.0, float(want.abs().max()))
        assert worst <= bound, f"{worst} > {bound}"

    def test_refusals_are_the_stated_ones(self) -> None:
        device = torch.device(self.asked_device or self.device)
        found = {
            name
            for name, layer in KINDS.items()
            if self.backend.refuses(layer, self.asked_dtype(), device) is not None
        }
        assert found == self.refused

    @pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
    @pytest.mark.parametrize("layer", KINDS.values(), ids=KINDS)
    def test_reference(self, layer: LayerKind, lengths: tuple[int, ...]) -> None:
        if not self.serves(layer):
            return
        layout = layout_of(lengths, self.device)
        q, k, v = self.inputs(layer, layout.total_tokens)
        for size in (layout.total_tokens, layout.max_seqlen):
            bias = self.bias_for(layer, size)
            want = reference(layer, layout, q, k, v, bias)
            self.close(self.attend(layer, layout, q, k, v, bias), want)

    @pytest.mark.parametrize(
        "name", ["bidirectional", "causal", "causal window", "symmetric window", "bias window"]
    )
    def test_long_item(self, name: str) -> None:
        layer = KINDS[name]
        if not self.serves(layer):
            return
        layout = layout_of((LONG, 3), self.device)
        q, k, v = self.inputs(layer, layout.total_tokens)
        bias = self.bias_for(layer, layout.max_seqlen)
        want = reference(layer, layout, q, k, v, bias)
        self.close(self.attend(layer, layout, q, k, v, bias), want)

    @pytest.mark.parametrize("layer", KINDS.values(), ids=KINDS)
    def test_items_do_not_leak(self, layer: LayerKind) -> None:
        """One segment for all must differ, or the comparison could not see a leak."""
        if not self.serves(layer):
            return
        lengths = (20, 20, 13)
        split, joined = layout_of(lengths, self.device), layout_of((sum(lengths),), self.device)
        q, k, v = self.inputs(layer, split.total_tokens)
        bias = self.bias_for(layer, split.total_tokens)
        apart = self.attend(layer, split, q, k, v, bias)
        start = 0
        for n in lengths:
            part = slice(start, start + n)
            alone_bias = None if bias is None else bias[..., part, part]
            alone = layout_of((n,), self.device)
            want = reference(layer, alone, q[part], k[part], v[part], alone_bias)
            self.close(apart[part], want)
            start += n
        if (layer.window_left, layer.window_right) != (0, 0):
            together = self.attend(layer, joined, q, k, v, bias)
            assert float((together - apart).abs().max()) > 0.05

    @pytest.mark.parametrize("layer", KINDS.values(), ids=KINDS)
    def test_non_finite_neighbour(self, layer: LayerKind) -> None:
        """A03: an item of NaN leaves the items before and after it untouched, to the bit."""
        if not self.serves(layer):
            return
        layout = layout_of((10, 10, 10, 4), self.device)
        q, k, v = self.inputs(layer, layout.total_tokens)
        bias = self.bias_for(layer, layout.max_seqlen)
        before = self.attend(layer, layout, q, k, v, bias)
        for tensor in (q, k, v):
            tensor[10:20] = float("nan")
        after = self.attend(layer, layout, q, k, v, bias)
        rest = torch.cat([torch.arange(10), torch.arange(20, 34)])
        assert torch.equal(before[rest], after[rest])
        assert bool(after[10:20].isnan().all())

    def test_strided_inputs(self) -> None:
        """transformers hands in views: parts of a fused projection, and head-major tensors."""
        layer = KINDS["causal"]
        layout = layout_of((9, 4), self.device)
        q, k, v = self.inputs(layer, 13)
        want = reference(layer, layout, q, k, v)
        fused = torch.stack([q, k, v], dim=1)  # [total, 3, heads, dim]
        self.close(self.attend(layer, layout, fused[:, 0], fused[:, 1], fused[:, 2]), want)
        major = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
        self.close(self.attend(layer, layout, major[0], major[1], major[2]), want)

    def test_nothing_but_empty_items(self) -> None:
        layer = KINDS["bidirectional"]
        layout = layout_of((0, 0), self.device)
        q, k, v = self.inputs(layer, 0)
        assert self.attend(layer, layout, q, k, v).shape == (0, layer.n_heads, layer.head_dim)

    def test_multi_item(self) -> None:
        """Each item's tokens come out as if it were alone behind the prefix."""
        layer = kind(causal=True, n_heads=4, n_kv_heads=2, head_dim=64, multi_item=True)
        if not self.serves(layer):
            return
        sizes = ((6, (3, 1, 5)), (9, ()), (2, (4, 4)))  # (prefix, items) per sequence
        items = MultiItem(
            prefix_lens=tuple(prefix for prefix, _ in sizes),
            token_pos_in_items=tuple(
                tuple(p for n in parts for p in range(1, n + 1)) for _, parts in sizes
            ),
        )
        lengths = tuple(prefix + sum(parts) for prefix, parts in sizes)
        layout = PackLayout.of([0, *accumulate(lengths)], self.device, items)
        q, k, v = self.inputs(layer, layout.total_tokens)
        got = self.attend(layer, layout, q, k, v)
        self.close(got, reference(layer, layout, q, k, v))
        plain = kind(causal=True, n_heads=4, n_kv_heads=2, head_dim=64)
        for start, (prefix, parts) in zip(layout.cu_seqlens, sizes, strict=False):
            first = start + prefix
            for n in parts:
                rows = [*range(start, start + prefix), *range(first, first + n)]
                alone = layout_of((len(rows),), self.device)
                want = reference(plain, alone, q[rows], k[rows], v[rows])
                self.close(got[first : first + n], want[prefix:])
                first += n

    def test_delimiter_sees_the_prefix_only(self) -> None:
        layer = kind(causal=True, head_dim=64, multi_item=True)
        if not self.serves(layer):
            return
        items = MultiItem((4,), ((0, 1, 2, 0, 1, 0),))
        layout = PackLayout.of([0, 10], self.device, items)
        q, k, v = self.inputs(layer, 10)
        got = self.attend(layer, layout, q, k, v)
        self.close(got, reference(layer, layout, q, k, v))
        v[4:9] = 100.0
        assert torch.equal(self.attend(layer, layout, q, k, v)[9], got[9])

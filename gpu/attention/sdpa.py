"""Reference backend on `scaled_dot_product_attention`: CPU always, CUDA for what the others refuse.

Who calls it: `interface.PackedContext` through `AttentionBackend`; `dense` also serves padded batches.
What must stay true: an item's result depends on its own rows only, down to the bit on CPU in fp32,
whether it runs alone or in one call with items of the same length. torch's CPU flash kernel keeps
this (every item and head is a task of its own with block sizes taken from the item's length) as long as
the calling thread has one intra-op thread: the scratch memory of a second one begins at any address, and
the BLAS may sum in another order there. So executor threads without work take heads, by calls of their own. Batched matmul does not keep it; so the soft-cap path, which needs matmul, runs item by item on fresh tensors.
Long windowed layers are cut into query blocks that see only their band of keys, so that work and memory
grow with length x window and not with length squared; the cuts depend on the item's length alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from gpu.attention.base import AttentionError, LayerKind, PackLayout, bias_slice
from gpu.device import intra_op
from gpu.device.linears import inferred

# Query rows per call in a windowed layer: small enough that the band (rows + window) stays far below
# the item's length, large enough that the kernel's own 32 to 256 row blocks are full.
WINDOW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Call:
    """Query rows [q0, q1) of an item against its keys [k0, k1).

    mask: additive [q1 - q0, k1 - k0] in the compute dtype, or None. causal: no mask is needed but the
    kernel's own causal one.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Runs of equal-length items, each with the calls that one item of that length needs."""

    kind: LayerKind
    total_tokens: int
    runs: tuple[tuple[int, int, int, tuple[Call, ...]], ...]  # start, length, count, calls

    @property
    def work(self) -> int:
        """Queries times keys, over all calls."""
        return sum(
            count * sum((call.q1 - call.q0) * (call.k1 - call.k0) for call in calls)
            for _, _, count, calls in self.runs
        )


class SdpaBackend:
    """`scaled_dot_product_attention` per item, items of one length together.

    Args:
        group_equal_lengths: adjacent items of one length share a call. Costs no bit on CPU in fp32; off
            for batch-invariant results on CUDA, whose kernels may be chosen by batch size.
        half_from: fp32 items of so many tokens and more go through the kernel in bfloat16, shorter ones
            do not; None: none do. An item's own length decides, never its neighbours'.
    """

    name = "sdpa"

    def __init__(self, *, group_equal_lengths: bool = True, half_from: int | None = None) -> None:
        self.group_equal_lengths = group_equal_lengths
        self.half_from = half_from
        self._work = intra_op.Divisible()

    def refuses(self, kind: LayerKind, dtype: torch.dtype, device: torch.device) -> str | None:
        if not dtype.is_floating_point:
            return f"{dtype} is not a floating-point type"
        return None

    def plan(self, layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> SdpaPlan:
        """Groups, cuts and masks for one layer kind; a few microseconds per distinct length."""
        if kind.multi_item:
            return _plan_multi_item(layout, kind, dtype)
        by_length: dict[tuple[int, int], tuple[Call, ...]] = {}
        runs = []
        for run in layout.runs:
            calls = by_length.get((run.length, run.keys))
            if calls is None:
                calls = _calls(kind, run.length, run.keys, dtype, layout.device)
                by_length[run.length, run.keys] = calls
            runs.append((run.start, run.length, run.count, calls))
        return SdpaPlan(kind, layout.total_tokens, tuple(runs))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: SdpaPlan,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kind = plan.kind
        threads = intra_op.lent() if q.dtype == torch.float32 and q.device.type == "cpu" else None
        # Matmul under a soft cap, a bias of each head's own and bfloat16's kernels are left whole.
        if threads is None or bias is not None or kind.softcap is not None or self.half_from:
            return self._run(q, k, v, plan, bias)
        work = plan.work * kind.n_heads * kind.head_dim
        n = self._work.parts(work, kind.n_kv_heads)
        with self._work.timed(work, n):
            return (
                self._run(q, k, v, plan, None)
                if n == 1
                else self._by_heads(q, k, v, plan, n, threads)
            )

    def _by_heads(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: SdpaPlan,
        n: int,
        threads: intra_op.Lent,
    ) -> torch.Tensor:
        kind = plan.kind
        share = kind.n_heads // kind.n_kv_heads
        works = []
        for start, end in intra_op.even(kind.n_kv_heads, n):
            part = dataclasses.replace(kind, n_heads=(end - start) * share, n_kv_heads=end - start)
            works.append(partial(
                inferred, self._run, q[:, start * share : end * share], k[:, start:end], v[:, start:end],
                dataclasses.replace(plan, kind=part), None,
            ))  # fmt: skip
        return torch.cat(threads.map(works), dim=1)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: SdpaPlan,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        kind, total = plan.kind, plan.total_tokens
        assert q.shape == (total, kind.n_heads, kind.head_dim), (q.shape, total, kind)
        assert k.shape[:2] == v.shape[:2] == (total, kind.n_kv_heads), (k.shape, v.shape, kind)
        parts: list[torch.Tensor] = []
        # A bias that differs from item to item, and every path that is not bit-stable under grouping,
        # goes item by item.
        single = (
            not self.group_equal_lengths
            or kind.softcap is not None
            or (bias is not None and bias.shape[-1] == total)
        )
        half_from = self.half_from
        if bias is not None or kind.softcap is not None or kind.windowed or kind.multi_item:
            half_from = None
        for start, length, count, calls in plan.runs:
            n = 1 if single else count
            for first in range(start, start + count * length, n * length):
                part_bias = None if bias is None else bias_slice(bias, total, first, length)
                items_q, items_k, items_v = (_items(t, first, n, length) for t in (q, k, v))
                if half_from is not None and length >= half_from:
                    items_q, items_k, items_v = (
                        t.to(torch.bfloat16) for t in (items_q, items_k, items_v)
                    )
                out = _attend(items_q, items_k, items_v, calls, kind, part_bias)
                parts.append(out.to(q.dtype))
        if not parts:
            return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _items(rows: torch.Tensor, start: int, n: int, length: int) -> torch.Tensor:
    """[n, heads, length, head_dim] view of `n` items from row `start` on, of [total_tokens, heads, head_dim].

    One strided view instead of slice, reshape and transpose: with many lengths in a pack these views
    are most of what is spent outside the kernel.
    """
    row, head, element = rows.stride()
    return rows.as_strided(
        (n, rows.shape[1], length, rows.shape[2]),
        (length * row, head, row, element),
        rows.storage_offset() + start * row,
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: tuple[Call, ...],
    kind: LayerKind,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Items of one length: q [n, n_heads, length, head_dim] -> [n * length, n_heads, head_dim]."""
    if len(calls) == 1 and bias is None and calls[0].k1 == k.shape[2]:
        call = calls[0]
        out = dense(
            q, k, v, mask=call.mask, causal=call.causal, scale=kind.scale, softcap=kind.softcap
        )
        return out.transpose(1, 2).flatten(0, 1)
    outs: list[torch.Tensor] = []
    for call in calls:
        mask = call.mask
        if bias is not None:
            part = bias[..., call.q0 : call.q1, call.k0 : call.k1]
            if call.causal:
                mask = band_mask(call, kind, q.dtype, q.device)
            mask = part.to(q.dtype) if mask is None else joined(part.to(q.dtype), mask)
        out = dense(
            q[:, :, call.q0 : call.q1],
            k[:, :, call.k0 : call.k1],
            v[:, :, call.k0 : call.k1],
            mask=mask,
            causal=call.causal and mask is None,
            scale=kind.scale,
            softcap=kind.softcap,
        )
        outs.append(out.transpose(1, 2))
    whole = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)  # [n, length, heads, dim]
    return whole.flatten(0, 1)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention over a dense batch.

    q: [n, n_heads, Tq, head_dim]; k, v: [n, n_kv_heads, Tk, head_dim]; mask: additive, broadcastable to
    [n, n_heads, Tq, Tk]; causal: only without a mask and with Tq == Tk. Returns [n, n_heads, Tq, head_dim].
    """
    assert not (causal and mask is not None), "a mask says all; causal is for calls without one"
    if softcap is not None:
        return _softcapped(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap)
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.device.type != "cpu":
        # CUDA's masked kernels know no grouped heads and would fall back to plain matmul.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _softcapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Plain matmul attention: no fused kernel caps the scores. Scores and softmax in fp32 or better."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (t.repeat_interleave(repeat, dim=1) for t in (k, v))
    # Contiguous copies: matmul kernels may choose by alignment, and an item's place in the pack
    # decides the alignment of its view.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        n = scores.shape[-1]
        ahead = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = joined(scores, mask)
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)


def joined(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values + mask`, where masked places get the lowest number of `values` instead of overflowing."""
    lowest = torch.finfo(values.dtype).min
    return torch.where(mask == torch.finfo(mask.dtype).min, lowest, values + mask)


def _calls(
    kind: LayerKind, length: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Call, ...]:
    """How one item of `length` tokens is computed, of which the first `keys` are attended to; depends on
    nothing but these and its kind. Raises `AttentionError` for a row that would attend to nothing."""
    left = kind.window_left if kind.window_left is not None else length
    right = kind.window_right if kind.window_right is not None else length
    if keys < length and left < length - keys:
        raise AttentionError(
            f"a window of {left} tokens leaves nothing to attend to for the last of {length - keys} "
            "tokens that are not attended to"
        )
    if left >= length - 1 and (kind.causal or right >= length - 1):
        if keys < length and kind.causal:
            whole = Call(0, length, 0, keys, None, False)
            return (dataclasses.replace(whole, mask=band_mask(whole, kind, dtype, device)),)
        return (Call(0, length, 0, keys, None, kind.causal and length > 1),)
    calls = []
    masks: dict[tuple[int, int, int], torch.Tensor] = {}  # blocks inside the item look alike
    for q0 in range(0, length, WINDOW_ROWS):
        q1 = min(q0 + WINDOW_ROWS, length)
        k0, k1 = max(0, q0 - left), min(keys, q1 + right)
        shape = (q1 - q0, k0 - q0, k1 - q0)
        if shape not in masks:
            masks[shape] = band_mask(Call(q0, q1, k0, k1, None, False), kind, dtype, device)
        calls.append(Call(q0, q1, k0, k1, masks[shape], False))
    return tuple(calls)


def band_mask(
    call: Call, kind: LayerKind, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[q1 - q0, k1 - k0] additive: 0 inside the kind's window, the dtype's lowest number outside.

    The lowest finite number and not minus infinity: a row may see a first block of keys that is all
    masked, and `inf - inf` inside a kernel is NaN; the weight comes out as exactly 0 either way.
    """
    distance = (
        torch.arange(call.k0, call.k1, device=device)[None, :]
        - torch.arange(call.q0, call.q1, device=device)[:, None]
    )
    blocked = torch.zeros_like(distance, dtype=torch.bool)
    if kind.window_left is not None:
        blocked |= distance < -kind.window_left
    if kind.window_right is not None:
        blocked |= distance > kind.window_right
    mask = torch.zeros(distance.shape, dtype=dtype, device=device)
    return mask.masked_fill_(blocked, torch.finfo(dtype).min)


def _plan_multi_item(layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> SdpaPlan:
    """One masked call per sequence: items see the prefix and themselves, never each other."""
    assert layout.multi_item is not None, "a multi-item kind needs a layout with items"
    runs = []
    for index, length in enumerate(layout.lengths):
        if length == 0:
            continue
        prefix = layout.multi_item.prefix_lens[index]
        positions = torch.tensor(
            [*range(1, prefix + 1), *layout.multi_item.token_pos_in_items[index]],
            device=layout.device,
        )
        whole = Call(0, length, 0, length, None, False)
        row = torch.arange(length, device=layout.device)[:, None]
        column = torch.arange(length, device=layout.device)[None, :]
        own = (column > row - positions[:, None]) | (column < prefix)
        mask = band_mask(whole, kind, dtype, layout.device)
        mask = mask.masked_fill_(~own, torch.finfo(dtype).min)
        runs.append(
            (layout.cu_seqlens[index], length, 1, (Call(0, length, 0, length, mask, False),))
        )
    return SdpaPlan(kind, layout.total_tokens, tuple(runs))

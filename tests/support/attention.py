"""What the attention tests share: a float64 reference written from the definition, and two doubles.

Used by `tests/unit/gpu/test_attention_*.py` and by `benchmarks/gpu_check.py`. The reference asks for
every pair of tokens whether one may see the other and knows nothing of masks, bands, cuts or groups;
the doubles stand in for FlashInfer's wrapper and torch's `varlen_attn`, accept only parameters that
the real ones have, and compute by the real ones' documentation.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gpu.attention.base import LayerKind, PackLayout

SIGNATURES = Path(__file__).parent / "flashinfer_signatures.json"


def kind(**changes: Any) -> LayerKind:
    """A plain bidirectional kind of 4 heads of 32, with changes."""
    fields: dict[str, Any] = {
        "causal": False,
        "window_left": None,
        "window_right": None,
        "softcap": None,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 32,
    }
    fields |= changes
    fields.setdefault("scale", fields["head_dim"] ** -0.5)
    return LayerKind(**fields)


def qkv(
    layer: LayerKind, total: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [total, n_heads, head_dim], k and v [total, n_kv_heads, head_dim]."""
    source = torch.Generator().manual_seed(seed)
    return tuple(  # type: ignore[return-value]
        torch.randn(total, heads, layer.head_dim, generator=source).to(dtype)
        for heads in (layer.n_heads, layer.n_kv_heads, layer.n_kv_heads)
    )


def sees(layer: LayerKind, i: int, j: int, multi: tuple[int, tuple[int, ...]] | None) -> bool:
    """May token i of an item look at token j? The definition, one pair at a time."""
    if layer.causal and j > i:
        return False
    if layer.window_left is not None and i - j > layer.window_left:
        return False
    if layer.window_right is not None and j - i > layer.window_right:
        return False
    if multi is not None:
        prefix, positions = multi
        if i >= prefix and j >= prefix:
            return j > i - positions[i - prefix]
    return True


def reference(
    layer: LayerKind,
    layout: PackLayout,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in float64 numpy: [total, n_heads, head_dim]."""
    wide_q, wide_k, wide_v = (t.detach().cpu().double().numpy() for t in (q, k, v))
    out = np.zeros(wide_q.shape)
    share = layer.n_heads // layer.n_kv_heads
    for item, (start, end) in enumerate(
        zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False)
    ):
        n = end - start
        multi = None
        if layout.multi_item is not None:
            multi = (
                layout.multi_item.prefix_lens[item],
                layout.multi_item.token_pos_in_items[item],
            )
        visible = np.array(
            [[sees(layer, i, j, multi) for j in range(n)] for i in range(n)], dtype=bool
        ).reshape(n, n)
        for head in range(layer.n_heads):
            keys, values = (t[start:end, head // share] for t in (wide_k, wide_v))
            scores = wide_q[start:end, head] @ keys.T * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * np.tanh(scores / layer.softcap)
            if bias is not None:
                whole = bias.shape[-1] == layout.total_tokens
                first = start if whole else 0
                part = bias[0, head, first : first + n, first : first + n]
                scores = scores + part.detach().cpu().double().numpy()
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e300))
            out[start:end, head] = weights / weights.sum(axis=1, keepdims=True) @ values
    return torch.from_numpy(out)


@cache
def flashinfer_parameters() -> tuple[str, dict[str, dict[str, list[str]]]]:
    """(version, class -> method -> parameter names) of the installed FlashInfer, else as read from
    its wheel."""
    try:
        import flashinfer
    except ImportError:
        stored = json.loads(SIGNATURES.read_text())
        return stored["version"], stored["classes"]
    names = {
        wrapper.__name__: {
            method: list(inspect.signature(getattr(wrapper, method)).parameters)
            for method in ("__init__", "plan", "run")
        }
        for wrapper in (
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        )
    }
    return str(flashinfer.__version__), names


class FlashInferDouble:
    """Stands in for FlashInfer's wrappers: records, checks parameter names, computes.

    made: every double since the list was last emptied.
    """

    made: ClassVar[list[FlashInferDouble]] = []

    def __init__(self, workspace: torch.Tensor, paged: bool) -> None:
        self.workspace = workspace
        self.paged = paged
        self.plans: list[dict[str, Any]] = []
        self.runs = 0
        self.made.append(self)

    def plan(self, **arguments: Any) -> None:
        which = "Paged" if self.paged else "Ragged"
        parameters = flashinfer_parameters()[1][f"BatchPrefillWith{which}KVCacheWrapper"]["plan"]
        unknown = set(arguments) - set(parameters)
        assert not unknown, f"the {which} wrapper's plan has no parameter {unknown}"
        required = parameters[1 : parameters.index("head_dim_vo")]
        assert set(required) <= set(arguments), f"plan needs {set(required) - set(arguments)}"
        for name in ("qo_indptr", "paged_kv_indptr" if self.paged else "kv_indptr"):
            indptr = arguments[name]
            assert indptr.device.type == "cpu", "a device indptr would be copied back"
            assert indptr.dtype == torch.int32 and indptr[0] == 0, indptr
            assert bool((indptr.diff() > 0).all()), "no empty items"
        if not self.paged:
            # The ragged wrapper takes these and ignores them.
            assert arguments.get("prefix_len_ptr") is None
        self.plans.append(arguments)

    def run(self, q: torch.Tensor, *kv: Any) -> torch.Tensor:
        if self.paged:
            ((pages_k, pages_v),) = kv
            assert pages_k.shape[1] == pages_v.shape[1] == self.plans[-1]["page_size"] == 1
            order = self.plans[-1]["paged_kv_indices"].long()
            kv = (pages_k[:, 0][order], pages_v[:, 0][order])
        return self._run(q, *kv)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        plan = self.plans[-1]
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert q.shape[0] == int(plan["qo_indptr"][-1]), "FlashInfer refuses other row counts"
        window = plan["window_left"]
        layer = LayerKind(
            causal=plan["causal"],
            window_left=None if window == -1 else window,
            window_right=None,
            softcap=plan["logits_soft_cap"] or None,
            scale=plan["sm_scale"],
            n_heads=plan["num_qo_heads"],
            n_kv_heads=plan["num_kv_heads"],
            head_dim=plan["head_dim_qk"],
        )
        cu_seqlens = tuple(plan["qo_indptr"].tolist())
        if "prefix_len_ptr" not in plan:
            layout = PackLayout(cu_seqlens, q.device)
            return reference(layer, layout, q, k, v).to(q.dtype)
        return self._multi_item(layer, cu_seqlens, plan, q, k, v)

    def _multi_item(
        self,
        layer: LayerKind,
        cu_seqlens: tuple[int, ...],
        plan: dict[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """By FlashInfer's documentation of the four multi-item arguments."""
        prefixes = plan["prefix_len_ptr"]
        table, width = plan["token_pos_in_items_ptr"], plan["token_pos_in_items_len"]
        longest = plan["max_item_len_ptr"]
        assert prefixes.dtype == torch.uint32 and prefixes.shape == (len(cu_seqlens) - 1,)
        assert table.dtype == torch.uint16 and table.shape == (width * prefixes.shape[0],)
        assert longest.dtype == torch.uint16 and longest.shape == prefixes.shape
        rows = table.to(torch.int64).unflatten(0, (-1, width))
        assert rows.max(dim=1).values.tolist() == longest.to(torch.int64).tolist()
        out = torch.empty(q.shape, dtype=torch.float64)
        for row, (start, end) in enumerate(pairwise(cu_seqlens)):
            prefix = int(prefixes[row].to(torch.int64))
            for i in range(end - start):
                keys = list(range(min(i + 1, prefix)))
                if i >= prefix:
                    position = int(rows[row, i - prefix])
                    keys += [j for j in range(prefix, i + 1) if i < j + position]
                picked = [start + j for j in keys]
                share = layer.n_heads // layer.n_kv_heads
                mine = k[picked].double().repeat_interleave(share, 1)
                scores = torch.einsum("hd,khd->hk", q[start + i].double(), mine) * layer.scale
                values = v[picked].double().repeat_interleave(share, 1)
                out[start + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        return out.to(q.dtype)


def varlen_double(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Stands in for `torch.nn.attention.varlen.varlen_attn`, computing by its docstring."""
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert bool((cu_seq_q.diff() > 0).all()), "no empty items"
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = (None if n == -1 else n for n in window_size)
    layer = LayerKind(
        causal=False,
        window_left=left,
        window_right=right,
        softcap=None,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        n_heads=query.shape[1],
        n_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
    )
    layout = PackLayout(tuple(cu_seq_q.tolist()), query.device)
    return reference(layer, layout, query, key, value).to(query.dtype)

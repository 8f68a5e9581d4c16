"""FlashInfer on CUDA: one plan per layer kind and pack, run by every layer of that kind.
Has never run on a GPU: docs/attention.md says what is unknown.

Who calls it: `interface.PackedContext` through `AttentionBackend`; `backends_for` puts it first on CUDA.
What must stay true: what the kernels cannot do exactly is refused by name, never approximated, because
they do not check themselves (a head size outside 64/128/256 reads out of bounds or gives wrong numbers);
prefix sums go in as host tensors, or `plan` would copy them back from the device and wait; a wrapper's
pinned scratch memory is not written again before its last upload has finished; wrappers belong to one
thread, because their workspace must see one stream at a time.

Multi-item layers go through the paged wrapper with pages of one token. The ragged wrapper's `plan` takes
the same four arguments and its `run` then ignores them (FlashInfer 0.7.4 as read; pull request 3434 there
would mend it), so that items would see each other without an error.

Batch invariance: with `batch_invariant` the split over keys is off (or of a fixed size, when
`fixed_split_size` is given). FlashInfer's FA2 kernels still take their query tile from the average
length of the pack (16, 64 or 128 rows), so packs of very short items may differ in the last bit from
packs of long ones; `varlen` has no such choice and is preferred then (`backends_for`).
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpu.attention.base import AttentionError, LayerKind, PackLayout

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# The size FlashInfer's own documentation recommends for the partial results of the split over keys.
WORKSPACE_BYTES = 128 * 1024 * 1024
# Wrappers (8 MiB on the device and 8 MiB pinned each) that one thread keeps; a model has one to four
# layer kinds.
MAX_WRAPPERS = 16
MAX_ITEM_TOKENS = 65535  # positions in items are 16-bit


@cache
def _missing() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


def _make_wrapper(workspace: torch.Tensor, paged: bool) -> Any:
    from flashinfer import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    )

    if paged:
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    return BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")


@dataclass(slots=True)
class _Slot:
    """A wrapper and what it holds at present: `generation` counts its plans."""

    wrapper: Any
    generation: int = 0
    uploaded: torch.cuda.Event | None = None


@dataclass(slots=True)
class FlashInferPlan:
    """Arguments of `wrapper.plan`, kept so that a wrapper taken by another pack can be planned again.

    generation: which of the slot's plans this is; any other means that the wrapper was taken.
    """

    kind: LayerKind
    total_tokens: int
    device: torch.device
    arguments: dict[str, Any]
    slot: _Slot
    generation: int


class FlashInferBackend:
    """`BatchPrefillWithRaggedKVCacheWrapper`: full, causal and causal-window attention, soft cap, GQA.

    Args:
        batch_invariant: no split over keys, so that an item's sums do not depend on its neighbours.
        fixed_split_size: with `batch_invariant`, split at fixed places instead of not at all (tokens).
        workspace_bytes: scratch memory per thread and device.
        make_wrapper: (workspace, paged) -> wrapper; None is FlashInfer's own (tests put a recording
            double here).
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        batch_invariant: bool = False,
        fixed_split_size: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        make_wrapper: Callable[[torch.Tensor, bool], Any] | None = None,
    ) -> None:
        if fixed_split_size is not None and not batch_invariant:
            raise ValueError("fixed_split_size has a meaning only with batch_invariant")
        self.batch_invariant = batch_invariant
        self.fixed_split_size = fixed_split_size
        self.workspace_bytes = workspace_bytes
        self._make_wrapper = make_wrapper or _make_wrapper
        self._own_wrapper = make_wrapper is None
        self._local = threading.local()

    def refuses(self, kind: LayerKind, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, not on {device.type}"
        if self._own_wrapper and (missing := _missing()) is not None:
            return missing
        if dtype not in DTYPES:
            return f"takes float16 and bfloat16, not {dtype}"
        if kind.head_dim not in HEAD_DIMS:
            return f"head size {kind.head_dim} is not one of {HEAD_DIMS}"
        if not kind.causal and kind.windowed:
            return "windows look back only, and only in causal layers"
        if kind.bias:
            return "has no additive bias"
        if kind.partial_keys:
            return "attends to whole items"
        return None

    def plan(self, layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> FlashInferPlan:
        """Plans the kind's wrapper for this pack (host work and one asynchronous upload)."""
        arguments = self._arguments(layout, kind, dtype)
        slot = self._slot(kind, dtype, layout.device)
        if layout.total_tokens:
            _upload(slot, arguments, layout.device)
        return FlashInferPlan(
            kind, layout.total_tokens, layout.device, arguments, slot, slot.generation
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: FlashInferPlan,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert bias is None, "refused: FlashInfer has no additive bias"
        kind = plan.kind
        assert q.shape == (plan.total_tokens, kind.n_heads, kind.head_dim), (q.shape, kind)
        assert k.shape == v.shape == (plan.total_tokens, kind.n_kv_heads, kind.head_dim), k.shape
        if plan.total_tokens == 0:
            return torch.empty_like(q)
        if plan.slot.generation != plan.generation:
            # A nested context planned the same kind in between.
            _upload(plan.slot, plan.arguments, plan.device)
            plan.generation = plan.slot.generation
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: torch.Tensor
        if kind.multi_item:  # pages of one token: [total_tokens, 1, n_kv_heads, head_dim]
            out = plan.slot.wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)))
        else:
            out = plan.slot.wrapper.run(q, k, v)
        return out

    def _arguments(self, layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of `plan`; empty items are left out, their rows do not exist anyway."""
        kept = [i for i, length in enumerate(layout.lengths) if length > 0]
        indptr = torch.zeros(len(kept) + 1, dtype=torch.int32)
        for row, index in enumerate(kept):
            indptr[row + 1] = layout.cu_seqlens[index + 1]
        arguments: dict[str, Any] = {
            "qo_indptr": indptr,
            "num_qo_heads": kind.n_heads,
            "num_kv_heads": kind.n_kv_heads,
            "head_dim_qk": kind.head_dim,
            "causal": kind.causal,
            "window_left": -1 if kind.window_left is None else kind.window_left,
            "logits_soft_cap": kind.softcap or 0.0,
            "sm_scale": kind.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        if self.fixed_split_size is not None:
            arguments["fixed_split_size"] = self.fixed_split_size
        elif self.batch_invariant:
            arguments["disable_split_kv"] = True
        if kind.multi_item:
            arguments |= _multi_item_arguments(layout, kept)
            arguments["paged_kv_indptr"] = indptr
            arguments["paged_kv_indices"] = torch.arange(layout.total_tokens, dtype=torch.int32)
            arguments["paged_kv_last_page_len"] = torch.ones(len(kept), dtype=torch.int32)
            arguments["page_size"] = 1
        else:
            arguments["kv_indptr"] = indptr
        return arguments

    def _slot(self, kind: LayerKind, dtype: torch.dtype, device: torch.device) -> _Slot:
        slots: OrderedDict[Any, _Slot] = self._locals()[0]
        key = (kind, dtype, device)
        if key not in slots:
            while len(slots) >= MAX_WRAPPERS:
                slots.popitem(last=False)
            slots[key] = _Slot(self._make_wrapper(self._workspace(device), kind.multi_item))
        slots.move_to_end(key)
        return slots[key]

    def _workspace(self, device: torch.device) -> torch.Tensor:
        workspaces: dict[torch.device, torch.Tensor] = self._locals()[1]
        if device not in workspaces:
            workspaces[device] = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        return workspaces[device]

    def _locals(self) -> tuple[OrderedDict[Any, _Slot], dict[torch.device, torch.Tensor]]:
        if not hasattr(self._local, "held"):
            self._local.held = (OrderedDict(), {})
        held: tuple[OrderedDict[Any, _Slot], dict[torch.device, torch.Tensor]] = self._local.held
        return held


def _upload(slot: _Slot, arguments: dict[str, Any], device: torch.device) -> None:
    """Plan the slot's wrapper. Waits for the slot's previous upload, which reads the same pinned memory."""
    if slot.uploaded is not None:
        slot.uploaded.synchronize()
    slot.wrapper.plan(**arguments)
    slot.generation += 1
    if device.type == "cuda":
        slot.uploaded = torch.cuda.Event()
        slot.uploaded.record()


def _multi_item_arguments(layout: PackLayout, kept: list[int]) -> dict[str, Any]:
    """FlashInfer's compact form of "items see the prefix and themselves".

    prefix_len_ptr [n] uint32, token_pos_in_items_ptr [n * token_pos_in_items_len] uint16 (each row
    filled up with zeros), max_item_len_ptr [n] uint16; all on the device.

    Raises:
        AttentionError: when an item has more tokens than 16 bits count.
    """
    items = layout.multi_item
    assert items is not None, "a multi-item kind needs a layout with items"
    positions = [items.token_pos_in_items[i] for i in kept]
    longest = [max(row, default=0) for row in positions]
    if max(longest, default=0) > MAX_ITEM_TOKENS:
        raise AttentionError(
            f"an item of {max(longest)} tokens; FlashInfer's multi-item scoring takes {MAX_ITEM_TOKENS}"
        )
    width = max(1, *(len(row) for row in positions)) if positions else 1
    table = torch.zeros(len(kept), width, dtype=torch.int32)
    for row, values in enumerate(positions):
        table[row, : len(values)] = torch.tensor(values, dtype=torch.int32)
    prefixes = torch.tensor([items.prefix_lens[i] for i in kept], dtype=torch.int64)
    device = layout.device
    return {
        "prefix_len_ptr": prefixes.to(torch.uint32).to(device),
        "token_pos_in_items_ptr": table.flatten().to(torch.uint16).to(device),
        "token_pos_in_items_len": width,
        "max_item_len_ptr": torch.tensor(longest, dtype=torch.int32).to(torch.uint16).to(device),
    }

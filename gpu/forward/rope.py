"""Rotary positions that depend on the longest position of a call: kept to the item they belong to.

Who calls it: `gpu.forward.choice`, for models with such a RoPE.
What must stay true: an item's frequencies follow from its own length. transformers picks them from the
largest position of the whole call ("longrope": short or long factors; "dynamic": a base that grows) and
keeps them in the module, so items are grouped by what they need, and the module, which all executor
threads share, starts every call from the same state and answers one call at a time.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any

import torch
from torch import nn

from gpu.attention import MultiItem, PackedContext
from gpu.batch import PackedBatch, pack
from gpu.folder.decoders import RopeKind
from gpu.forward.packed import PackedForward, PaddedForward


class RopePackedForward(PackedForward):
    """Splits a pack so that no two items of one call need different frequencies.

    rope: its kind, and the length up to which all items share frequencies.
    """

    def __init__(self, base: nn.Module, *, rope: tuple[RopeKind, int], **fields: Any) -> None:
        super().__init__(base, **fields)
        self.kind, self.trained = rope

    def run(
        self, batch: PackedBatch, multi_item: MultiItem | None = None, **more: Any
    ) -> tuple[torch.Tensor, PackedContext]:
        """See `PackedForward.run`. The context is the first call's, with the masks of all; when calls
        reached attention unequally often, it is one that stands out."""
        assert multi_item is None, "items of several lengths in one sequence need one RoPE"
        assert not more, "places in the pack are not those in its groups"
        groups = rope_groups(batch.seqlens, self.kind, self.trained)
        if len(groups) == 1:
            return super().run(batch)
        hidden: torch.Tensor | None = None
        contexts: list[PackedContext] = []
        for rows in groups:
            part = pack([batch.items[row] for row in rows])
            states, context = super().run(part)
            contexts.append(context)
            if hidden is None:
                hidden = states.new_empty(batch.n_tokens, states.shape[-1])
            for place, row in enumerate(
                rows
            ):  # `pack` sorts stably and rows are sorted: same order
                a, b = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
                hidden[a:b] = states[int(part.cu_seqlens[place]) : int(part.cu_seqlens[place + 1])]
        assert hidden is not None
        first = contexts[0]
        told = next((c for c in contexts if c.calls != first.calls), first)
        told.masks_seen = sum(context.masks_seen for context in contexts)
        return hidden, told


class RopePaddedForward(PaddedForward):
    """Padded, with a padded length that never crosses what an item needs."""

    def __init__(self, base: nn.Module, *, rope: tuple[RopeKind, int], **fields: Any) -> None:
        super().__init__(base, **fields)
        self.kind, self.trained = rope

    def padded_length(self, length: int) -> int:
        """Padding up to the switch is harmless, past it not: positions of padding count too."""
        if length <= self.trained:
            return min(super().padded_length(length), self.trained)
        return length if self.kind == "dynamic" else super().padded_length(length)


def rope_groups(lengths: list[int], kind: RopeKind, trained: int) -> list[list[int]]:
    """Rows that may share a call, rows ascending: those within the trained length; the longer ones
    together ("longrope") or one length at a time ("dynamic")."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        key = 0 if length <= trained else 1 if kind == "longrope" else length
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def make_stateless(base: nn.Module) -> int:
    """Guard every rotary module of the model whose frequencies change with the call; returns how many.

    Each call starts from the frequencies of the trained length, whatever ran before, and calls from
    several threads wait for each other (they last microseconds: one row of frequencies).
    """
    guarded = 0
    for module in base.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
        if kinds & {"dynamic", "longrope"}:
            layers = list(rope_type) if isinstance(rope_type, dict) else []
            _guard(module, ["", *(f"{layer}_" for layer in layers)])
            guarded += 1
    return guarded


def _guard(module: nn.Module, prefixes: list[str]) -> None:
    """prefixes: of its frequency buffers; models with a RoPE per layer type have one for each."""
    m: Any = module
    lock = threading.Lock()
    inner = m.forward
    present = [prefix for prefix in prefixes if hasattr(m, f"{prefix}original_inv_freq")]
    scaling = {
        name: getattr(m, name)
        for name in (f"{prefix}attention_scaling" for prefix in prefixes)
        if hasattr(m, name)
    }

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with lock:
            for prefix in present:
                original = getattr(m, f"{prefix}original_inv_freq")
                m.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
                setattr(m, f"{prefix}max_seq_len_cached", m.original_max_seq_len)
            for name, value in scaling.items():
                setattr(m, name, value)
            return inner(*args, **kwargs)

    m.forward = forward

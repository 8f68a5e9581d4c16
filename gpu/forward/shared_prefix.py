"""Multi-item scoring: documents of one query in one sequence, the query computed once.

Who calls it: `gpu.model_runner`, for models with `multi_item = true` and a head on the last token.
What must stay true: an item sees the query and itself, and its positions go on where the query ends, so
its score is what it is alone; where items begin is known from how they were assembled
(`extras["n_shared"]`), nothing is looked for in the ids; items without that mark, and items whose prefix
nobody shares, run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from gpu.attention import MultiItem, PackedContext
from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.folder.prompts import N_SHARED
from gpu.forward.packed import PackedForward
from gpu.pooler import Segments, segments_of

MAX_JOINED = 4096
"""Tokens of a joined sequence: the SDPA backend masks it with a square of this size."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """One sequence of the pack. rows: the batch's rows in it, in order; n_shared: tokens of the prefix
    (the whole length of the only row when it stands alone)."""

    rows: tuple[int, ...]
    n_shared: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Where an item lies in the joined pack: its prefix from `prefix_at`, its own rows [start, end)."""

    prefix_at: int
    n_shared: int
    start: int
    end: int

    def row_of(self, token: int) -> int:
        """The joined row of the item's token number `token`."""
        if token < self.n_shared:
            return self.prefix_at + token
        return self.start + token - self.n_shared


class SharedPrefixForward:
    """Runs a pack with equal prefixes joined, through the packed forward's model."""

    def __init__(self, packed: PackedForward, skipped_pad: int | None = None) -> None:
        self.packed, self.skipped_pad = packed, skipped_pad

    def states(self, batch: PackedBatch) -> tuple[torch.Tensor, Segments] | None:
        """Hidden states of the joined pack and where each row's own tokens lie in it; None when no two
        rows share a prefix. Only the last row of a segment is of use to anyone."""
        if batch.n_items < 2:
            return None
        groups = _groups(batch)
        if all(len(group.rows) == 1 for group in groups):
            return None
        hidden, segments, _ = self.run(batch, groups)
        return hidden, segments

    def run(
        self, batch: PackedBatch, groups: list[_Fused] | None = None
    ) -> tuple[torch.Tensor, Segments, PackedContext]:
        """As `states`, for any pack, with what the attention function saw."""
        groups = _groups(batch) if groups is None else groups
        joined, multi_item, spans = _join(batch, groups)
        hidden, context = self.packed.run(joined, multi_item)
        alone = segments_of(batch, self.skipped_pad)
        last = None
        if alone.last is not None:
            read = zip(alone.last, alone.starts, spans, strict=True)
            last = tuple(span.row_of(row - start) for row, start, span in read)
        segments = Segments(
            starts=tuple(span.start for span in spans),
            ends=tuple(span.end for span in spans),
            pooled_from=(0,) * batch.n_items,
            last=last,
        )
        return hidden, segments, context


def _groups(batch: PackedBatch) -> list[_Fused]:
    """Rows by their prefix, in the order of first appearance."""
    by_prefix: dict[bytes, list[int]] = {}
    n_shared: dict[bytes, int] = {}
    for row, item in enumerate(batch.items):
        n = int(item.extras.get(N_SHARED, 0))
        key = item.input_ids[:n].tobytes() if 0 < n < item.n_tokens else f"row {row}".encode()
        by_prefix.setdefault(key, []).append(row)
        n_shared[key] = n
    groups: list[_Fused] = []
    for key, rows in by_prefix.items():
        for part in _bounded(batch, rows, n_shared[key]):
            whole = batch.items[part[0]].n_tokens
            groups.append(_Fused(part, n_shared[key] if len(part) > 1 else whole))
    return groups


def _bounded(batch: PackedBatch, rows: list[int], n_shared: int) -> list[tuple[int, ...]]:
    """Rows in parts whose joined sequences have at most `MAX_JOINED` tokens (or a single row)."""
    parts: list[list[int]] = []
    total = 0
    for row in rows:
        own = batch.items[row].n_tokens - n_shared
        if not parts or total + own > MAX_JOINED:
            parts.append([])
            total = n_shared
        parts[-1].append(row)
        total += own
    return [tuple(part) for part in parts]


def _join(batch: PackedBatch, groups: list[_Fused]) -> tuple[PackedBatch, MultiItem, list[_Span]]:
    """The joined pack, its item positions, and the place of every row of `batch` in it."""
    spans: dict[int, _Span] = {}
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    lengths: list[int] = []
    in_items: list[tuple[int, ...]] = []
    at = 0
    for group in groups:
        begin, first = at, batch.items[group.rows[0]]
        ids.append(first.input_ids[: group.n_shared])
        positions.append(np.arange(group.n_shared))
        at += group.n_shared
        counted: list[int] = []
        if len(group.rows) == 1:
            spans[group.rows[0]] = _Span(begin, 0, begin, at)
        else:
            for row in group.rows:
                own = batch.items[row].input_ids[group.n_shared :]
                ids.append(own)
                positions.append(np.arange(group.n_shared, group.n_shared + len(own)))
                counted.extend(range(1, len(own) + 1))
                spans[row] = _Span(begin, group.n_shared, at, at + len(own))
                at += len(own)
        in_items.append(tuple(counted))
        lengths.append(at - begin)
    input_ids = np.concatenate(ids).astype(np.int32, copy=False)
    cu_seqlens = np.zeros(len(groups) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    bounds = list(pairwise(int(n) for n in cu_seqlens))
    joined = PackedBatch(
        input_ids=input_ids,
        positions=np.concatenate(positions).astype(np.int32),
        token_type_ids=None,
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        item_index=np.arange(len(groups), dtype=np.int32),
        items=tuple(EncodedItem(input_ids[a:b]) for a, b in bounds),
    )
    prefixes = tuple(group.n_shared for group in groups)
    return joined, MultiItem(prefixes, tuple(in_items)), [spans[r] for r in range(batch.n_items)]


def probe_pack(batch: PackedBatch, vocab_size: int) -> PackedBatch:
    """Items of the self-check's probes behind two prefixes, and one on its own."""
    prefixes = (np.arange(1, 8) % vocab_size, np.arange(3, 6) % vocab_size)
    items = [
        EncodedItem(
            np.concatenate((prefix, item.input_ids)).astype(np.int32),
            extras={N_SHARED: len(prefix)},
        )
        for prefix in prefixes
        for item in batch.items[:3]
    ]
    return pack([*items, batch.items[0]])

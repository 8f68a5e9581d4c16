"""What one attention layer computes, what a pack looks like, and what a backend must offer.

Who calls it: `interface` builds a `LayerKind` for every attention call of a model, the backends
(`sdpa`, `flashinfer`, `varlen`) implement `AttentionBackend`, `choose` decides which one serves a kind.
What must stay true: a kind holds everything that changes the numbers (nothing is read from the module
later), a layout holds everything about the pack; both are immutable, so a plan made from them may be
kept for the whole pack; whatever a backend cannot do exactly, it refuses in words before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch

from gpu.batch import PackedBatch
from gpu.device.staging import upload


class AttentionError(RuntimeError):
    """The attention call does not fit the pack, or no backend can serve it."""


class NoBackend(AttentionError):
    """Every backend refused this layer kind; the message holds each refusal."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Everything about an attention layer that changes its numbers; the key of a plan.

    causal: a query sees no later token.
    window_left / window_right: inclusive distances a query looks back / ahead; None is unlimited.
        A causal kind always has `window_right == 0`.
    softcap: scores become `softcap * tanh(scores / softcap)` before the softmax, or None.
    scale: factor on q·k.
    n_heads, n_kv_heads, head_dim: head i reads key/value head `i // (n_heads / n_kv_heads)`.
    bias: an additive bias comes with every call.
    multi_item: sequences are split into a shared prefix and items that do not see each other.
    partial_keys: the last tokens of some items are not attended to (`PackLayout.keys`).
    """

    causal: bool
    window_left: int | None
    window_right: int | None
    softcap: float | None
    scale: float
    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False
    multi_item: bool = False
    partial_keys: bool = False

    def __post_init__(self) -> None:
        if self.causal:
            object.__setattr__(self, "window_right", 0)
        assert self.window_left is None or self.window_left >= 0, "a window reaches 0 or more back"
        assert self.window_right is None or self.window_right >= 0, "and 0 or more ahead"
        assert self.n_heads % self.n_kv_heads == 0, (
            f"{self.n_heads} heads cannot share {self.n_kv_heads} key/value heads evenly"
        )
        assert not self.multi_item or self.causal, "items of one sequence are scored causally"

    @property
    def windowed(self) -> bool:
        """True when some distance is limited by more than causality."""
        return self.window_left is not None or (not self.causal and self.window_right is not None)

    def __str__(self) -> str:
        parts = ["causal" if self.causal else "bidirectional"]
        if self.windowed:
            left = "all" if self.window_left is None else str(self.window_left)
            right = "all" if self.window_right is None else str(self.window_right)
            parts.append(f"window {left} back" + ("" if self.causal else f" {right} ahead"))
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.bias:
            parts.append("additive bias")
        if self.multi_item:
            parts.append("multi-item")
        if self.partial_keys:
            parts.append("partial keys")
        heads = f"{self.n_heads}" if self.n_heads == self.n_kv_heads else ""
        parts.append(f"heads {heads or f'{self.n_heads}:{self.n_kv_heads}'} x {self.head_dim}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class MultiItem:
    """One query and many items in one sequence, each item as if it were alone with the query.

    prefix_lens: [n_sequences] tokens of the shared prefix, at least 1 (the whole length for an
        ordinary causal sequence).
    token_pos_in_items: [n_sequences][length - prefix_len]; a token with value p sees the prefix and the
        p tokens that end with itself. The first token of an item has 1; 0 marks a delimiter that sees
        the prefix alone. This is FlashInfer's convention (`token_pos_in_items_ptr`).
    """

    prefix_lens: tuple[int, ...]
    token_pos_in_items: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.prefix_lens) == len(self.token_pos_in_items)
        for prefix_len, positions in zip(self.prefix_lens, self.token_pos_in_items, strict=True):
            assert prefix_len >= 1 or not positions, "items need a prefix of one token or more"
            seen = 0
            for position in positions:
                assert position in (0, 1) or position == seen + 1, (
                    "positions in an item count up from 1"
                )
                seen = position


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent items of one length: rows [start, start + count * length) of the pack. keys: leading
    tokens of each that are attended to."""

    start: int
    length: int
    count: int
    keys: int


@dataclass(frozen=True)
class PackLayout:
    """The shape of one pack, on the host. Made once per forward, shared by all layers.

    cu_seqlens: prefix sums of item lengths, starts at 0, `n_items + 1` values.
    keys: [n_items] leading tokens of each item that are attended to; None: all of every item.
    """

    cu_seqlens: tuple[int, ...]
    device: torch.device
    multi_item: MultiItem | None = None
    keys: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        cu = self.cu_seqlens
        assert len(cu) >= 1 and cu[0] == 0, "cu_seqlens starts at 0"
        assert all(a <= b for a, b in pairwise(cu)), "cu_seqlens never falls"
        assert self.keys is None or len(self.keys) == self.n_items
        if self.multi_item is not None:
            assert len(self.multi_item.prefix_lens) == self.n_items
            for length, prefix, positions in zip(
                self.lengths,
                self.multi_item.prefix_lens,
                self.multi_item.token_pos_in_items,
                strict=True,
            ):
                assert prefix + len(positions) == length, "prefix and items fill their sequence"

    @classmethod
    def of(
        cls,
        batch: PackedBatch | Sequence[int] | torch.Tensor,
        device: torch.device | str,
        multi_item: MultiItem | None = None,
    ) -> PackLayout:
        """From a `PackedBatch`, or from prefix sums (sequence, array or host tensor)."""
        source: Any = batch.cu_seqlens if isinstance(batch, PackedBatch) else batch
        values = source.tolist() if hasattr(source, "tolist") else source
        keys = None
        if isinstance(batch, PackedBatch) and any(i.attended is not None for i in batch.items):
            keys = tuple(i.n_tokens if i.attended is None else i.attended for i in batch.items)
        return cls(tuple(int(n) for n in values), torch.device(device), multi_item, keys)

    @property
    def n_items(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def total_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each item."""
        cu = self.cu_seqlens
        return tuple(b - a for a, b in pairwise(cu))

    @cached_property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Non-empty items, adjacent ones of equal length and keys joined."""
        runs: list[Run] = []
        keys = self.lengths if self.keys is None else self.keys
        for start, length, seen in zip(self.cu_seqlens, self.lengths, keys, strict=False):
            if length == 0:
                continue
            last = runs[-1] if runs else None
            # An empty item lies between two runs without moving their rows, so adjacency holds.
            if last is not None and (last.length, last.keys) == (length, seen):
                runs[-1] = Run(last.start, length, last.count + 1, seen)
            else:
                runs.append(Run(start, length, 1, seen))
        return tuple(runs)

    @cached_property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        """[n_items + 1] int32, cpu."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32)

    @cached_property
    def cu_seqlens_device(self) -> torch.Tensor:
        """[n_items + 1] int32, on the layout's device."""
        # Through pinned memory, so that the host need not wait.
        return upload([self.cu_seqlens_cpu.numpy()], self.device, torch.int32)[0]


class AttentionBackend(Protocol):
    """One way to compute attention over a pack. Safe to share between threads."""

    name: str

    def refuses(self, kind: LayerKind, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this backend cannot serve the kind, in words; None when it can."""
        ...

    def plan(self, layout: PackLayout, kind: LayerKind, dtype: torch.dtype) -> Any:
        """What `run` needs besides q, k, v. Called once per pack and layer kind."""
        ...

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of every item with itself.

        q: [total_tokens, n_heads, head_dim]; k, v: [total_tokens, n_kv_heads, head_dim]; any strides.
        bias: [1, n_heads, M, M] added to the scaled scores. M is total_tokens (item [s, e) reads
            [s:e, s:e]) or at least the longest item (each item reads [0:n, 0:n], for biases that
            depend on the distance alone).
        Returns [total_tokens, n_heads, head_dim] in q's dtype.
        """
        ...


def choose(
    backends: Sequence[AttentionBackend],
    kind: LayerKind,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The first backend that does not refuse.

    Raises:
        NoBackend: when all refuse; the message gives each one's reason.
    """
    refusals: list[str] = []
    for backend in backends:
        reason = backend.refuses(kind, dtype, device)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    told = "; ".join(refusals) or "no backend was offered"
    raise NoBackend(f"no attention backend serves ({kind}) in {dtype} on {device}: {told}")


def bias_slice(bias: torch.Tensor, layout_tokens: int, start: int, length: int) -> torch.Tensor:
    """[1, n_heads, length, length] part of a bias for the item at `start`; see `AttentionBackend.run`.

    Raises:
        AttentionError: when the bias covers neither the pack nor the item.
    """
    rows, columns = int(bias.shape[-2]), int(bias.shape[-1])
    if rows == columns == layout_tokens:
        return bias[..., start : start + length, start : start + length]
    if rows >= length and columns >= length:
        return bias[..., :length, :length]
    raise AttentionError(
        f"a bias of {rows} x {columns} covers neither the pack of {layout_tokens} tokens "
        f"nor an item of {length}"
    )

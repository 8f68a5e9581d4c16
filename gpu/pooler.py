"""Hidden states of a pack -> one vector per item: pool, project, cut, normalise; in this order.

Who calls it: `gpu.model_runner` after the forward; `gpu.answer.heads` borrows the row gatherers.
What must stay true: sums are fp32 and per segment (never a running sum over the pack, which loses bits
and lets neighbours in); an item's vector has the same bits wherever it sits; the norm is taken after
the cut, with an epsilon, so a zero vector stays zero and never becomes NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu.batch import Float32, PackedBatch, Pooling
from gpu.device.linears import prepack_one
from gpu.device.staging import row_numbers
from gpu.faults import ModelLoadError, non_finite, zero_vector
from gpu.folder.fingerprint import refused_pickle
from gpu.folder.modules import DenseSpec
from gpu.folder.stored import weight_files
from schemas.errors import NonFinite

NORM_EPS = 1e-12  # torch.nn.functional.normalize's own default


@dataclass(frozen=True, slots=True)
class Segments:
    """Where items lie in the pack. No segment is empty.

    starts, ends: token offsets per item, host. pooled_from: first token of each that mean pooling
    takes, counted from the item's start. last: the row that stands for each item in last-token
    pooling; None: the last one.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    pooled_from: tuple[int, ...]
    last: tuple[int, ...] | None = None

    @property
    def n_items(self) -> int:
        return len(self.starts)

    def of(self, rows: Sequence[int]) -> Segments:
        """The same for some of the items."""
        return Segments(
            starts=tuple(self.starts[row] for row in rows),
            ends=tuple(self.ends[row] for row in rows),
            pooled_from=tuple(self.pooled_from[row] for row in rows),
            last=None if self.last is None else tuple(self.last[row] for row in rows),
        )


def first_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[total_tokens, h] -> [n_items, h]: the first token of each item that is not an excluded prompt."""
    return hidden[row_numbers(first_places(segments), hidden.device)]


def first_places(segments: Segments) -> list[int]:
    """Their places in the pack."""
    return [s + p for s, p in zip(segments.starts, segments.pooled_from, strict=True)]


def last_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[total_tokens, h] -> [n_items, h]: the last token of each item."""
    if segments.last is not None:
        return hidden[row_numbers(segments.last, hidden.device)]
    return hidden[row_numbers([end - 1 for end in segments.ends], hidden.device)]


def segments_of(batch: PackedBatch, skipped_pad: int | None = None) -> Segments:
    """Where the items of a pack lie.

    skipped_pad: transformers' classification heads on decoders read the last token that is not the
    pad token, also where a tokenizer closes texts with just that token; None: the last token.
    """
    bounds = [int(n) for n in batch.cu_seqlens]
    last: tuple[int, ...] | None = None
    if skipped_pad is not None and bool((batch.input_ids == skipped_pad).any()):
        rows = []
        for item, start in zip(batch.items, bounds, strict=False):
            others = np.flatnonzero(item.input_ids != skipped_pad)
            rows.append(start + int(others[-1] if len(others) else 0))
        last = tuple(rows)
    return Segments(
        starts=tuple(bounds[:-1]),
        ends=tuple(bounds[1:]),
        pooled_from=tuple(item.pooled_from for item in batch.items),
        last=last,
    )


def mean_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[total_tokens, h] any float dtype -> [n_items, h] float32: mean over each item's pooled tokens.

    Neighbouring items of one length are summed in one call; torch sums each of them as it would
    alone. A segment whose prompt covers it whole is averaged whole.
    """
    return torch.cat([rows.sum(dim=1) / rows.shape[1] for rows, _ in _groups(hidden, segments)])


def mean_sqrt_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """As `mean_rows`, the sum divided by the root of the number of tokens."""
    return torch.cat(
        [rows.sum(dim=1) / rows.shape[1] ** 0.5 for rows, _ in _groups(hidden, segments)]
    )


def max_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """As `mean_rows`, the largest value of each component."""
    return torch.cat([rows.amax(dim=1) for rows, _ in _groups(hidden, segments)])


def weighted_rows(hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
    """As `mean_rows`, each token weighted by its place in the item, which counts from 1 (SGPT)."""
    parts = []
    for rows, first in _groups(hidden, segments):
        weights = torch.arange(first + 1, first + 1 + rows.shape[1], device=rows.device).float()
        parts.append((rows * weights[:, None]).sum(dim=1) / weights.sum())
    return torch.cat(parts)


def _groups(hidden: torch.Tensor, segments: Segments) -> Iterator[tuple[torch.Tensor, int]]:
    """Pooled tokens of neighbouring items of one length and prompt, [n, length, h] float32, in the order
    of the items; and the place of the first one in its item."""
    firsts = [
        p if s + p < e else 0
        for s, e, p in zip(segments.starts, segments.ends, segments.pooled_from, strict=True)
    ]
    starts = [s + p for s, p in zip(segments.starts, firsts, strict=True)]
    i, n = 0, len(starts)
    while i < n:
        length, j = segments.ends[i] - starts[i], i + 1
        while (
            j < n
            and starts[j] == segments.ends[j - 1]
            and segments.ends[j] - starts[j] == length
            and firsts[j] == firsts[i]
        ):
            j += 1
        yield hidden[starts[i] : segments.ends[j - 1]].float().view(j - i, length, -1), firsts[i]
        i = j


_POOL: dict[Pooling, Callable[[torch.Tensor, Segments], torch.Tensor]] = {
    "cls": first_rows,
    "mean": mean_rows,
    "last_token": last_rows,
    "max": max_rows,
    "mean_sqrt_len": mean_sqrt_rows,
    "weightedmean": weighted_rows,
}


def pool(hidden: torch.Tensor, segments: Segments, pooling: str) -> torch.Tensor:
    """[total_tokens, h] -> [n_items, h] float32; poolings joined by "+" stand one behind the other."""
    parts = [_POOL[name](hidden, segments).float() for name in pooling.split("+")]  # type: ignore[index]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def finish(
    vectors: torch.Tensor, dimensions: Sequence[int | None], normalize: Sequence[bool]
) -> list[tuple[list[int], torch.Tensor]]:
    """Cut, then normalise. vectors: [n_items, native] float32.

    Returns groups: rows that were asked for in the same way, and their [len(rows), size] vectors.
    """
    wanted = list(zip(dimensions, normalize, strict=True))
    groups: list[tuple[list[int], torch.Tensor]] = []
    for size, unit in dict.fromkeys(wanted):
        rows = [row for row, key in enumerate(wanted) if key == (size, unit)]
        part = vectors if len(rows) == len(wanted) else vectors[row_numbers(rows, vectors.device)]
        if size is not None:
            part = part[:, :size].contiguous()
        if unit:
            norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
            part = part / norm.clamp_min(NORM_EPS)
        groups.append((rows, part))
    return groups


def flaw(vector: Float32, unit: bool) -> NonFinite | None:
    """Why a finished vector must not be answered, or None. vector: [size] float32, on the host.

    unit: it was to have length 1, which a vector of zeros cannot have.
    """
    if not np.isfinite(vector).all():
        return non_finite()
    return zero_vector() if unit and not vector.any() else None


class DenseStack(nn.Module):
    """The folder's Dense modules in order, in fp32; see `DenseSpec`."""

    def __init__(self, specs: Sequence[DenseSpec], *, allow_pickle: bool = False) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_Dense(spec, allow_pickle) for spec in specs)

    def prepack(self) -> None:
        """Replace the linears by prepacked ones (CPU)."""
        for step in self.steps:
            for name, linear in list(step.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(step, name, prepack_one(linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n_items, in] float32 -> [n_items, out] float32."""
        for step in self.steps:
            x = step(x)
        return x


class _Dense(nn.Module):
    def __init__(self, spec: DenseSpec, allow_pickle: bool) -> None:
        super().__init__()
        self.linear: nn.Module
        self.linear, self.residual = _load_dense(spec, allow_pickle)
        self.activation = _activation(spec)
        self.adds = spec.residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(x))
        if self.adds:
            out = out + (x if self.residual is None else self.residual(x))
        return out


def _activation(spec: DenseSpec) -> nn.Module:
    cls = getattr(nn, spec.activation, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ModelLoadError(f"{spec.folder}: activation {spec.activation} is not in torch.nn")
    module = cls()
    assert isinstance(module, nn.Module)
    return module


def _load_dense(spec: DenseSpec, allow_pickle: bool) -> tuple[nn.Linear, nn.Linear | None]:
    """The linear, and the one of the residual where it has one."""
    both = nn.ModuleDict({"linear": nn.Linear(spec.in_features, spec.out_features, bias=spec.bias)})
    if spec.residual and spec.in_features != spec.out_features:
        both["residual"] = nn.Linear(spec.in_features, spec.out_features, bias=False)
    state = {
        name if "." in name else f"linear.{name}": tensor.float()
        for name, tensor in read_weights(spec.folder, allow_pickle=allow_pickle).items()
    }
    wanted = both.state_dict()
    if set(state) != set(wanted):
        raise ModelLoadError(
            f"{spec.folder}: Dense weights hold {sorted(state)}, wanted {sorted(wanted)}"
        )
    for name, tensor in wanted.items():
        if state[name].shape != tensor.shape:
            raise ModelLoadError(
                f"{spec.folder}: config.json makes {name} {tuple(tensor.shape)}, the weights hold "
                f"{tuple(state[name].shape)}"
            )
    both.load_state_dict(state)
    both.eval().requires_grad_(False)
    found: Any = both
    return found["linear"], found["residual"] if "residual" in both else None


def read_weights(folder: Path, *, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """Tensors of a small module folder, on the host. Pickled files only when allowed, weights only."""
    files = weight_files(folder)
    if not files:
        raise ModelLoadError(f"{folder}: no weights (model.safetensors)")
    state: dict[str, torch.Tensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state.update(load_file(path))
        elif allow_pickle:
            state.update(torch.load(path, map_location="cpu", weights_only=True))
        else:
            raise ModelLoadError(refused_pickle(path))
    return state

"""Sparse weights over the vocabulary from hidden states of a pack: SPLADE, and BGE-M3's lexical head.

Who calls it: `gpu.answer.outputs` after the forward; `gpu.model_runner`'s self-check borrows the head.
What must stay true: logits are never held for more than a chunk of tokens, whatever the pack (8,192
tokens by 30,522 words would be 1 GB); an item's weights are a function of its own rows and have the
same bits whichever chunk they fall into; NaN never passes for "no weight".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from gpu.batch import Float32, Int32, PackedBatch
from gpu.faults import ModelLoadError
from gpu.folder.families import MlmRecipe
from gpu.folder.outputs import LexicalSpec, SpladeSpec
from gpu.pooler import Segments

LOGIT_ELEMENTS_CPU = 2**24  # of one chunk: 64 MiB in fp32, for each thread that runs a pack
LOGIT_ELEMENTS_CUDA = 2**27
MIN_CHUNK_TOKENS = 32  # below this the matrix product loses its rate

SparseRow: TypeAlias = tuple[Int32, Float32] | None
"""Vocabulary ids ascending and their weights (all > 0); None: the weights were not finite."""

MlmHead: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""hidden [n_tokens, hidden_size] -> logits [n_tokens, vocabulary]."""


def mlm_head(model: nn.Module, recipe: MlmRecipe) -> MlmHead:
    """The head of a `*ForMaskedLM`, made of the model's own modules (also after a prepack)."""
    m: Any = model
    if recipe == "cls":
        return lambda h: m.cls(h)
    if recipe == "lm_head":
        return lambda h: m.lm_head(h)
    if recipe == "modernbert":
        return lambda h: m.decoder(m.head(h))
    if recipe == "electra":
        return lambda h: m.generator_lm_head(m.generator_predictions(h))
    return lambda h: m.vocab_projector(m.vocab_layer_norm(m.activation(m.vocab_transform(h))))


class Splade:
    """``pool over tokens of log1p(relu(logits))`` per item, in chunks of tokens."""

    def __init__(
        self, head: MlmHead, spec: SpladeSpec, *, vocab_size: int, device: torch.device
    ) -> None:
        self._head, self._spec = head, spec
        elements = LOGIT_ELEMENTS_CPU if device.type == "cpu" else LOGIT_ELEMENTS_CUDA
        self.chunk_tokens = max(elements // vocab_size, MIN_CHUNK_TOKENS)

    def __call__(
        self, hidden: torch.Tensor, segments: Segments, rows: Sequence[int]
    ) -> list[SparseRow]:
        """hidden: [total_tokens, hidden_size] -> one entry per asked row, in the order of `rows`."""
        found: list[SparseRow] = []
        for group in self._groups(segments, rows):
            start, end = segments.starts[group[0]], segments.ends[group[0]]
            if end - start > self.chunk_tokens:
                pooled = self._long(hidden, start, end).unsqueeze(0)
            else:
                pooled = self._short(hidden, segments, group)
            found.extend(positive(pooled))
        return found

    def _groups(self, segments: Segments, rows: Sequence[int]) -> Iterator[list[int]]:
        """Runs of whole items that fit a chunk together; an item longer than a chunk is alone."""
        group: list[int] = []
        tokens = 0
        for row in rows:
            length = segments.ends[row] - segments.starts[row]
            if group and tokens + length > self.chunk_tokens:
                yield group
                group, tokens = [], 0
            group.append(row)
            tokens += length
        if group:
            yield group

    def _short(
        self, hidden: torch.Tensor, segments: Segments, group: Sequence[int]
    ) -> torch.Tensor:
        """[len(group), vocabulary] float32."""
        states = torch.cat([hidden[segments.starts[row] : segments.ends[row]] for row in group])
        logits = self._before_pooling(self._head(states))
        parts, at = [], 0
        for row in group:
            end = at + segments.ends[row] - segments.starts[row]
            parts.append(self._pool(logits[at:end]))
            at = end
        return self._after_pooling(torch.stack(parts))

    def _long(self, hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """[vocabulary] float32 of one item, chunk by chunk from its own first token on."""
        total: torch.Tensor | None = None
        for at in range(start, end, self.chunk_tokens):
            logits = self._head(hidden[at : min(at + self.chunk_tokens, end)])
            part = self._pool(self._before_pooling(logits))
            if total is None:
                total = part
            elif self._spec.pooling == "max":
                total = torch.maximum(total, part)
            else:
                total += part
        assert total is not None, "no item is empty here"
        return self._after_pooling(total)

    def _before_pooling(self, logits: torch.Tensor) -> torch.Tensor:
        """A sum needs every token's weight; for the maximum it is enough to weigh the largest logit,
        because the weight grows with the logit."""
        return logits if self._spec.pooling == "max" else self._weigh(logits.float())

    def _pool(self, values: torch.Tensor) -> torch.Tensor:
        return values.amax(dim=0) if self._spec.pooling == "max" else values.sum(dim=0)

    def _after_pooling(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._weigh(pooled.float()) if self._spec.pooling == "max" else pooled

    def _weigh(self, values: torch.Tensor) -> torch.Tensor:
        weights = torch.log1p(torch.relu(values))
        return torch.log1p(weights) if self._spec.twice else weights


def positive(pooled: torch.Tensor) -> list[SparseRow]:
    """[n_items, vocabulary] float32, on the device -> ids and weights on the host."""
    finite = torch.isfinite(pooled).all(dim=1).cpu().numpy()
    active = pooled > 0
    counts = active.sum(dim=1).cpu().numpy()
    ids = active.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    weights = pooled[active].cpu().numpy()
    ends = np.cumsum(counts)
    return [
        (ids[end - n : end].copy(), weights[end - n : end].copy()) if good else None
        for good, n, end in zip(finite, counts, ends, strict=True)
    ]


class Lexical(nn.Module):
    """``relu(linear(h))`` per token in fp32; an item's weight of an id is its largest."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, spec: LexicalSpec, hidden_size: int) -> None:
        super().__init__()
        linear = load_linear(spec.linear, hidden_size, 1)
        self.register_buffer("weight", linear.weight[0].clone())
        self.register_buffer("bias", linear.bias.clone())
        self._dropped = np.asarray(spec.dropped_ids, dtype=np.int32)

    def forward(
        self, hidden: torch.Tensor, batch: PackedBatch, rows: Sequence[int]
    ) -> list[SparseRow]:
        """hidden: [total_tokens, hidden_size] -> one entry per asked row, in the order of `rows`."""
        # A product and a sum per row, because a matrix-vector product may round by the row count.
        weights = torch.relu((hidden.float() * self.weight).sum(dim=-1) + self.bias).cpu().numpy()
        return [
            self._item(
                batch.items[row].input_ids,
                weights[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]],
            )
            for row in rows
        ]

    def _item(self, input_ids: Int32, weights: Float32) -> SparseRow:
        if not np.isfinite(weights).all():
            return None
        kept = (weights > 0) & ~np.isin(input_ids, self._dropped)
        ids, place = np.unique(input_ids[kept], return_inverse=True)
        largest = np.zeros(len(ids), dtype=np.float32)
        np.maximum.at(largest, place, weights[kept])
        return ids, largest


def load_linear(path: Any, in_features: int, out_features: int) -> nn.Linear:
    """A pickled state dict of one linear, read with `weights_only` (tensors, nothing that runs).

    Raises `ModelLoadError` for another shape, other tensors, or anything but tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted = {"weight": (out_features, in_features), "bias": (out_features,)}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    except Exception as error:
        first_line = str(error).strip().split("\n")[0][:200]
        raise ModelLoadError(f"{path}: not a plain state dict of tensors: {first_line}") from error
    if shapes != wanted:
        raise ModelLoadError(f"{path}: holds {shapes}, wanted {wanted}")
    linear = nn.Linear(in_features, out_features)
    linear.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return linear.eval().requires_grad_(False)

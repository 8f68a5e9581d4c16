"""One forward of the base model over a pack: packed, or in padded buckets behind the same call.

Who calls it: `gpu.model_runner` (and its self-check) with a `PackedBatch` of admissible rows.
What must stay true: both return hidden states laid out like the pack, [total_tokens, hidden_size];
safe from several threads at once; nothing depends on what ran before. The padded one pads an item to
a length that follows from its own length alone, so its numbers do not depend on its neighbours either.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from gpu.attention import AttentionBackend, MultiItem, PackedContext, packed_context
from gpu.batch import Int32, PackedBatch, pack
from gpu.device.staging import upload

PAD_TO = 16  # padded lengths are multiples of this


class Forward(Protocol):
    """hidden states of a pack."""

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """-> [total_tokens, hidden_size] in the compute dtype."""
        ...


class PackedForward:
    """The whole pack as one sequence; attention keeps items apart."""

    def __init__(
        self,
        base: nn.Module,
        *,
        device: torch.device,
        position_offset: int,
        token_types: bool,
        backends: Sequence[AttentionBackend],
    ) -> None:
        self.base, self.device = base, device
        self.position_offset = position_offset
        self.token_types = token_types
        self.backends = tuple(backends)
        self._fixed = fixed_arguments(base)
        # T5 has none: distances between tokens are all it knows.
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        if batch.n_tokens == 1:
            # A single row makes strided views contiguous, and torch then takes vector code with other
            # last digits than its scalar code (GELU in ModernBERT). Two rows: the same code as always.
            return self.run(pack([*batch.items, *batch.items]))[0][:1]
        return self.run(batch)[0]

    def run(
        self, batch: PackedBatch, multi_item: MultiItem | None = None, **more: Any
    ) -> tuple[torch.Tensor, PackedContext]:
        """Hidden states, and what the attention function saw (for the self-check). more: as `compute`."""
        rows = self.inputs(batch)
        inputs = upload(tuple(rows.values()), self.device)
        with packed_context(batch, self.device, self.backends, multi_item) as context:
            return self.compute(dict(zip(rows, inputs, strict=True)), **more), context

    def inputs(self, batch: PackedBatch) -> dict[str, Int32]:
        """The model's arguments, [total_tokens] int32 each, on the host."""
        rows = {"input_ids": batch.input_ids}
        if self._takes_positions:
            rows["position_ids"] = batch.positions + np.int32(self.position_offset)
        if self.token_types and batch.token_type_ids is not None:
            rows["token_type_ids"] = batch.token_type_ids
        return rows

    def compute(self, inputs: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
        """[total_tokens] int64 each, on the device -> [total_tokens, hidden_size]; call it inside a
        `packed_context`. more: arguments that only this model's class takes."""
        batched = {name: values.unsqueeze(0) for name, values in inputs.items()}
        output = self.base(**batched, attention_mask=None, **self._fixed, **more)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class PaddedForward:
    """Items padded to a multiple of `PAD_TO` of their own length, one call per padded length."""

    def __init__(
        self,
        base: nn.Module,
        *,
        device: torch.device,
        pad_token_id: int,
        max_tokens: int,
        token_types: bool,
    ) -> None:
        self.base, self.device = base, device
        self.pad_token_id, self.max_tokens = pad_token_id, max_tokens
        self.token_types = token_types
        self._fixed = fixed_arguments(base)

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        buckets: dict[int, list[int]] = {}
        for row, length in enumerate(batch.seqlens):
            buckets.setdefault(self.padded_length(length), []).append(row)
        hidden: torch.Tensor | None = None
        for padded, rows in buckets.items():
            states = self._bucket(batch, rows, padded)
            if hidden is None:
                hidden = states.new_empty(batch.n_tokens, states.shape[-1])
            for i, row in enumerate(rows):
                start, end = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
                hidden[start:end] = states[i, : end - start]
        assert hidden is not None, "an empty batch never gets here"
        return hidden

    def padded_length(self, length: int) -> int:
        """What an item of `length` tokens is padded to; follows from its own length alone."""
        return min(-(-length // PAD_TO) * PAD_TO, self.max_tokens)

    def _bucket(self, batch: PackedBatch, rows: list[int], length: int) -> torch.Tensor:
        """[len(rows), length, hidden_size]."""
        ids = np.full((len(rows), length), self.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(rows), length), dtype=np.int64)
        types = np.zeros((len(rows), length), dtype=np.int64)
        for i, row in enumerate(rows):
            item = batch.items[row]
            ids[i, : item.n_tokens] = item.input_ids
            mask[i, : item.n_tokens if item.attended is None else item.attended] = 1
            if item.token_type_ids is not None:
                types[i, : item.n_tokens] = item.token_type_ids
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.token_types and batch.token_type_ids is not None:
            inputs["token_type_ids"] = types
        tensors = {name: torch.from_numpy(value).to(self.device) for name, value in inputs.items()}
        out: torch.Tensor = self.base(**tensors, **self._fixed).last_hidden_state
        return out


def fixed_arguments(base: nn.Module) -> dict[str, Any]:
    """`use_cache=False` where the class knows it: a cache would let packed items see each other."""
    parameters = inspect.signature(base.forward).parameters
    return {"use_cache": False} if "use_cache" in parameters else {}

"""What the towers of an image model have in common: one model's way from items to vectors.

Who calls it: `gpu.forward.clip` and `gpu.forward.qwen2_vl` build on it, `gpu.forward.vision` calls them.
What must stay true: texts attend item by item over a pack, and every layer is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gpu.attention import NAME, AttentionBackend, AttentionError, packed_context
from gpu.batch import EncodedItem, PackedBatch
from gpu.folder.spec import ModelSpec
from gpu.forward.pixels import Pixels


class Towers(ABC):
    """model: transformers' own, which keeps its attention until `use_packed`."""

    modalities: tuple[str, ...]

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        device: torch.device,
        backends: Sequence[AttentionBackend],
    ) -> None:
        self._model, self._spec, self._device = model, spec, device
        self._backends = tuple(backends)
        self._n_layers = int(model.config.text_config.num_hidden_layers)
        self._pixels = Pixels(spec.config["preprocessing"], device)
        self.attention: set[str] = set()
        model.set_attn_implementation("sdpa")

    @abstractmethod
    def probes(self) -> list[EncodedItem]:
        """Items of every modality and of different lengths, for the self-check."""

    @abstractmethod
    def reference(self, item: EncodedItem) -> torch.Tensor:
        """[dimensions]: one item alone, through transformers' own code."""

    @abstractmethod
    def vectors(self, batch: PackedBatch) -> torch.Tensor:
        """[n_items, dimensions] float32, one row per row of the batch, not normalised."""

    def use_packed(self) -> None:
        """From now on `vectors` may be called; `reference` no more."""
        self._model.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"})

    @contextmanager
    def _attending(self, batch: PackedBatch) -> Iterator[None]:
        """Around the language model's layers. Raises `AttentionError` when one was not reached."""
        with packed_context(batch, self._device, self._backends) as context:
            yield
        if context.calls != self._n_layers or context.masks_seen:
            raise AttentionError(
                f"attention was reached {context.calls} times in {self._n_layers} layers, "
                f"{context.masks_seen} times with a mask"
            )
        self.attention |= set(context.served_by.values())

    def _row(self, values: np.ndarray) -> torch.Tensor:
        """[n] -> [1, n] int64, on the device."""
        return torch.from_numpy(values.astype(np.int64)).unsqueeze(0).to(self._device)

    def _ends(self, batch: PackedBatch) -> torch.Tensor:
        """[n_items]: the row of each item's last token."""
        return torch.from_numpy(batch.cu_seqlens[1:].astype(np.int64)).to(self._device) - 1

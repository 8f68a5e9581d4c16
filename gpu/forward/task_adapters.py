"""Adapters that lie beside the weights of one model, of which each text picks one or none.

Who calls it: `gpu.forward.weights` puts them into the model, `gpu.model_runner` computes with them.
What must stay true: every tensor of an adapter is used or the load fails; the choice holds for one thread
and one forward, because executor threads share the weights; nothing of peft is left in the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpu.batch import ItemOutcome, PackedBatch, pack
from gpu.faults import ModelLoadError
from gpu.folder.adapter import TaskAdapter
from gpu.forward.lora import peft_of

_CHOSEN = threading.local()


class Adapted(nn.Module):
    """A linear or an embedding, and what each adapter adds to it: ``base(x) + B(A(x))``, B with peft's
    scaling in it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base = layer.base_layer
        self.first, self.second = nn.ModuleList(), nn.ModuleList()
        self._place: dict[str, int] = {}
        for name, scaling in layer.scaling.items():
            if name in layer.lora_A:
                first = layer.lora_A[name]
                weight = layer.lora_B[name].weight
            elif name in layer.lora_embedding_A:
                first = nn.Embedding.from_pretrained(layer.lora_embedding_A[name].T.contiguous())
                weight = layer.lora_embedding_B[name]
            else:
                continue
            second = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            second.weight = nn.Parameter(weight * scaling, requires_grad=False)
            self._place[name] = len(self.first)
            self.first.append(first)
            self.second.append(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., features] as the base gives them, with the chosen adapter's on top."""
        out: torch.Tensor = self.base(x)
        place = self._place.get(getattr(_CHOSEN, "name", None) or "")
        if place is None:
            return out
        added: torch.Tensor = self.second[place](self.first[place](x))
        return out + added


@contextmanager
def _choosing(name: str | None) -> Iterator[None]:
    _CHOSEN.name = name
    try:
        yield
    finally:
        _CHOSEN.name = None


def with_task_adapters(model: nn.Module, adapters: Mapping[str, TaskAdapter]) -> nn.Module:
    """The model with every adapter in its layers, none of them chosen. Raises `ModelLoadError`."""
    by_folder = {adapter.name: adapter for adapter in adapters.values()}
    wrapped: Any = None
    for name, adapter in by_folder.items():
        of = adapter.folder.parent.name
        wrapped = peft_of(model, adapter.folder, of=of, name=name, beside=wrapped)
    plain: nn.Module = wrapped.get_base_model()
    for path, layer in list(plain.named_modules()):
        if not hasattr(layer, "base_layer"):
            continue
        if type(layer).__name__ not in ("Linear", "Embedding"):
            raise ModelLoadError(
                f"task adapters on {type(layer).__name__} ({path}) are not computed"
            )
        parent, _, last = path.rpartition(".")
        setattr(plain.get_submodule(parent), last, Adapted(layer))
    return plain


def by_adapter(
    batch: PackedBatch,
    adapters: Mapping[str, TaskAdapter],
    compute: Callable[[PackedBatch], list[ItemOutcome]],
) -> list[ItemOutcome]:
    """One outcome per row; rows under the same adapter are computed together."""
    groups: dict[str | None, list[int]] = {}
    for row, item in enumerate(batch.items):
        picked = adapters.get(item.extras.get("prompt_name", ""))
        groups.setdefault(None if picked is None else picked.name, []).append(row)
    found: dict[int, ItemOutcome] = {}
    for name, rows in groups.items():
        # `pack` is a stable sort and the rows are sorted already, so rows keep their order.
        part = batch if len(groups) == 1 else pack([batch.items[row] for row in rows])
        with _choosing(name):
            found |= zip(rows, compute(part), strict=True)
    return [found[row] for row in range(batch.n_items)]

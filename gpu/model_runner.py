"""A text model with a transformer on one device: a packed batch in, one outcome per row out.

Who calls it: `gpu.executor`'s threads, several at once on a CPU; `gpu.load` builds it.
What must stay true: as in `gpu.runner`; a model answers only after its self-check passed, which
`gpu.forward.proven` sees to.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu.answer.chunks import in_chunks
from gpu.answer.heads import scored
from gpu.answer.label_rows import LabelReader
from gpu.answer.looked_up import QueryTable
from gpu.answer.maxsim import against_queries
from gpu.answer.outputs import Outputs
from gpu.batch import ItemOutcome, PackedBatch
from gpu.faults import ModelLoadError
from gpu.folder.outputs import SpladeSpec
from gpu.folder.spec import ModelSpec
from gpu.forward import speed
from gpu.forward.packed import PackedForward
from gpu.forward.proven import ProvenModel, load_proven
from gpu.forward.task_adapters import by_adapter
from gpu.pooler import Segments, segments_of
from gpu.runner import BaseRunner, OnPhase


class ModelRunner(BaseRunner):
    """Implements `gpu.batch.Runner` on transformers' classes, or our own of `gpu.forward.encoder`."""

    weights = ("_forward", "_first", "_head", "_sharing", "_outputs", "_queries")

    def _load(self, prepack: bool, on_phase: OnPhase) -> dict[str, Any]:
        spec, settings, on_cpu = self.spec, self.settings, self.device.type == "cpu"
        speed.check_possible(settings.speed, device=self.device, dtype=self.dtype, prepack=prepack)
        if spec.task_adapters and (settings.speed, settings.cuda_graphs) != ("off", "off"):
            raise ModelLoadError(
                f"model {self.name}: speed and cuda_graphs know no task adapters; set both to off"
            )
        checked = load_proven(
            spec, settings,
            name=self.name, device=self.device, dtype=self.dtype, prepack=prepack,
            backends=self._backends(), max_batch_tokens=self.budget, on_phase=on_phase,
        )  # fmt: skip
        self._forward, self._head, self._sharing = checked.forward, checked.head, checked.sharing
        self._first = checked.first
        self._outputs = Outputs(
            spec,
            checked.loaded.model,
            device=self.device,
            allow_pickle=settings.allow_pickle,
            prepack=on_cpu and prepack,
        )
        self._queries: QueryTable | None = None
        if isinstance(spec.sparse, SpladeSpec) and spec.sparse.query_table is not None:
            self._queries = QueryTable(spec.sparse.query_table, int(spec.config["vocab_size"]))
        return _found(spec, checked)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """See `BaseRunner.forward`; items of several chunks come back as their average,
        documents beside a query as its score."""
        budget = self.info.max_batch_tokens
        found = in_chunks(batch, self.forward, budget=budget, normalize=self.spec.normalize)
        if found is None:
            found = against_queries(batch, self.forward, budget=budget)
        if found is None and self._queries is not None:
            found = self._queries(batch, self.forward)
        return super().forward(batch) if found is None else found

    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        if self.spec.task_adapters:
            return by_adapter(batch, self.spec.task_adapters, self._computed)
        return self._computed(batch)

    def _computed(self, batch: PackedBatch) -> list[ItemOutcome]:
        hidden, segments = self._states(batch)
        if self._head is not None:
            logits = self._head(hidden, segments).float()
            found = scored(
                batch, logits,
                score=self.spec.score_activation, label=self.spec.label_activation,
            )  # fmt: skip
            if isinstance(self._head, LabelReader):
                named = self._head.named(batch, hidden, segments)
                found = [named.get(row, outcome) for row, outcome in enumerate(found)]
            return found
        outcomes: list[ItemOutcome] = self._outputs(batch, hidden, segments)
        return outcomes

    def _states(self, batch: PackedBatch) -> tuple[torch.Tensor, Segments]:
        """Hidden states of all that is read, [n, hidden_size], and where the items lie in them."""
        if self._first is not None:
            return self._first.states(batch)
        shared = None if self._sharing is None else self._sharing.states(batch)
        return shared or (self._forward(batch), segments_of(batch, self.spec.skipped_pad))


def _found(spec: ModelSpec, checked: ProvenModel) -> dict[str, Any]:
    """Fields of `ModelInfo` that the load told."""
    linears, notes = checked.linears, list(checked.notes)
    if not checked.finding.bit_exact:
        notes.append("vectors depend on their neighbours in the last digits")
    if linears.unstable:
        shapes = ", ".join(f"{o}x{i}" for o, i in linears.unstable)
        notes.append(f"linears of shape {shapes} depend on the number of rows")
    found: dict[str, Any] = {
        "architecture": spec.architecture or type(checked.loaded.model).__name__,
        "packed": isinstance(checked.forward, PackedForward),
        "attention": "+".join(checked.finding.attention) or "transformers",
        "linears": linears.name,
        "implementation": "own" if checked.loaded.own else "transformers",
        "flops_per_token": checked.flops_per_token,
        "notes": tuple(notes),
    }
    if linears.half:
        found["dtype"] = "bfloat16"
    return found

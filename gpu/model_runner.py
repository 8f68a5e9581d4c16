"""A text model with a transformer on one device: a packed batch in, one outcome per row out.

Who calls it: `gpu.executor`'s threads, several at once on a CPU; `gpu.load` builds it.
What must stay true: as in `gpu.runner`; a model answers only after its self-check passed, which
`gpu.forward.checked` sees to.
"""

from __future__ import annotations

import torch

from gpu.answer.chunks import in_chunks
from gpu.answer.heads import scored
from gpu.answer.outputs import Outputs
from gpu.batch import Encoder, ItemOutcome, PackedBatch
from gpu.device.pick import pick_device, pick_dtype
from gpu.folder.spec import ModelSpec
from gpu.forward import speed
from gpu.forward.checked import CheckedModel, load_checked
from gpu.forward.packed import PackedForward
from gpu.pooler import segments_of
from gpu.runner import BaseRunner, OnPhase, silent
from gpu.settings import ModelSettings


class ModelRunner(BaseRunner):
    """Implements `gpu.batch.Runner` on transformers classes.

    Raises `ModelLoadError` when the model cannot be served: bad weights, a failed self-check, or a
    warm-up that does not fit into memory.
    """

    weights = ("_forward", "_head", "_sharing", "_outputs")

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        encoder: Encoder,
        *,
        name: str,
        prepack: bool = True,
        on_phase: OnPhase = silent,
    ) -> None:
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, device)
        super().__init__(spec, settings, encoder, name=name, device=device, dtype=dtype)
        speed.check_possible(settings.speed, device=device, dtype=dtype, prepack=prepack)
        backends = self._backends()
        on_phase("loading weights")
        checked = load_checked(
            spec, settings,
            name=name, device=device, dtype=dtype, prepack=prepack, backends=backends,
            max_batch_tokens=self.budget, on_phase=on_phase,
        )  # fmt: skip
        self._forward, self._head, self._sharing = checked.forward, checked.head, checked.sharing
        self._outputs = Outputs(
            spec,
            checked.loaded.model,
            device=device,
            allow_pickle=settings.allow_pickle,
            prepack=device.type == "cpu" and prepack,
        )
        self.info = self._describe(**_found(checked))
        on_phase("warming up")
        self._warm_up()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """See `BaseRunner.forward`; items of several chunks come back as their average."""
        averaged = in_chunks(
            batch, self.forward, budget=self.info.max_batch_tokens, normalize=self.spec.normalize
        )
        return super().forward(batch) if averaged is None else averaged

    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        shared = None if self._sharing is None else self._sharing.states(batch)
        hidden, segments = shared or (
            self._forward(batch), segments_of(batch, self.spec.skipped_pad)
        )  # fmt: skip
        if self._head is not None:
            logits = self._head(hidden, segments).float()
            return scored(
                batch, logits,
                score=self.spec.score_activation, label=self.spec.label_activation,
            )  # fmt: skip
        outcomes: list[ItemOutcome] = self._outputs(batch, hidden, segments)
        return outcomes


def _found(checked: CheckedModel) -> dict[str, object]:
    """Fields of `ModelInfo` that the load told."""
    linears, notes = checked.linears, list(checked.notes)
    if not checked.finding.bit_exact:
        notes.append("vectors depend on their neighbours in the last digits")
    if linears.unstable:
        shapes = ", ".join(f"{o}x{i}" for o, i in linears.unstable)
        notes.append(f"linears of shape {shapes} depend on the number of rows")
    found: dict[str, object] = {
        "packed": isinstance(checked.forward, PackedForward),
        "attention": "+".join(checked.finding.attention) or "transformers",
        "linears": linears.name,
        "notes": tuple(notes),
    }
    if linears.half:
        found["dtype"] = "bfloat16"
    return found

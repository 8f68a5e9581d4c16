"""Models that take images: the contract of a runner over a text tower, a vision tower, or both in one.

Who calls it: `gpu.load` for CLIP, SigLIP and Qwen2-VL folders; the executor's threads.
What must stay true: as in `gpu.runner`; texts are packed without padding, every load is checked against
transformers' own forward, and an item's bytes on the CPU in fp32 do not depend on its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu.answer.outputs import dense_rows
from gpu.attention import register
from gpu.batch import EncodedItem, ItemOutcome, ItemResult, PackedBatch, pack
from gpu.device.linears import LinearReport
from gpu.device.staging import CopyOut
from gpu.encode.vision import PIXELS
from gpu.faults import ModelLoadError
from gpu.folder.towers import CLIP, SIGLIP, TOWERS
from gpu.forward.clip import ClipTowers, SiglipTowers
from gpu.forward.proven import replace_linears
from gpu.forward.qwen2_vl import Qwen2VlTower
from gpu.forward.selfcheck import compare
from gpu.forward.towers import Towers
from gpu.forward.weights import load_model
from gpu.runner import BaseRunner, OnPhase
from schemas.errors import EmbedstreamError, InvalidRequest, NonFinite

_TOWERS: dict[str, type[Towers]] = {CLIP: ClipTowers, SIGLIP: SiglipTowers}


class VisionRunner(BaseRunner):
    """Implements `gpu.batch.Runner` over `gpu.forward.towers.Towers`."""

    weights = ("_towers",)

    def _load(self, prepack: bool, on_phase: OnPhase) -> dict[str, Any]:
        loaded = load_model(
            self.spec,
            dtype=self.dtype,
            device=self.device,
            allow_pickle=self.settings.allow_pickle,
        )
        made = _TOWERS.get(self.spec.model_type, Qwen2VlTower)
        self._towers: Towers = made(loaded.model, self.spec, self.device, self._backends())
        on_phase("checking")
        linears, bit_exact = self._check(loaded.model, prepack)
        notes = (*self.spec.notes, *loaded.notes)
        if not bit_exact:
            notes = (*notes, "vectors depend on their neighbours in the last digits")
        return {
            "modalities": self._towers.modalities,
            "attention": "+".join(sorted(self._towers.attention)) or "transformers",
            "linears": linears.name,
            "notes": notes,
        }

    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        rows = range(batch.n_items)
        copies = CopyOut(self.device)
        arrived = dense_rows(batch, rows, self._towers.vectors(batch), self.spec.normalize, copies)
        copies.finish()
        found = arrived()
        return [
            vector if isinstance(vector, NonFinite) else ItemResult(dense=vector)
            for vector in (found[row] for row in rows)
        ]

    def _refusal(self, item: EncodedItem) -> EmbedstreamError | None:
        image_id = self.spec.config.get("image_token_id")
        if PIXELS not in item.extras and image_id in item.input_ids:
            # The model would ask for pixels that nobody sent.
            return InvalidRequest(f"token id {image_id} stands for an image, and there is none")
        return super()._refusal(item)

    def _limit(self, item: EncodedItem) -> int:
        # Such images go through a tower of their own, which reads no position table.
        apart = self._towers_apart and PIXELS in item.extras
        return item.n_tokens if apart else super()._limit(item)

    @property
    def _towers_apart(self) -> bool:
        return self.spec.model_type in TOWERS

    @torch.inference_mode()
    def _check(self, model: Any, prepack: bool) -> tuple[LinearReport, bool]:
        """Packed with replaced linears against transformers alone. Raises `ModelLoadError`."""
        items = self._towers.probes()
        reference = torch.stack([self._towers.reference(item) for item in items]).float()
        fp32_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        linears = replace_linears(model, fp32_cpu and prepack, self.settings.linears)
        register()
        self._towers.use_packed()
        batch = pack(items)
        try:
            states = self._towers.vectors(batch)
            finding = compare(states.to(self.dtype), reference[batch.item_index].to(self.dtype))
            alone = torch.cat([self._towers.vectors(pack([item])) for item in batch.items])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise ModelLoadError(f"model {self.name}: the self-check failed: {reason}") from error
        if finding.reason is not None:
            raise ModelLoadError(f"model {self.name}: the self-check failed: {finding.reason}")
        return linears, bool(torch.equal(alone, states))

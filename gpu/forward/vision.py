"""Models that take images: the contract of a runner over a text tower, a vision tower, or both in one.

Who calls it: `gpu.load` for CLIP and Qwen2-VL folders; the executor's threads.
What must stay true: as in `gpu.model_runner`: packed texts without padding, a self-check against
transformers' own forward at every load, a bad row costs that row alone, and an item's bytes on the CPU
in fp32 do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from gpu.attention import backends_for, register
from gpu.batch import EncodedItem, Encoder, ItemOutcome, ItemResult, ModelInfo, PackedBatch, pack
from gpu.device.linears import LinearReport, prepack
from gpu.device.pages import FilePages, own_memory
from gpu.encode.vision import PIXELS
from gpu.faults import ModelLoadError, as_runner_error
from gpu.folder.spec import ModelSpec
from gpu.folder.vision import CLIP
from gpu.forward.clip import ClipTowers
from gpu.forward.selfcheck import compare
from gpu.forward.weights import DTYPES, load_model, pick_device, pick_dtype
from gpu.model_runner import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS
from gpu.pooler import finish
from gpu.settings import ModelSettings
from schemas.errors import (
    EmbedstreamError,
    EmptyInput,
    InvalidRequest,
    NonFinite,
    TooLong,
    Unsupported,
)

from .qwen2_vl import Qwen2VlTower


class Towers(Protocol):
    """One model's way from items to vectors."""

    modalities: tuple[str, ...]
    attention: set[str]

    def probes(self) -> list[EncodedItem]:
        """Items of every modality and of different lengths, for the self-check."""
        ...

    def reference(self, item: EncodedItem) -> torch.Tensor:
        """[dimensions]: one item alone, through transformers' own code."""
        ...

    def use_packed(self) -> None:
        """From now on `vectors` may be called; `reference` no more."""
        ...

    def vectors(self, batch: PackedBatch) -> torch.Tensor:
        """[n_items, dimensions] float32, one row per row of the batch, not normalised."""
        ...


class VisionRunner:
    """Implements `gpu.batch.Runner`. Raises `ModelLoadError` when the model cannot be served."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        encoder: Encoder,
        *,
        name: str,
        prepack: bool = True,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.spec, self.settings, self.encoder = spec, settings, encoder
        self.name, self._prepack = name, prepack
        self.device = pick_device(settings.device)
        self.dtype = pick_dtype(settings.dtype, self.device)
        self._vocab_size = int(spec.config["vocab_size"])
        on_phase("loading weights")
        loaded = load_model(
            spec, dtype=self.dtype, device=self.device, allow_pickle=settings.allow_pickle
        )
        self._towers = self._make_towers(loaded.model)
        on_phase("checking")
        linears, bit_exact = self._check(loaded.model)
        self.info = self._describe(linears, bit_exact, loaded.notes)
        on_phase("warming up")
        self._warm_up()

    def close(self) -> None:
        """Drop weights and device memory. The runner is of no use afterwards."""
        del self._towers
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """See `gpu.batch.Runner`."""
        outcomes: list[ItemOutcome | None] = [self._refused(item) for item in batch.items]
        rows = [row for row, outcome in enumerate(outcomes) if outcome is None]
        if rows:
            kept = batch if len(rows) == batch.n_items else pack([batch.items[r] for r in rows])
            try:
                vectors = self._towers.vectors(kept)
            except (RuntimeError, MemoryError) as error:
                raise as_runner_error(error) from error
            sizes = [batch.items[row].options.dimensions for row in rows]
            units = [
                self.spec.normalize
                if (asked := batch.items[row].options.normalize) is None
                else asked
                for row in rows
            ]
            for group, part in finish(vectors, sizes, units):
                for i, value in zip(group, part.cpu().numpy(), strict=True):
                    outcomes[rows[i]] = (
                        ItemResult(dense=value)
                        if np.isfinite(value).all()
                        else NonFinite("the model gave NaN or infinity for this item")
                    )
        assert all(outcome is not None for outcome in outcomes)
        return outcomes  # type: ignore[return-value]

    def _refused(self, item: EncodedItem) -> EmbedstreamError | None:
        is_image = PIXELS in item.extras
        if item.options.task not in self.spec.tasks or item.options.outputs != ("dense",):
            return Unsupported("this model gives one dense vector and nothing else")
        if item.n_tokens == 0:
            return EmptyInput("the item holds no token to embed")
        if item.n_tokens > self.spec.max_tokens and not (is_image and self._towers_apart):
            return TooLong(
                "the item has more tokens than the model takes",
                given=item.n_tokens,
                limit=self.spec.max_tokens,
            )
        ids = item.input_ids
        # An image token without an image would ask the model for pixels that nobody sent.
        lost = not is_image and self.spec.config.get("image_token_id") in ids
        if lost or int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            return InvalidRequest(
                f"a token id is outside the model's vocabulary of {self._vocab_size}, or stands for an "
                "image that is not there",
                limit=self._vocab_size - 1,
            )
        return None

    @property
    def _towers_apart(self) -> bool:
        return self.spec.model_type == CLIP

    def _make_towers(self, model: Any) -> Towers:
        try:
            backends = backends_for(
                self.device,
                self.dtype,
                self.settings.attention,
                batch_invariant=self.settings.batch_invariant,
            )
        except ValueError as error:
            raise ModelLoadError(f"model {self.name}: {error}") from error
        made = ClipTowers if self._towers_apart else Qwen2VlTower
        return made(model, self.spec, self.device, backends)

    @torch.inference_mode()
    def _check(self, model: Any) -> tuple[LinearReport, bool]:
        """Packed with replaced linears against transformers alone. Raises `ModelLoadError`."""
        items = self._towers.probes()
        reference = torch.stack([self._towers.reference(item) for item in items]).float()
        pages = FilePages()
        fp32_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        linears = prepack(model, pages.release) if fp32_cpu and self._prepack else LinearReport()
        own_memory(model, pages)
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

    def _describe(
        self, linears: LinearReport, bit_exact: bool, notes: tuple[str, ...]
    ) -> ModelInfo:
        spec, budget = self.spec, self.settings.max_batch_tokens
        if budget == "auto":
            budget = CPU_BATCH_TOKENS if self.device.type == "cpu" else CUDA_BATCH_TOKENS
        if not bit_exact:
            notes = (*notes, "vectors depend on their neighbours in the last digits")
        return ModelInfo(
            name=self.name,
            fingerprint=spec.fingerprint,
            architecture=spec.architecture,
            dtype={value: key for key, value in DTYPES.items()}[self.dtype],
            device=str(self.device),
            tasks=spec.tasks,
            max_tokens=spec.max_tokens,
            max_batch_tokens=budget,
            dimensions=spec.dimensions,
            allowed_dimensions=spec.allowed_dimensions,
            pooling=spec.pooling,
            normalized=spec.normalize,
            prompts=tuple(sorted(spec.prompts)),
            default_prompt_name=spec.default_prompt_name,
            modalities=self._towers.modalities,
            attention="+".join(sorted(self._towers.attention)) or "transformers",
            linears=linears.name,
            notes=(*spec.notes, *notes),
        )

    def _warm_up(self) -> None:
        """Texts at the token budget. Out of memory here names the setting to lower."""
        budget, longest = self.info.max_batch_tokens, self.spec.max_tokens
        lengths = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
        items = [EncodedItem(np.ones(n, np.int32)) for n in lengths]
        try:
            outcomes = self.forward(pack(items))
        except MemoryError as error:
            raise ModelLoadError(
                f"model {self.name}: a pack of {budget} tokens does not fit into memory on "
                f"{self.device}; lower `max_batch_tokens` for this model"
            ) from error
        bad = [outcome for outcome in outcomes if isinstance(outcome, EmbedstreamError)]
        if bad:
            raise ModelLoadError(f"model {self.name}: the warm-up failed: {bad[0]}")

"""What every runner shares: rows refused one by one, errors typed, the model described, a warm-up.

Who calls it: `gpu.model_runner`, `gpu.forward.static` and `gpu.forward.vision` build on it.
What must stay true: a bad row (too long, unknown id, empty) costs that row and no other; nothing a row
contains can reach the device as an index out of range; a forward keeps no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu.attention import AttentionBackend, backends_for
from gpu.batch import (
    EncodedItem,
    Encoder,
    Int32,
    ItemOptions,
    ItemOutcome,
    ModelInfo,
    PackedBatch,
    pack,
)
from gpu.device.pick import DTYPES, pick_device, pick_dtype
from gpu.faults import ModelLoadError, as_runner_error
from gpu.folder.fingerprint import computed_in
from gpu.folder.spec import ModelSpec
from gpu.settings import ModelSettings
from schemas.errors import EmbedstreamError, EmptyInput, InvalidRequest, TooLong, Unsupported

CPU_BATCH_TOKENS = 512  # the GEMM rate is flat from 32 rows up, and answers stay quick
CPU_WARM_UP_TOKENS = (
    32  # a pack of `CPU_BATCH_TOKENS` fits wherever the weights do: its seconds are saved
)
CUDA_BATCH_TOKENS = 16384

OnPhase = Callable[[str], None]
"""Told how far a load is."""


def _silent(phase: str) -> None:
    """Progress that nobody asked for."""


class BaseRunner(ABC):
    """Implements `gpu.batch.Runner` around a subclass's `_load` and `_compute`.

    Raises `ModelLoadError` when the model cannot be served: settings that do not fit it, bad weights, a
    failed self-check, or a warm-up that does not fit into memory.
    """

    weights: tuple[str, ...] = ()
    """Attributes that `close` drops."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        encoder: Encoder,
        *,
        name: str,
        prepack: bool = True,
        on_phase: OnPhase = _silent,
    ) -> None:
        self.spec, self.settings, self.encoder, self.name = spec, settings, encoder, name
        self.device, self.dtype = self._where()
        self._vocab_size = int(spec.config["vocab_size"])
        on_phase("loading weights")
        self.info = self._describe(self._load(prepack, on_phase))
        on_phase("warming up")
        self._warm_up()

    def _where(self) -> tuple[torch.device, torch.dtype]:
        """Where and in what it computes, as the settings say."""
        device = pick_device(self.settings.device)
        return device, pick_dtype(self.settings.dtype, device)

    @abstractmethod
    def _load(self, prepack: bool, on_phase: OnPhase) -> dict[str, Any]:
        """Load and check the model. Returns fields of `ModelInfo` that only the load could tell."""

    @property
    def budget(self) -> int:
        """Tokens a pack may hold."""
        asked = self.settings.max_batch_tokens
        return self._auto_budget() if asked == "auto" else asked

    def _auto_budget(self) -> int:
        return CPU_BATCH_TOKENS if self.device.type == "cpu" else CUDA_BATCH_TOKENS

    def close(self) -> None:
        """Drop weights and device memory. The runner is of no use afterwards."""
        for name in self.weights:
            setattr(self, name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """See `gpu.batch.Runner`. Raises `MemoryError`, `DeviceFault`, or what the model raised."""
        refused = self._refused(batch)
        rows = [row for row in range(batch.n_items) if row not in refused]
        computed: list[ItemOutcome] = []
        if rows:
            # `pack` is a stable sort and `rows` are sorted already, so rows keep their order.
            kept = batch if not refused else pack([batch.items[row] for row in rows])
            try:
                computed = self._compute(kept)
            except (RuntimeError, MemoryError) as error:
                raise as_runner_error(error) from error
        outcomes = dict(zip(rows, computed, strict=True)) | refused
        return [outcomes[row] for row in range(batch.n_items)]

    @abstractmethod
    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        """One outcome per row of a batch of admissible items."""

    def _refused(self, batch: PackedBatch) -> dict[int, EmbedstreamError]:
        """Rows that must not reach the model, each with its error."""
        all_known = self._in_vocabulary(batch.input_ids)
        refused: dict[int, EmbedstreamError] = {}
        for row, item in enumerate(batch.items):
            error = self._refusal(item)
            if error is None and not all_known and not self._in_vocabulary(item.input_ids):
                error = InvalidRequest(
                    f"a token id is outside the model's vocabulary of {self._vocab_size}",
                    limit=self._vocab_size - 1,
                )
            if error is not None:
                refused[row] = error
        return refused

    def _refusal(self, item: EncodedItem) -> EmbedstreamError | None:
        """Why the item must not reach the model, ids outside the vocabulary apart; None: it may."""
        options = item.options
        if options.task not in self.spec.tasks:
            return Unsupported(f"this model cannot {options.task}")
        if options.task == "embed" and not set(options.outputs) <= set(self.spec.outputs):
            return Unsupported(f"this model gives {', '.join(self.spec.outputs)}")
        if item.n_tokens == 0:
            return EmptyInput("the item holds no token to embed")
        if item.n_tokens > self._limit(item):
            return TooLong(
                "the item has more tokens than the model takes",
                given=item.n_tokens,
                limit=self.spec.max_tokens,
            )
        return None

    def _limit(self, item: EncodedItem) -> int:
        """Tokens that this item may have."""
        return self.spec.max_tokens

    def _in_vocabulary(self, ids: Int32) -> bool:
        return len(ids) == 0 or (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size)

    def _backends(self) -> tuple[AttentionBackend, ...]:
        """As the settings say. Raises `ModelLoadError` for a name that does not exist."""
        try:
            return backends_for(
                self.device,
                self.dtype,
                self.settings.attention,
                batch_invariant=self.settings.batch_invariant,
            )
        except ValueError as error:
            raise ModelLoadError(f"model {self.name}: {error}") from error

    def _describe(self, found: dict[str, Any]) -> ModelInfo:
        """found: what the load told, on top of what folder and settings say."""
        spec, multivector = self.spec, self.spec.multivector
        known: dict[str, Any] = {
            "name": self.name,
            "architecture": spec.architecture,
            "device": str(self.device),
            "tasks": spec.tasks,
            "max_tokens": spec.max_tokens,
            "max_batch_tokens": self.budget,
            "dimensions": spec.dimensions,
            "allowed_dimensions": spec.allowed_dimensions,
            "pooling": spec.pooling,
            "normalized": spec.normalize,
            "outputs": frozenset(spec.outputs),
            "default_outputs": spec.outputs[:1],
            "multivector_dimensions": None if multivector is None else multivector.dimensions,
            "labels": spec.labels,
            "prompts": tuple(sorted(spec.prompts)),
            "default_prompt_name": spec.default_prompt_name,
            "notes": spec.notes,
            "honoured": spec.honoured,
        }
        dtype = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        # `speed` shows in the dtype that the load tells.
        speed = "off" if found.get("dtype", dtype) == dtype else str(found["dtype"])
        fingerprint = computed_in(spec.fingerprint, dtype, speed)
        return ModelInfo(**({"fingerprint": fingerprint, "dtype": dtype} | known | found))

    def _warm_up(self) -> None:
        """One pack, at the token budget where it may not fit: on CUDA, or as the settings have it. Out of
        memory here names the setting to lower."""
        budget, longest = self.budget, self.spec.max_tokens
        if self.device.type == "cpu" and self.settings.max_batch_tokens == "auto":
            budget = min(budget, CPU_WARM_UP_TOKENS)
        lengths = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
        options = ItemOptions(task=min(self.spec.tasks), outputs=self.spec.outputs)
        items = [EncodedItem(np.ones(n, np.int32), options=options) for n in lengths]
        try:
            outcomes = self.forward(pack(items))
        except MemoryError as error:
            raise ModelLoadError(
                f"model {self.name}: a pack of {budget} tokens does not fit into memory on "
                f"{self.device}; lower `max_batch_tokens` for this model"
            ) from error
        bad = [outcome for outcome in outcomes if isinstance(outcome, EmbedstreamError)]
        if bad:
            raise ModelLoadError(
                f"model {self.name}: the warm-up pack of {budget} tokens failed: {bad[0]}"
            )

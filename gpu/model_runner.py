"""One model on one device: a packed batch in, one outcome per row out.

Who calls it: `gpu.executor`'s threads, several at once on a CPU; `gpu.load` builds it.
What must stay true: a model answers only after its self-check passed; a bad row (too long, unknown
id, empty, non-finite) costs that row and no other; nothing a row contains can reach the device as an
index out of range; a forward keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gpu.answer.heads import HeadFn, build_head, scored
from gpu.answer.label_rows import label_head_of
from gpu.answer.outputs import Outputs
from gpu.answer.sparse import mlm_head
from gpu.attention import AttentionBackend, backends_for
from gpu.batch import (
    EncodedItem,
    Encoder,
    ItemOptions,
    ItemOutcome,
    ModelInfo,
    PackedBatch,
    pack,
)
from gpu.device.linears import LinearReport, prepack
from gpu.device.pages import FilePages, own_memory
from gpu.encode.long_texts import in_chunks
from gpu.faults import ModelLoadError, as_runner_error
from gpu.folder.spec import ModelSpec
from gpu.forward import speed
from gpu.forward.choice import pick_forward, pick_sharing
from gpu.forward.cuda_graphs import with_graphs
from gpu.forward.packed import Forward, PackedForward
from gpu.forward.selfcheck import (
    Finding,
    check_head,
    check_tokens,
    crosses_window,
    probes,
    reference_logits,
    reference_states,
    reference_tokens,
)
from gpu.forward.shared_prefix import SharedPrefixForward
from gpu.forward.weights import DTYPES, LoadedModel, load_model, pick_device, pick_dtype
from gpu.pooler import Segments, segments_of
from gpu.settings import ModelSettings
from schemas.errors import (
    EmbedstreamError,
    EmptyInput,
    InvalidRequest,
    TooLong,
    Unsupported,
)

CPU_BATCH_TOKENS = 512  # the GEMM rate is flat from 32 rows up, and answers stay quick
CUDA_BATCH_TOKENS = 16384


@dataclass(slots=True)
class _Checked:
    """A loaded model that passed its self-check, and how."""

    loaded: LoadedModel
    forward: Forward
    finding: Finding
    linears: LinearReport
    notes: tuple[str, ...]
    head: HeadFn | None
    sharing: SharedPrefixForward | None = None


def _silent(phase: str) -> None:
    """Progress that nobody asked for."""


class ModelRunner:
    """Implements `gpu.batch.Runner` on transformers classes.

    Raises `ModelLoadError` when the model cannot be served: bad weights, a failed self-check, or a
    warm-up that does not fit into memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: ModelSettings,
        encoder: Encoder,
        *,
        name: str,
        prepack: bool = True,
        on_phase: Callable[[str], None] = _silent,
    ) -> None:
        self.spec, self.settings, self.encoder = spec, settings, encoder
        self.name, self._prepack = name, prepack
        self.device = pick_device(settings.device)
        self.dtype = pick_dtype(settings.dtype, self.device)
        speed.check_possible(settings.speed, device=self.device, dtype=self.dtype, prepack=prepack)
        self._backends = self._attention()
        on_phase("loading weights")
        checked = self._load_checked(on_phase)
        self._forward, self._head = checked.forward, checked.head
        self._sharing = checked.sharing
        self._vocab_size = int(checked.loaded.config.vocab_size)
        self._outputs = Outputs(
            spec,
            checked.loaded.model,
            device=self.device,
            allow_pickle=settings.allow_pickle,
            prepack=self.device.type == "cpu" and prepack,
        )
        self.info = self._describe(checked)
        on_phase("warming up")
        self._warm_up()

    def close(self) -> None:
        """Drop weights and device memory. The runner is of no use afterwards."""
        self._head = self._sharing = None
        del self._forward, self._outputs
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        """See `gpu.batch.Runner`. Raises `MemoryError`, `DeviceFault`, or what the model raised."""
        averaged = in_chunks(
            batch,
            self.forward,
            budget=self.info.max_batch_tokens,
            normalize=self.spec.normalize,
        )
        if averaged is not None:
            return averaged
        refused = self._refused(batch)
        rows = [row for row in range(batch.n_items) if row not in refused]
        outcomes: list[ItemOutcome | None] = [refused.get(row) for row in range(batch.n_items)]
        if rows:
            kept = batch if not refused else pack([batch.items[row] for row in rows])
            try:
                computed = self._compute(kept)
            except (RuntimeError, MemoryError) as error:
                raise as_runner_error(error) from error
            # `pack` is a stable sort and `rows` are sorted already, so rows keep their order.
            for row, outcome in zip(rows, computed, strict=True):
                outcomes[row] = outcome
        assert all(outcome is not None for outcome in outcomes)
        return outcomes  # type: ignore[return-value]

    def _refused(self, batch: PackedBatch) -> dict[int, EmbedstreamError]:
        """Rows that must not reach the model, each with its error."""
        refused: dict[int, EmbedstreamError] = {}
        ids_fit = batch.n_tokens == 0 or (
            int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < self._vocab_size
        )
        for row, item in enumerate(batch.items):
            if item.options.task not in self.spec.tasks:
                refused[row] = Unsupported(f"this model cannot {item.options.task}")
            elif self._head is None and not set(item.options.outputs) <= set(self.spec.outputs):
                refused[row] = Unsupported(f"this model gives {', '.join(self.spec.outputs)}")
            elif item.n_tokens == 0:
                refused[row] = EmptyInput("the item holds no token to embed")
            elif item.n_tokens > self.spec.max_tokens:
                refused[row] = TooLong(
                    "the item has more tokens than the model takes",
                    given=item.n_tokens,
                    limit=self.spec.max_tokens,
                )
            elif not ids_fit and self._has_unknown_id(item):
                refused[row] = InvalidRequest(
                    f"a token id is outside the model's vocabulary of {self._vocab_size}",
                    limit=self._vocab_size - 1,
                )
        return refused

    def _has_unknown_id(self, item: EncodedItem) -> bool:
        return bool(item.input_ids.min() < 0 or item.input_ids.max() >= self._vocab_size)

    def _compute(self, batch: PackedBatch) -> list[ItemOutcome]:
        shared = None if self._sharing is None else self._sharing.states(batch)
        hidden, segments = shared or (self._forward(batch), self._segments(batch))
        if self._head is not None:
            logits = self._head(hidden, segments).float()
            return scored(
                batch, logits,
                score=self.spec.score_activation, label=self.spec.label_activation,
            )  # fmt: skip
        outcomes: list[ItemOutcome] = self._outputs(batch, hidden, segments)
        return outcomes

    def _segments(self, batch: PackedBatch) -> Segments:
        return segments_of(batch, self.spec.skipped_pad)

    def _attention(self) -> tuple[AttentionBackend, ...]:
        try:
            return backends_for(
                self.device,
                self.dtype,
                self.settings.attention,
                batch_invariant=self.settings.batch_invariant,
            )
        except ValueError as error:
            raise ModelLoadError(f"model {self.name}: {error}") from error

    def _load_checked(self, on_phase: Callable[[str], None]) -> _Checked:
        wants_prepack = self._prepack and self.device.type == "cpu" and self.dtype == torch.float32
        checked = self._try_load(on_phase, prepacked=wants_prepack)
        if checked.finding.reason is not None and wants_prepack:
            reason = checked.finding.reason
            checked = self._try_load(on_phase, prepacked=False)
            note = f"prepacked linears failed the self-check ({reason}); torch's own are used"
            checked.notes = (*checked.notes, note)
        if checked.finding.reason is not None:
            raise ModelLoadError(
                f"model {self.name}: the self-check failed packed and padded: "
                f"{checked.finding.reason}"
            )
        notes = list(checked.notes)
        checked.forward = with_graphs(
            checked.forward, self.settings.cuda_graphs,
            device=self.device, max_batch_tokens=self._budget(), max_tokens=self.spec.max_tokens,
            vocab_size=int(checked.loaded.config.vocab_size), notes=notes,
        )  # fmt: skip
        checked.notes = tuple(notes)
        return checked

    def _budget(self) -> int:
        if self.settings.max_batch_tokens != "auto":
            return self.settings.max_batch_tokens
        return CPU_BATCH_TOKENS if self.device.type == "cpu" else CUDA_BATCH_TOKENS

    def _try_load(self, on_phase: Callable[[str], None], *, prepacked: bool) -> _Checked:
        """Load, compute the reference, then look for a forward that reproduces it."""
        spec = self.spec
        loaded = load_model(
            spec,
            dtype=self.dtype,
            device=self.device,
            allow_pickle=self.settings.allow_pickle,
            trust_remote_code=self.settings.trust_remote_code,
        )
        on_phase("checking")
        config = loaded.config
        pad = getattr(config, "pad_token_id", None)
        batch = probes(
            config, max_tokens=spec.max_tokens, vocab_size=int(config.vocab_size), reserved=pad
        )
        native = "sdpa" if getattr(loaded.base, "_supports_sdpa", False) else "eager"
        if hasattr(loaded.model, "set_attn_implementation"):
            loaded.model.set_attn_implementation(native)  # type: ignore[operator]
        reference = reference_states(loaded.base, batch, self.device)
        logits = reference_logits(loaded.model, batch, self.device) if spec.head else None
        tokens = reference_tokens(loaded.model, batch, self.device) if spec.has_mlm_head else None
        exact = reference
        half: set[nn.Module] = set()
        if prepacked and self.settings.speed == "bf16":
            half = speed.half_parents(loaded.model, loaded.base)
            reference, logits, tokens = speed.rounded(reference, logits, tokens)
        pages = FilePages()
        linears = (
            prepack(loaded.model, pages.release, half_parents=half) if prepacked else LinearReport()
        )
        own_memory(loaded.model, pages)
        notes = [*spec.notes, *loaded.notes]
        forward, finding = pick_forward(
            loaded, spec, batch, reference,
            native=native, device=self.device, notes=notes,
            backends=speed.backends() if half else self._backends,
        )  # fmt: skip
        head = build_head(loaded.model, loaded.base, spec.family, config) if spec.head else None
        if spec.label_head is not None:
            head = label_head_of(spec, config, self.device)
        if finding.reason is None and head is not None and logits is not None:
            with torch.inference_mode():
                found = check_head(head(forward(batch), self._segments(batch)), logits)
            if found.reason is not None:
                finding = Finding(f"the classification head is wrong: {found.reason}")
        if finding.reason is None and tokens is not None and spec.family.mlm is not None:
            finding = check_tokens(
                mlm_head(loaded.model, spec.family.mlm), forward, tokens, finding
            )
        if linears.half and finding.reason is None:
            with torch.inference_mode():
                notes.append(speed.cosine_note(forward(batch), exact))
        if not crosses_window(config, batch):
            notes.append(f"the self-check was {batch.max_seqlen} tokens long and crossed no window")
        sharing = None
        if self.settings.multi_item and head is not None and finding.reason is None:
            sharing = pick_sharing(forward, spec, batch, int(config.vocab_size), notes)
        return _Checked(loaded, forward, finding, linears, tuple(notes), head, sharing)

    def _describe(self, checked: _Checked) -> ModelInfo:
        spec, linears, notes = self.spec, checked.linears, list(checked.notes)
        if not checked.finding.bit_exact:
            notes.append("vectors depend on their neighbours in the last digits")
        if linears.unstable:
            shapes = ", ".join(f"{o}x{i}" for o, i in linears.unstable)
            notes.append(f"linears of shape {shapes} depend on the number of rows")
        names = {value: key for key, value in DTYPES.items()}
        return ModelInfo(
            name=self.name,
            fingerprint=spec.fingerprint,
            architecture=spec.architecture or type(checked.loaded.model).__name__,
            dtype="bfloat16" if linears.half else names[self.dtype],
            device=str(self.device),
            tasks=spec.tasks,
            max_tokens=spec.max_tokens,
            max_batch_tokens=self._budget(),
            dimensions=spec.dimensions,
            allowed_dimensions=spec.allowed_dimensions,
            pooling=spec.pooling,
            normalized=spec.normalize,
            outputs=frozenset(spec.outputs),
            default_outputs=spec.outputs[:1],
            multivector_dimensions=None
            if spec.multivector is None
            else spec.multivector.dimensions,
            labels=spec.labels,
            prompts=tuple(sorted(spec.prompts)),
            default_prompt_name=spec.default_prompt_name,
            packed=isinstance(checked.forward, PackedForward),
            attention="+".join(checked.finding.attention) or "transformers",
            linears=linears.name,
            notes=tuple(notes),
        )

    def _warm_up(self) -> None:
        """One pack at the token budget. Out of memory here names the setting to lower."""
        budget, longest = self.info.max_batch_tokens, self.spec.max_tokens
        lengths = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
        task = next(iter(sorted(self.spec.tasks)))
        options = ItemOptions(task=task, outputs=self.spec.outputs)
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


def init_executor_thread() -> None:
    """One intra-op thread for the calling executor thread: several of them share the cores, and two
    threads spinning inside one OpenMP region collapse as soon as anything else wants a core. Equal bits
    are promised only so: with more, last digits may depend on which of them takes a head."""
    torch.set_num_threads(1)

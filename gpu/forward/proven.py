"""A text model loaded, its linears replaced, and proven against transformers before it may answer.

Who calls it: `gpu.model_runner`, once per load.
What must stay true: nothing is served that failed its self-check; what is given up on the way (prepacked
linears, packing, graphs, shared prefixes) is a sentence in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpu.answer.heads import HeadFn, build_head
from gpu.answer.label_rows import label_reader_of
from gpu.answer.sparse import mlm_head
from gpu.attention import AttentionBackend
from gpu.device.kernels import KernelChoice, remembered
from gpu.device.linears import LinearReport, prepack
from gpu.device.pages import FilePages, own_memory
from gpu.faults import ModelLoadError
from gpu.folder.spec import ModelSpec
from gpu.forward import speed
from gpu.forward.choice import pick_forward, pick_sharing
from gpu.forward.cuda_graphs import with_graphs
from gpu.forward.first_tokens import FirstTokens, first_tokens_of
from gpu.forward.packed import Forward
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
from gpu.forward.weights import LoadedModel, load_model
from gpu.pooler import segments_of
from gpu.settings import ModelSettings


@dataclass(slots=True)
class ProvenModel:
    """A loaded model that passed its self-check, and how."""

    loaded: LoadedModel
    forward: Forward
    finding: Finding
    linears: LinearReport
    notes: list[str]
    head: HeadFn | None
    sharing: SharedPrefixForward | None = None
    first: FirstTokens | None = None
    flops_per_token: int = 0


def load_proven(
    spec: ModelSpec,
    settings: ModelSettings,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    prepack: bool,
    backends: Sequence[AttentionBackend],
    max_batch_tokens: int,
    on_phase: Callable[[str], None],
) -> ProvenModel:
    """Raises `ModelLoadError` when the weights do not fit or no forward reproduces transformers."""

    def attempt(prepacked: bool) -> ProvenModel:
        loaded = load_model(
            spec,
            dtype=dtype,
            device=device,
            allow_pickle=settings.allow_pickle,
            trust_remote_code=settings.trust_remote_code,
            implementation=settings.implementation,
        )
        on_phase("checking")
        flops = _flops_per_token(loaded.base)  # before linears are replaced
        found = _proven(spec, settings, loaded, device, backends, prepacked=prepacked)
        found.flops_per_token = flops
        return found

    wants_prepack = prepack and device.type == "cpu" and dtype == torch.float32
    checked = attempt(wants_prepack)
    if checked.finding.reason is not None and wants_prepack:
        reason = checked.finding.reason
        checked = attempt(False)
        checked.notes.append(
            f"prepacked linears failed the self-check ({reason}); torch's own are used"
        )
    if checked.finding.reason is not None:
        raise ModelLoadError(
            f"model {name}: the self-check failed packed and padded: {checked.finding.reason}"
        )
    checked.forward = with_graphs(
        checked.forward, settings.cuda_graphs,
        device=device, max_batch_tokens=max_batch_tokens, max_tokens=spec.max_tokens,
        vocab_size=int(checked.loaded.config.vocab_size), notes=checked.notes,
    )  # fmt: skip
    return checked


def _flops_per_token(base: nn.Module) -> int:
    """Two per weight of every linear; 0 where a token does not pass all of them."""
    modules = dict(base.named_modules())
    if any("expert" in name for name in modules):
        return 0
    linears = [one for one in modules.values() if isinstance(one, nn.Linear)]
    return sum(2 * linear.in_features * linear.out_features for linear in linears)


def _proven(
    spec: ModelSpec,
    settings: ModelSettings,
    loaded: LoadedModel,
    device: torch.device,
    backends: Sequence[AttentionBackend],
    *,
    prepacked: bool,
) -> ProvenModel:
    """Compute the reference, replace the linears, then look for a forward that reproduces it."""
    config = loaded.config
    vocab_size = int(config.vocab_size)
    pad = getattr(config, "pad_token_id", None)
    batch = probes(
        config, max_tokens=spec.max_tokens, vocab_size=vocab_size, reserved=pad,
        expanded=None if spec.multivector is None else spec.multivector.unread_tokens,
    )  # fmt: skip
    native = "sdpa" if getattr(loaded.base, "_supports_sdpa", False) else "eager"
    if hasattr(loaded.model, "set_attn_implementation"):
        loaded.model.set_attn_implementation(native)  # type: ignore[operator]
    reference = exact = reference_states(loaded.base, batch, device)
    logits = None
    if spec.head:
        logits = reference_logits(loaded.model, batch, device, spec.family)
    tokens = reference_tokens(loaded.model, batch, device) if spec.has_mlm_head else None
    half: set[nn.Module] = set()
    if prepacked and settings.speed == "bf16":
        half = speed.half_parents(loaded.model, loaded.base)
        reference, logits, tokens = speed.rounded(reference, logits, tokens)
        backends = speed.backends()
    linears = replace_linears(loaded.model, prepacked, settings.linears, half)
    notes = [*spec.notes, *loaded.notes, *([linears.note] if linears.note else [])]
    forward, finding = pick_forward(
        loaded, spec, batch, reference, native=native, device=device, notes=notes, backends=backends
    )
    head = build_head(loaded.model, loaded.base, spec.family, config) if spec.head else None
    if spec.label_head is not None:
        head = label_reader_of(spec, config, device)
    if finding.reason is None and head is not None and logits is not None:
        with torch.inference_mode():
            segments = segments_of(batch, spec.skipped_pad)
            found = check_head(head(forward(batch), segments), logits)
        if found.reason is not None:
            finding = Finding(f"the classification head is wrong: {found.reason}")
    if finding.reason is None and tokens is not None and spec.family.mlm is not None:
        finding = check_tokens(mlm_head(loaded.model, spec.family.mlm), forward, tokens, finding)
    if linears.half and finding.reason is None:
        with torch.inference_mode():
            notes.append(speed.cosine_note(forward(batch), exact))
    if not crosses_window(config, batch):
        notes.append(f"the self-check was {batch.max_seqlen} tokens long and crossed no window")
    sharing = None
    if settings.multi_item and head is not None and finding.reason is None:
        sharing = pick_sharing(forward, spec, batch, vocab_size, notes)
    first = first_tokens_of(forward, spec, batch) if finding.reason is None else None
    return ProvenModel(loaded, forward, finding, linears, notes, head, sharing, first)


def replace_linears(
    model: nn.Module, prepacked: bool, kernel: str, half_parents: Container[nn.Module] = ()
) -> LinearReport:
    """Linears replaced where wanted, and no tensor of the model left in the weights file.

    kernel: the setting `linears`.
    """
    pages = FilePages()
    linears = LinearReport()
    if prepacked:
        choice = KernelChoice(kernel, remembered())
        linears = prepack(model, pages.release, half_parents=half_parents, choice=choice)
    own_memory(model, pages)
    return linears

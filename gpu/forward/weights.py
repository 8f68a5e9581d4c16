"""Weights into their classes: safetensors, checked keys, no connection, no surprise.

Who calls it: `gpu.model_runner`, once per model.
What must stay true: a checkpoint that lacks a tensor or holds one that nobody reads is refused with
the names (a wrong model must not answer); pickled weights and remote code only when asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu.faults import ModelLoadError
from gpu.folder.decoders import is_reward
from gpu.folder.fingerprint import refused_pickle
from gpu.folder.layerwise import MINICPM
from gpu.folder.nvembed import NVEMBED
from gpu.folder.spec import ModelSpec
from gpu.forward.encoder_weights import load_own
from gpu.forward.layerwise import load_layerwise
from gpu.forward.lora import merged
from gpu.forward.new_gte import NEW, gte_config
from gpu.forward.nvembed import load_nvembed
from gpu.forward.rope import make_stateless
from gpu.forward.task_adapters import with_task_adapters
from gpu.forward.wrappers import wrap

# Buffers that older transformers saved and newer ones compute.
_HARMLESS_UNEXPECTED = re.compile(r"(^|\.)(position_ids|rotary_emb\.inv_freq|token_type_ids)$")
_POOLER = re.compile(r"(^|\.)pooler\.")
# Heads of pre-training that a base model does not have.
_PRETRAINING_HEAD = re.compile(
    r"^(cls\.|lm_head\.|embed_out\.|head\.|decoder\.|classifier\.|score\.|vocab_(transform|layer_norm|projector)\.|"
    r"generator_|discriminator_|qa_outputs\.)"
)
_NEXT_SENTENCE = re.compile(r"^cls\.seq_relationship\.")


@dataclass(slots=True)
class LoadedModel:
    """model: the whole model; base: its base model (the same for embedding models). own: of this
    engine's own classes, not of transformers'."""

    model: nn.Module
    base: nn.Module
    config: Any
    notes: tuple[str, ...] = ()
    own: bool = False


def load_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    implementation: str = "transformers",
) -> LoadedModel:
    """The model in eval mode on its device. implementation: the setting. Raises `ModelLoadError`."""
    weights = spec.weights
    pickled = [path for path in weights if path.suffix != ".safetensors"]
    if pickled and not allow_pickle:
        raise ModelLoadError(refused_pickle(pickled[0]))
    own = None
    if implementation == "auto":
        own = load_own(spec, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if own is not None:
        return _finished(spec, *own, device, own=True)
    loaded = _by_transformers(
        spec, dtype, pickled=bool(pickled), trust_remote_code=trust_remote_code
    )
    return _finished(spec, *loaded, device)


def _by_transformers(
    spec: ModelSpec, dtype: torch.dtype, *, pickled: bool, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """The model, and its report of tensors that did not fit."""
    import transformers
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    auto = AutoModelForSequenceClassification if spec.head else AutoModel
    if spec.has_mlm_head:
        auto = AutoModelForMaskedLM
    if is_reward(spec.architecture):
        auto = AutoModel  # the folder's own class, whole
    if spec.family.loads_as is not None:
        name = spec.family.loads_as
        if spec.head:
            name = name.removesuffix("Model") + "ForSequenceClassification"
        auto = getattr(transformers, name)
    try:
        if spec.model_type == NVEMBED:
            return load_nvembed(spec, dtype)
        if spec.model_type == MINICPM:
            return load_layerwise(spec, dtype)
        model, report = auto.from_pretrained(
            str(spec.weights_folder),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=not pickled,
            **_config(spec),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # so that the report names them; refused below
            output_loading_info=True,
        )
    except Exception as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelLoadError(
            f"{spec.transformer}: transformers cannot load it: {type(error).__name__}: {first_line}"
        ) from error
    return model, report


def _finished(
    spec: ModelSpec, model: Any, report: dict[str, Any], device: torch.device, *, own: bool = False
) -> LoadedModel:
    """Tensors accounted for, adapters merged, on its device, ready for a forward without gradients."""
    notes = _check_keys(spec, report)
    if spec.adapter is not None:
        model = merged(model, spec.adapter)
    if spec.task_adapters:
        model = with_task_adapters(model, spec.task_adapters)
    if spec.causal is not None:
        model.config.is_causal = spec.causal
    model.eval().requires_grad_(False)
    model.to(device)
    base = model.base_model if spec.head or spec.has_mlm_head else model
    if not spec.head and getattr(base, "pooler", None) is not None:
        base.pooler = None  # BERT's pooler feeds pre-training heads only; nothing here reads it
    wrap(base, spec.family)
    make_stateless(base)
    return LoadedModel(model=model, base=base, config=model.config, notes=notes, own=own)


def _config(spec: ModelSpec) -> dict[str, Any]:
    """The config of a folder whose own is of no class of transformers."""
    if spec.model_type != NEW:
        return {}
    return {"config": gte_config(spec.config, len(spec.labels) if spec.head else None)}


def _check_keys(spec: ModelSpec, report: dict[str, Any]) -> tuple[str, ...]:
    missing = sorted(report.get("missing_keys", ()))
    unexpected = sorted(report.get("unexpected_keys", ()))
    mismatched = sorted(str(key) for key in report.get("mismatched_keys", ()))
    unexpected = [k for k in unexpected if not _HARMLESS_UNEXPECTED.search(k)]
    dropped: list[str] = []
    if not spec.head:
        missing = [k for k in missing if not _POOLER.search(k)]
        others = _NEXT_SENTENCE if spec.has_mlm_head else _PRETRAINING_HEAD
        dropped = [k for k in unexpected if others.search(k) or _POOLER.search(k)]
        unexpected = [k for k in unexpected if k not in dropped]
    complaints = [
        f"{what}: {', '.join(keys[:8])}{' ...' if len(keys) > 8 else ''}"
        for what, keys in (
            ("missing tensors", missing),
            ("tensors that the model does not have", unexpected),
            ("tensors of another shape", mismatched),
        )
        if keys
    ]
    if complaints:
        raise ModelLoadError(f"{spec.transformer}: the weights do not fit; {'; '.join(complaints)}")
    if spec.label_head is not None:
        dropped = [
            k for k in dropped if not k.startswith(("lm_head.", "embed_out."))
        ]  # read row by row instead
    return (f"{len(dropped)} tensors of a pre-training head were left out",) if dropped else ()

"""Decoder folders: code that comes with them, reward models, flags that change what they compute.

Who calls it: `gpu.folder.read` while it reads a folder; `gpu.forward` for a RoPE that depends on length.
What must stay true: a folder whose own code may compute something else than the transformers class of
the same model type is refused by name unless the operator says what it computes; no torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gpu.faults import ModelLoadError
from gpu.folder.families import Family
from gpu.folder.spec import Overrides

REWARD_SUFFIX = "ForRewardModel"
_HEADS = ("ForSequenceClassification", "ForMaskedLM")
# Encoders whose folders carried the code that transformers took over under the same names.
# What code of a folder is computed here without running it, by model type: see `gpu.folder.families`.
_KNOWN_CODE = {
    "llama_bidirec": ("LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification"),
    "new": ("NewModel", "NewForSequenceClassification"),
}
_UPSTREAMED = frozenset({"nomic_bert", "eurobert"})


def is_reward(architecture: str) -> bool:
    """Whether the architecture is a reward model with a head of its own (`*ForRewardModel`)."""
    return architecture.endswith(REWARD_SUFFIX)


def check_folder_code(
    folder: Path,
    config: Mapping[str, Any],
    family: Family,
    architecture: str,
    said: Overrides,
) -> tuple[str, ...]:
    """Notes about code in the folder that will not run; `ModelLoadError` when it would be missed.

    gte-Qwen2 and its kin ship a copy of their model type's class whose only difference is that
    attention is not causal, and say so in `config.json` (`is_causal`): those run as the plain class.
    """
    if is_reward(architecture) and not said.trust_remote_code:
        raise ModelLoadError(
            f"{folder}: {architecture} exists only as code in the model folder; read that code, then "
            "set `trust_remote_code = true` for this model"
        )
    if family.remote:
        return ("trust_remote_code: Python code of the model folder runs in this process",)
    kind = next((k for k in _HEADS if architecture.endswith(k)), "")
    named = config.get("auto_map") or {}
    suffix = kind if named.get(f"AutoModel{kind}") else ""
    remote = named.get(f"AutoModel{suffix}")
    if said.trust_remote_code or remote is None:
        return ()
    name = str(remote).rsplit(".", 1)[-1]
    if name in _KNOWN_CODE.get(family.model_type, ()):
        return (f"the folder's own {name} is not run; a class of transformers computes the same",)
    plain = family.model_type.replace("_", "") + (suffix or "Model")
    if name.lower() != plain.lower() or not (family.causal or family.model_type in _UPSTREAMED):
        raise ModelLoadError(
            f"{folder}: the folder brings a model class of its own ({name}) for model type "
            f"{family.model_type!r}, which may compute something else than transformers' class; read "
            "that code, then set `trust_remote_code = true`"
        )
    if family.causal and said.causal is None and not isinstance(config.get("is_causal"), bool):
        raise ModelLoadError(
            f"{folder}: the folder brings its own copy of {name} and config.json does not say "
            "`is_causal`; set `causal = true` or `causal = false` for this model, or "
            "`trust_remote_code = true`"
        )
    return (f"the folder's own {name} is not run; transformers' class of that name is",)


def remote_family(
    folder: Path, config: Mapping[str, Any], why: str | None, *, trust_remote_code: bool
) -> Family | None:
    """A row for a model type that only the folder's code knows, when that code is trusted; None: the
    folder has no code for it. why: what is known about the type. Raises `ModelLoadError` when it has and is not trusted.

    Nothing is assumed about it: pooling has to be named, a classification head is refused, and the
    self-check decides whether it can run packed.
    """
    model_type = str(config.get("model_type", ""))
    remote = (config.get("auto_map") or {}).get("AutoModel")
    if remote is None:
        return None
    if not trust_remote_code:
        raise ModelLoadError(
            f"{folder}: model type {model_type!r} is defined by Python code in the model folder "
            f"({remote}); {why + '; or ' if why else ''}read that code, then set `trust_remote_code = true` for this model"
        )
    return Family(model_type, learned_positions=False, head=None, remote=True)


POOLED_AS = {"avg": "mean", "cls": "cls", "last": "last_token"}
"""`pooling` of a bidirectional Llama's config.json -> our word for it."""


def bidirectional_fields(
    config: Mapping[str, Any], family: Family, said: Overrides
) -> tuple[Family, bool | None]:
    """(the row with what the config names of it, whether attention is causal). The temperature is read here because
    transformers drops the key, which generation has too. NVIDIA's class attends
    both ways unless `is_causal` says otherwise, and takes the mean where no pooling is named."""
    if family.head != "score_on_pooled":
        return family, said.causal
    pooling: Any = POOLED_AS.get(str(config.get("pooling", "avg")))
    causal = bool(config.get("is_causal", False)) if said.causal is None else said.causal
    temperature = config.get("temperature")
    temperature = 1.0 if temperature is None else temperature
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or temperature <= 0
    ):
        raise ModelLoadError(f"config.json: temperature = {temperature!r} is not above 0")
    return dataclasses.replace(
        family, default_pooling=pooling, temperature=float(temperature)
    ), causal


def attention_notes(config: Mapping[str, Any], family: Family, causal: bool | None) -> list[str]:
    """One sentence when a decoder attends both ways."""
    flag = config.get("is_causal") if causal is None else causal
    if family.causal and (flag is False or config.get("use_bidirectional_attention") is True):
        return ["attention is bidirectional"]
    return []


RopeKind = Literal["longrope", "dynamic"]


def length_dependent(config: Mapping[str, Any]) -> tuple[RopeKind, int] | None:
    """RoPE that depends on the longest item of a call: its kind, and the length up to which all items
    share frequencies; None: an ordinary one.

    config: `config.json`. "longrope" switches to other factors right behind the length that the model
    was pre-trained for; "dynamic" changes with every length past it.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = entry.get("rope_type") or entry.get("type")
        if kind == "longrope" or kind == "dynamic":
            trained = entry.get("original_max_position_embeddings")
            if trained is None:
                trained = config.get("original_max_position_embeddings")
            if trained is None:
                trained = config.get("max_position_embeddings")
            return kind, int(trained or 0)
    return None


def rope_limit(config: Mapping[str, Any]) -> int | None:
    """Tokens that "dynamic" RoPE stretches the trained length to; None: as the config says."""
    switch = length_dependent(config)
    if switch is None or switch[0] != "dynamic":
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return int(switch[1] * float(rope.get("factor") or 1.0))

"""Reads a model folder and says what the model is: tasks, pooling, limits, prompts, labels.

Who calls it: `gpu.loader` before anything heavy is imported; `embedstream check` and `models`.
What must stay true: JSON and hashes only (no torch, no transformers); nothing about a model is
guessed: what the folder does not say and no setting says is an error that names the setting; a
local folder never causes a connection attempt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from schemas.requests import Task

from .batch import Pooling
from .families import FAMILIES, Family, position_offset
from .faults import ModelLoadError as ModelLoadError  # callers know it under this address
from .fingerprint import fingerprint_of, weight_files
from .modules import POOLINGS, DenseSpec, Modules, pooling_name, read_json, read_modules

_UNLIMITED = 1_000_000_000  # tokenizers write 1e30 for "no limit"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a folder says. Paths are local; sizes in tokens or in elements.

    folder: the model folder; transformer: where config.json and the weights are (may be the same).
    head: the model has a `*ForSequenceClassification` head.
    score_activation / label_activation: "sigmoid", "softmax" or "identity", applied once, by us.
    allowed_dimensions: sizes a vector may be cut to, ascending; None: only the native one.
    """

    folder: Path
    transformer: Path
    architecture: str
    model_type: str
    family: Family
    config: Mapping[str, Any]
    tasks: frozenset[Task]
    head: bool
    max_tokens: int
    position_offset: int
    fingerprint: str
    dimensions: int | None = None
    pooling: Pooling | None = None
    include_prompt: bool = True
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    allowed_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    score_activation: str = "identity"
    label_activation: str = "identity"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> list[Path]:
        """Weight files of the transformer, safetensors first."""
        return weight_files(self.transformer)


def resolve_folder(path: str, *, offline: bool = True, revision: str | None = None) -> Path:
    """The local folder for a path or a hub id.

    A folder that exists is used as it is, without any connection. Anything else is a hub id, looked
    up in the local hub cache, and downloaded only when `offline` is False.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"models path {path}: it is a file; name the folder that holds it")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelLoadError(f"models path {path}: no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*/config.json", "*/*.safetensors"]
    try:
        return Path(
            snapshot_download(
                path, revision=revision, local_files_only=offline, allow_patterns=patterns
            )
        )
    except Exception as error:
        how = (
            "it is not in the local hub cache and the service is offline; "
            "give a folder, or set `offline = false`"
            if offline
            else f"the hub did not give it ({type(error).__name__}); give a local folder"
        )
        raise ModelLoadError(f"models path {path}: no such folder, and {how}") from error


def load_spec(
    folder: str | Path,
    *,
    pooling: str | None = None,
    max_tokens: int | None = None,
    matryoshka_dimensions: tuple[int, ...] | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
) -> ModelSpec:
    """Read a Sentence-Transformers or plain transformers folder.

    The keyword arguments override what the folder says. Raises `ModelLoadError` for a folder that
    is incomplete, a model type without a row in `gpu.families`, an unknown module or pooling.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    modules = read_modules(folder)
    transformer = modules.transformer
    config = read_json(transformer / "config.json", required=True)
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    architecture = str((config.get("architectures") or [""])[0])
    if family is None:
        raise ModelLoadError(
            f"{folder}: model type {model_type!r} ({architecture or 'no architecture named'}) is not "
            f"supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    if not weight_files(transformer):
        raise ModelLoadError(f"{transformer}: no weights (model.safetensors) in the folder")
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": transformer,
        "architecture": architecture,
        "model_type": model_type,
        "family": family,
        "config": config,
        "position_offset": position_offset(family, config.get("pad_token_id")),
        "max_tokens": _max_tokens(folder, transformer, config, family, max_tokens),
    }
    st_config = read_json(folder / "config_sentence_transformers.json")
    common |= _prompts(folder, st_config, prompts, default_prompt_name)
    if architecture.endswith("ForSequenceClassification") and not modules.pooling:
        if common["default_prompt_name"] is not None:
            raise ModelLoadError(
                f"{folder}: default_prompt_name {common['default_prompt_name']!r} on a model with a "
                "score head is not supported"
            )
        answer = _head_fields(folder, family, config, st_config)
    else:
        answer = _embed_fields(folder, family, config, modules, pooling, matryoshka_dimensions)
    answer["fingerprint"] = fingerprint_of(
        transformer, dense=[d.folder for d in answer.get("dense", ())], meaning=common | answer
    )
    return ModelSpec(**common, **answer)


def _embed_fields(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    modules: Modules,
    pooling: str | None,
    matryoshka: tuple[int, ...] | None,
) -> dict[str, Any]:
    notes: list[str] = []
    if pooling is not None and pooling not in POOLINGS:
        raise ModelLoadError(f"pooling = {pooling!r} is not one of cls, mean, last_token")
    architecture = str((config.get("architectures") or [""])[0])
    if modules.pooling is None and not modules.described and "For" in architecture:
        raise ModelLoadError(
            f"{folder}: {architecture} without modules.json has no known task; supported are "
            "*ForSequenceClassification, base models, and Sentence-Transformers folders"
        )
    if pooling is not None:
        chosen = POOLINGS[pooling]
    elif modules.pooling is not None:
        chosen = pooling_name(folder, modules.pooling)
    elif family.default_pooling is not None:
        chosen = family.default_pooling
        notes.append(f"the folder names no pooling; {chosen} is this family's")
    else:
        raise ModelLoadError(
            f"{folder}: the folder names no pooling (no modules.json with a Pooling module); "
            'set `pooling = "cls"`, `"mean"` or `"last_token"` for this model'
        )
    native = int(modules.dense[-1].out_features if modules.dense else _hidden_size(config))
    return {
        "tasks": frozenset({"embed"}),
        "head": False,
        "pooling": chosen,
        "include_prompt": bool((modules.pooling or {}).get("include_prompt", True)),
        "dense": modules.dense,
        "normalize": modules.normalize,
        "dimensions": native,
        "allowed_dimensions": _allowed_dimensions(config, native, matryoshka),
        "notes": tuple(notes),
    }


def _hidden_size(config: Mapping[str, Any]) -> int:
    for key in ("hidden_size", "dim", "d_model", "n_embd"):
        if key in config:
            return int(config[key])
    raise ModelLoadError("config.json names no hidden_size")


def _allowed_dimensions(
    config: Mapping[str, Any], native: int, override: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    named = override if override is not None else config.get("matryoshka_dimensions")
    if named:
        bad = [d for d in named if not 0 < int(d) <= native]
        if bad:
            raise ModelLoadError(
                f"matryoshka_dimensions {bad} are outside 1 to {native}, the model's vector size"
            )
        return tuple(sorted({*map(int, named), native}))
    if config.get("is_matryoshka"):
        return tuple(range(1, native + 1))
    return None


def _head_fields(
    folder: Path, family: Family, config: Mapping[str, Any], st_config: Mapping[str, Any]
) -> dict[str, Any]:
    if family.head is None:
        raise ModelLoadError(f"{folder}: no head recipe for model type {family.model_type}")
    id2label = {int(k): str(v) for k, v in (config.get("id2label") or {}).items()}
    n_labels = len(id2label) or int(config.get("num_labels", 2))
    labels = tuple(id2label.get(i, f"LABEL_{i}") for i in range(n_labels))
    if len(set(labels)) != len(labels):
        raise ModelLoadError(f"{folder}: id2label names a label twice; results are keyed by label")
    named = _named_activation(folder, config, st_config)
    tasks: set[Task] = {"classify"}
    if n_labels == 1:
        tasks |= {"rerank", "score"}
    return {
        "tasks": frozenset(tasks),
        "head": True,
        "labels": labels,
        # CrossEncoder's rule: Sigmoid for one label when the folder names nothing.
        "score_activation": named or ("sigmoid" if n_labels == 1 else "identity"),
        "label_activation": named or _label_activation(config, n_labels),
    }


def _named_activation(
    folder: Path, config: Mapping[str, Any], st_config: Mapping[str, Any]
) -> str | None:
    """The activation that the folder names, or None. Unknown ones are refused."""
    path = (
        (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or st_config.get("activation_fn")
    )
    if path is None:
        return None
    name = str(path).rsplit(".", 1)[-1].lower()
    if name not in ("sigmoid", "identity", "softmax") or not str(path).startswith("torch."):
        raise ModelLoadError(
            f"{folder}: score activation {path!r} is not supported; supported are Sigmoid, "
            "Identity, Softmax"
        )
    return name


def _label_activation(config: Mapping[str, Any], n_labels: int) -> str:
    """transformers' text-classification pipeline rule."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification" or n_labels == 1:
        return "sigmoid"
    return "softmax"


def _prompts(
    folder: Path,
    st_config: Mapping[str, Any],
    override: Mapping[str, str] | None,
    default_override: str | None,
) -> dict[str, Any]:
    read = {**(st_config.get("prompts") or {}), **(override or {})}
    prompts = {str(k): str(v) for k, v in read.items() if v is not None}
    default = default_override or st_config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{folder}: default_prompt_name {default!r} is not among the prompts: "
            f"{', '.join(sorted(prompts)) or 'there are none'}"
        )
    return {"prompts": prompts, "default_prompt_name": cast("str | None", default)}


def _max_tokens(
    folder: Path,
    transformer: Path,
    config: Mapping[str, Any],
    family: Family,
    override: int | None,
) -> int:
    """Smallest of what the folder's files allow, special tokens included.

    RoBERTa-like `max_position_embeddings` counts `pad_token_id + 1` places that hold no token.
    """
    limits: list[int] = []
    positions = config.get("max_position_embeddings")
    if positions is not None and int(positions) > 0:
        limits.append(int(positions) - position_offset(family, config.get("pad_token_id")))
    ceiling = limits[0] if limits and family.learned_positions else None
    rope_ceiling = _rope_ceiling(config)
    if rope_ceiling is not None:
        limits.append(rope_ceiling)
        ceiling = min(rope_ceiling, ceiling or rope_ceiling)
    for file, key in (
        (folder / "sentence_bert_config.json", "max_seq_length"),
        (transformer / "sentence_bert_config.json", "max_seq_length"),
        (transformer / "tokenizer_config.json", "model_max_length"),
    ):
        value = read_json(file).get(key)
        if isinstance(value, int | float) and 0 < value < _UNLIMITED:
            limits.append(int(value))
    if override is not None:
        if override < 1 or (ceiling is not None and override > ceiling):
            raise ModelLoadError(
                f"max_tokens = {override}: the model takes 1 to {ceiling or 'any'}"
            )
        return override
    if not limits:
        raise ModelLoadError(
            f"{folder}: no file limits the length; set `max_tokens` for this model"
        )
    return min(limits)


def _rope_ceiling(config: Mapping[str, Any]) -> int | None:
    """Longest item for which the RoPE does not depend on what else is in the pack, or None.

    "dynamic" and "longrope" choose their frequencies by the longest position of the whole call, but
    only past the length that the model was trained for; up to it they are ordinary.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    entries = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    for entry in entries:
        if (entry.get("rope_type") or entry.get("type")) in ("dynamic", "longrope"):
            trained = entry.get("original_max_position_embeddings") or config.get(
                "original_max_position_embeddings", config.get("max_position_embeddings")
            )
            return None if trained is None else int(trained)
    return None

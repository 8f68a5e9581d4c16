"""Reads a model folder and says what the model is: tasks, pooling, limits, prompts, labels.

Who calls it: `gpu.load` before anything heavy is imported; `embedstream check` and `models`.
What must stay true: JSON and hashes only (no torch, no transformers); nothing about a model is
guessed: what the folder does not say and no setting says is an error that names the setting; a
local folder never causes a connection attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.decoders import (
    attention_notes,
    check_folder_code,
    is_reward,
    remote_family,
    rope_limit,
)
from gpu.folder.embedder import embed_fields, read_prompts
from gpu.folder.families import FAMILIES, Family, position_offset
from gpu.folder.fingerprint import fingerprint_of, weight_files
from gpu.folder.modules import read_json, read_modules
from gpu.folder.nvembed import read_nvembed
from gpu.folder.prompts import LabelHead
from gpu.folder.rerankers import declared_prompt, is_scorer, label_head
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.static import read_static
from gpu.folder.vision import read_vision
from schemas.requests import Task

_UNLIMITED = 1_000_000_000  # tokenizers write 1e30 for "no limit"
_OTHER_SHAPES = (read_static, read_nvembed, read_vision)


def load_spec(folder: str | Path, **overrides: Any) -> ModelSpec:
    """Read a Sentence-Transformers or plain transformers folder.

    overrides: fields of `Overrides`. Raises `ModelLoadError` for a folder that is incomplete, a model
    type without a row in `gpu.folder.families`, an unknown module or pooling.
    """
    folder, said = Path(folder), Overrides(**overrides)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    for read in _OTHER_SHAPES:
        if (found := read(folder, said)) is not None:
            return found
    return _read_text(folder, said)


def _read_text(folder: Path, said: Overrides) -> ModelSpec:
    """A text model with a transformer: embedder, scorer, or a language model read as one."""
    modules = read_modules(folder)
    transformer = modules.transformer
    config = read_json(transformer / "config.json", required=True)
    architecture = str((config.get("architectures") or [""])[0])
    family = _family(folder, config, architecture, said)
    if not weight_files(transformer):
        raise ModelLoadError(f"{transformer}: no weights (model.safetensors) in the folder")
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": transformer,
        "architecture": architecture,
        "model_type": family.model_type,
        "family": family,
        "config": config,
        "position_offset": position_offset(family, config.get("pad_token_id")),
        "max_tokens": _max_tokens(folder, transformer, config, family, said.max_tokens),
        "causal": said.causal,
    }
    notes = check_folder_code(folder, config, family, architecture, said)
    st_config = read_json(folder / "config_sentence_transformers.json")
    common |= read_prompts(folder, st_config, said)
    if modules.pooling is None:
        common["pairs"] = declared_prompt(folder, transformer, said.rerank_template)
        common["label_head"] = label_head(
            folder,
            modules.logit_score,
            said.rerank_template,
            said.label_tokens,
            architecture=architecture,
        )
    elif said.rerank_template or said.label_tokens:
        raise ModelLoadError(
            f"{folder}: rerank_template and label_tokens are for scorers, and this folder pools"
        )
    if common.get("pairs") is not None:
        common["default_prompt_name"] = None  # it is the prompt's instruction
        if not family.causal:
            raise ModelLoadError(
                f"{folder}: a rerank prompt is for decoders; {family.model_type} reads a pair as its "
                "tokenizer joins it"
            )
    if common.get("label_head") is not None:
        answer = _label_fields(folder, family, config, st_config, common["label_head"])
    elif (is_scorer(architecture) or is_reward(architecture)) and not modules.pooling:
        if common["default_prompt_name"] is not None:
            raise ModelLoadError(
                f"{folder}: default_prompt_name {common['default_prompt_name']!r} on a model with a "
                "score head is not supported"
            )
        answer = _head_fields(folder, family, config, st_config)
    else:
        answer = embed_fields(folder, family, config, modules, said)
    answer["notes"] = (
        *answer.get("notes", ()), *notes, *attention_notes(config, family, said.causal)
    )  # fmt: skip
    answer["fingerprint"] = fingerprint_of(
        transformer, dense=[d.folder for d in answer.get("dense", ())], meaning=common | answer
    )
    return ModelSpec(**common, **answer)


def _family(folder: Path, config: Mapping[str, Any], architecture: str, said: Overrides) -> Family:
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        family = remote_family(folder, config, trust_remote_code=said.trust_remote_code)
    if family is None:
        raise ModelLoadError(
            f"{folder}: model type {model_type!r} ({architecture or 'no architecture named'}) is not "
            f"supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return family


def _label_fields(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    st_config: Mapping[str, Any],
    head: LabelHead,
) -> dict[str, Any]:
    """A causal language model that is read off at a few vocabulary tokens."""
    if not family.causal:
        raise ModelLoadError(f"{folder}: {family.model_type} is no causal language model")
    named = _named_activation(folder, config, st_config)
    n_scores = 1 if head.difference else len(head.tokens)
    tasks: set[Task] = {"classify"} if n_scores > 1 else {"rerank", "score"}
    return {
        "tasks": frozenset(tasks),
        "head": False,
        "labels": tuple(map(str, head.tokens)) if n_scores > 1 else (),
        "score_activation": named or "sigmoid",
        "label_activation": named or "softmax",
    }


def _head_fields(
    folder: Path, family: Family, config: Mapping[str, Any], st_config: Mapping[str, Any]
) -> dict[str, Any]:
    if family.head is None:
        raise ModelLoadError(f"{folder}: no head recipe for model type {family.model_type}")
    id2label = {int(k): str(v) for k, v in (config.get("id2label") or {}).items()}
    n_labels = len(id2label) or int(config.get("num_labels", 2))
    if is_reward(str((config.get("architectures") or [""])[0])):
        id2label, n_labels = {0: "reward"}, 1
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
    """transformers' text-classification pipeline rule; a reward is a number as it comes."""
    if is_reward(str((config.get("architectures") or [""])[0])):
        return "identity"
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification" or n_labels == 1:
        return "sigmoid"
    return "softmax"


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
    stretched = rope_limit(config)
    if stretched is not None:
        limits = [stretched]
    for file, key in (
        (folder / "sentence_bert_config.json", "max_seq_length"),
        (transformer / "sentence_bert_config.json", "max_seq_length"),
        (transformer / "sentence_bert_config.json", "document_length"),  # ColBERT's own limit
        (folder / "config_sentence_transformers.json", "document_length"),
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

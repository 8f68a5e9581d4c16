"""Reads a model folder and says what the model is: tasks, pooling, limits, prompts, labels.

Who calls it: `gpu.load` before anything heavy is imported; `embedstream check` and `models`.
What must stay true: JSON and hashes only (no torch, no transformers); nothing about a model is
guessed: what the folder does not say and no setting says is an error that names the setting; a
local folder never causes a connection attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.adapter import read_adapter, task_fields, task_notes, tokenizer_folder
from gpu.folder.chat import read_chat
from gpu.folder.config_keys import READ_BY_TYPE
from gpu.folder.decoders import (
    attention_notes,
    bidirectional_fields,
    check_folder_code,
    is_reward,
    remote_family,
)
from gpu.folder.embedder import embed_fields, read_prompts
from gpu.folder.families import FAMILIES, Family, position_offset
from gpu.folder.fingerprint import fingerprint_of
from gpu.folder.keys import KeyReader
from gpu.folder.layerwise import MINICPM, read_layerwise
from gpu.folder.limits import max_tokens
from gpu.folder.modules import read_modules
from gpu.folder.nvembed import read_nvembed
from gpu.folder.odd import NOT_HERE, no_weights, odd_architecture, refuse_odd
from gpu.folder.outputs import has_sides, side_fields
from gpu.folder.prompts import LabelHead
from gpu.folder.rerankers import (
    JOINED,
    NO_LABELS,
    chat_template_of,
    declared_prompt,
    is_scorer,
    label_head,
)
from gpu.folder.sentence_bert import Calls, check_shared_files, read_calls
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.static import read_static
from gpu.folder.stored import check_files, read_json, weight_files
from gpu.folder.type_rows import FOLDER_CONFIG
from gpu.folder.vision import read_vision
from schemas.requests import Task

DENSE = "SentenceTransformer"
_OTHER_SHAPES = (read_static, read_nvembed, read_layerwise, read_vision)


def load_spec(folder: str | Path, **overrides: Any) -> ModelSpec:
    """Read a Sentence-Transformers or plain transformers folder.

    overrides: fields of `Overrides`. Raises `ModelLoadError` for a folder that is incomplete, a model
    type without a row in `gpu.folder.families`, an unknown module or pooling.
    """
    folder, said = Path(folder), Overrides(**overrides)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    refuse_odd(folder)
    for read in _OTHER_SHAPES:
        if (found := read(folder, said)) is not None:
            break
    else:
        found = _read_text(folder, said)
    if said.cutoff_layer is not None and found.model_type != MINICPM:
        raise ModelLoadError(f"{folder}: cutoff_layer is for layerwise rerankers")
    return found


def _read_text(folder: Path, said: Overrides) -> ModelSpec:
    """A text model with a transformer: embedder, scorer, or a language model read as one."""
    keys = KeyReader(folder, said.ignore_keys)
    modules = read_modules(folder, keys)
    adapter = read_adapter(modules.transformer, keys, offline=said.offline)
    transformer = tokenizer_folder(modules.transformer, adapter)
    weights = transformer if adapter is None else adapter.base
    config = read_json(weights / "config.json", required=True)
    architecture = str((config.get("architectures") or [""])[0])
    if odd := odd_architecture(folder, architecture):
        raise ModelLoadError(odd)
    family, causal = bidirectional_fields(config, _family(folder, config, architecture, said), said)
    if not weight_files(weights):
        raise ModelLoadError(no_weights(weights))
    check_files(weights)
    read = ("max_active_dims",) if modules.latent is not None else ()
    calls = _check_keys(folder, transformer, weights, config, family, keys, read)
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": transformer,
        "architecture": architecture,
        "model_type": family.model_type,
        "family": family,
        "config": config,
        "position_offset": position_offset(family, config.get("pad_token_id")),
        "max_tokens": max_tokens(
            folder, transformer, config, family, named=calls.limit, override=said.max_tokens
        ),
        "calls": calls,
        "causal": causal,
        "adapter": adapter,
        "chat": read_chat(folder, transformer, pools=modules.pooling is not None),
    }
    notes = check_folder_code(folder, config, family, architecture, said)
    st_config = read_json(folder / "config_sentence_transformers.json")
    common |= read_prompts(folder, st_config, said)
    if modules.pooling is None:
        scores = is_scorer(architecture) and family.causal
        common["pairs"] = declared_prompt(
            folder,
            transformer,
            said.rerank_template,
            scoring_decoder=scores and not modules.described,
        )
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
        answer = _label_fields(
            folder,
            family,
            config,
            st_config,
            common["label_head"],
            pairs=common["pairs"] is not None,
        )
    elif (is_scorer(architecture) or is_reward(architecture)) and not modules.pooling:
        if common["default_prompt_name"] is not None:
            raise ModelLoadError(
                f"{folder}: default_prompt_name {common['default_prompt_name']!r} on a model with a "
                "score head is not supported"
            )
        answer = _head_fields(folder, family, config, st_config)
        if family.causal and common["pairs"] is None:
            if "rerank" in answer["tasks"]:
                notes = (*notes, JOINED)
            answer["conversation"] = chat_template_of(transformer)
            if answer["conversation"] is not None:  # a reward, also where nobody named it
                answer["tasks"] |= {"classify"}
    else:
        answer = embed_fields(folder, family, config, modules, said)
        if family.task_adapters:
            common |= task_fields(transformer, common["prompts"], keys)
            notes = (*notes, *task_notes(common["task_adapters"]))
        parts = answer["sparse"], answer["multivector"]
        kind = st_config.get("model_type")
        if modules.pooling is not None and parts == (None, None) and kind not in (None, DENSE):
            raise ModelLoadError(
                f"{folder / 'config_sentence_transformers.json'}: model_type = {kind!r}, and modules.json lists "
                f"those of a {DENSE}; correct the one that is wrong"
            )
        if has_sides(*parts, dense=answer.get("pooling") is not None):
            common |= side_fields(folder, common, answer["multivector"])
    answer["notes"] = (
        *answer.get("notes", ()), *notes, *attention_notes(config, family, causal)
    )  # fmt: skip
    if adapter is not None:
        if common.get("label_head") is not None:
            raise ModelLoadError(
                f"{folder}: label tokens are read off the base model's weights; merge the adapter first"
            )
        answer["notes"] = (*answer["notes"], f"an adapter is merged into {adapter.base.name}")
    answer["fingerprint"] = fingerprint_of(
        weights,
        dense=answer.get("dense", ()),
        meaning=common | answer,
        config=keys.meaning(head=answer["head"]),
    )
    return ModelSpec(**common, **answer, honoured=keys.honoured)


def _check_keys(
    folder: Path,
    transformer: Path,
    weights: Path,
    config: Mapping[str, Any],
    family: Family,
    keys: KeyReader,
    read: Collection[str],
) -> Calls:
    """Every key of the files that say how texts become ids and ids become states."""
    if not family.remote and family.model_type in {*READ_BY_TYPE, *FOLDER_CONFIG}:
        keys.check_config(weights / "config.json", config, family.model_type)
    check_shared_files(folder, transformer, keys, read=read)
    if not isinstance(config.get("vocab_size"), int):
        raise ModelLoadError(
            f"{weights / 'config.json'}: vocab_size = {config.get('vocab_size')!r} is no number; "
            "it bounds the token ids that a request may send"
        )
    return read_calls(folder, transformer, keys)


def _family(folder: Path, config: Mapping[str, Any], architecture: str, said: Overrides) -> Family:
    model_type = str(config.get("model_type", ""))
    why = NOT_HERE.get(model_type)
    family = FAMILIES.get(model_type) if why is None else None
    if family is None:
        family = remote_family(folder, config, why, trust_remote_code=said.trust_remote_code)
    if family is None:
        raise ModelLoadError(
            f"{folder}: model type {model_type!r} ({architecture or 'no architecture named'}) is not "
            f"supported; {why + '; ' if why else ''}supported are {', '.join(sorted(FAMILIES))}"
        )
    return family


def _label_fields(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    st_config: Mapping[str, Any],
    head: LabelHead,
    *,
    pairs: bool,
) -> dict[str, Any]:
    """A causal language model that is read off at a few vocabulary tokens. pairs: after a pair's prompt."""
    if not family.causal:
        raise ModelLoadError(f"{folder}: {family.model_type} is no causal language model")
    named = _named_activation(folder, config, st_config)
    n_scores = 1 if head.difference else len(head.tokens)
    tasks: set[Task] = {"score"} if pairs else {"classify"}
    if n_scores == 1:
        tasks = {"rerank", "score"}
    notes = () if head.tokens else (NO_LABELS,)
    return {
        "tasks": frozenset(tasks),
        "head": False,
        "labels": tuple(map(str, head.tokens)) if n_scores > 1 else (),
        "score_activation": named or ("sigmoid" if n_scores == 1 else "softmax"),
        "label_activation": named or "softmax",
        "notes": notes,
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
    tasks: set[Task] = {"rerank", "score"} if n_labels == 1 else {"classify"}
    if labels != ("LABEL_0",):  # what transformers writes where nobody named the one score
        tasks.add("classify")
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

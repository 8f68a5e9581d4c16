"""Reads a model folder and says what the model is: tasks, pooling, limits, prompts, labels.

Who calls it: `gpu.load` before anything heavy is imported; `embedstream check` and `models`.
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

from gpu.batch import Pooling
from gpu.faults import ModelLoadError as ModelLoadError  # callers know it under this address
from gpu.folder.decoders import (
    attention_notes,
    check_folder_code,
    is_reward,
    remote_family,
    rope_limit,
)
from gpu.folder.embedder import allowed_dimensions as allowed_dimensions  # for other readers
from gpu.folder.embedder import embed_fields
from gpu.folder.families import FAMILIES, Family, position_offset
from gpu.folder.fingerprint import fingerprint_of, weight_files
from gpu.folder.modules import DenseSpec, read_json, read_modules
from gpu.folder.outputs import (
    OUTPUTS,
    SparseSpec,
    SpladeSpec,
    TokenVectorSpec,
    prefixed_prompts,
)
from gpu.folder.prompts import LabelHead, PairPrompt
from gpu.folder.rerankers import declared_prompt, is_scorer, label_head
from schemas.requests import Output, Task

_UNLIMITED = 1_000_000_000  # tokenizers write 1e30 for "no limit"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a folder says. Paths are local; sizes in tokens or in elements.

    folder: the model folder; transformer: where config.json and the weights are (may be the same).
    head: the model has a `*ForSequenceClassification` head.
    score_activation / label_activation: "sigmoid", "softmax" or "identity", applied once, by us.
    allowed_dimensions: sizes a vector may be cut to, ascending; None: only the native one.
    dimensions, pooling: of the dense vector; None: the model has none. sparse, multivector: the other
    outputs, computed from the same forward.
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
    pairs: PairPrompt | None = None
    label_head: LabelHead | None = None
    causal: bool | None = None
    notes: tuple[str, ...] = ()
    sparse: SparseSpec | None = None
    multivector: TokenVectorSpec | None = None

    @property
    def has_mlm_head(self) -> bool:
        """The model is a `*ForMaskedLM` whose logits are read (SPLADE)."""
        return isinstance(self.sparse, SpladeSpec)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What it can give for one text, in the order in which one of them is the default."""
        there = (self.dimensions, self.sparse, self.multivector)
        return tuple(o for o, value in zip(OUTPUTS, there, strict=True) if value is not None)

    @property
    def skipped_pad(self) -> int | None:
        """See `gpu.pooler.segments_of`."""
        last = self.head and self.family.head == "score_on_last"
        return self.config.get("pad_token_id") if last else None

    @property
    def weights(self) -> list[Path]:
        """Weight files of the transformer, safetensors first."""
        return weight_files(self.transformer)


def resolve_folder(
    path: str,
    *,
    offline: bool = True,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """The local folder for a path or a hub id.

    A folder that exists is used as it is, without any connection. Anything else is a hub id, looked
    up in the local hub cache, and downloaded only when `offline` is False. Pickled weights and code
    are fetched only when they may be used.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"models path {path}: it is a file; name the folder that holds it")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelLoadError(f"models path {path}: no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*_linear.pt"]  # * also matches /
    patterns += ["*.bin"] if allow_pickle else []
    patterns += ["*.py"] if trust_remote_code else []
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
    rerank_template: str | None = None,
    label_tokens: tuple[str, ...] | None = None,
    causal: bool | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Read a Sentence-Transformers or plain transformers folder.

    The keyword arguments override what the folder says. Raises `ModelLoadError` for a folder that
    is incomplete, a model type without a row in `gpu.folder.families`, an unknown module or pooling.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    from gpu.folder.static import load_static_spec, static_kind  # it builds on this module

    if static_kind(folder) is not None:
        return load_static_spec(
            folder,
            pooling=pooling,
            max_tokens=max_tokens,
            matryoshka_dimensions=matryoshka_dimensions,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
        )
    from gpu.folder.nvembed import is_nvembed, load_latent_spec
    from gpu.folder.vision import load_vision_spec, vision_family

    if is_nvembed(folder):
        return load_latent_spec(
            folder,
            trust_remote_code=trust_remote_code,
            pooling=pooling,
            max_tokens=max_tokens,
            matryoshka_dimensions=matryoshka_dimensions,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
        )
    if (found := vision_family(folder)) is not None:
        return load_vision_spec(
            folder,
            *found,
            pooling=pooling,
            max_tokens=max_tokens,
            matryoshka_dimensions=matryoshka_dimensions,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            causal=causal,
        )
    modules = read_modules(folder)
    transformer = modules.transformer
    config = read_json(transformer / "config.json", required=True)
    model_type = str(config.get("model_type", ""))
    family = FAMILIES.get(model_type)
    architecture = str((config.get("architectures") or [""])[0])
    if family is None:
        family = remote_family(folder, config, trust_remote_code=trust_remote_code)
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
        "causal": causal,
    }
    notes = check_folder_code(
        folder, config, family, architecture, trust_remote_code=trust_remote_code, causal=causal
    )
    st_config = read_json(folder / "config_sentence_transformers.json")
    common |= read_prompts(folder, st_config, prompts, default_prompt_name)
    if modules.pooling is None:
        common["pairs"] = declared_prompt(folder, transformer, rerank_template)
        common["label_head"] = label_head(
            folder, modules.logit_score, rerank_template, label_tokens, architecture=architecture
        )
    elif rerank_template or label_tokens:
        raise ModelLoadError(
            f"{folder}: rerank_template and label_tokens are for scorers, and this folder pools"
        )
    if common.get("pairs") is not None:
        common["default_prompt_name"] = None  # it is the prompt's instruction
        if not family.causal:
            raise ModelLoadError(
                f"{folder}: a rerank prompt is for decoders; {model_type} reads a pair as its tokenizer "
                "joins it"
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
        answer = embed_fields(folder, family, config, modules, pooling, matryoshka_dimensions)
    answer["notes"] = (
        *answer.get("notes", ()), *notes, *attention_notes(config, family, causal)
    )  # fmt: skip
    answer["fingerprint"] = fingerprint_of(
        transformer, dense=[d.folder for d in answer.get("dense", ())], meaning=common | answer
    )
    return ModelSpec(**common, **answer)


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


def read_prompts(
    folder: Path,
    st_config: Mapping[str, Any],
    override: Mapping[str, str] | None,
    default_override: str | None,
) -> dict[str, Any]:
    read = {**prefixed_prompts(st_config), **(override or {})}
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

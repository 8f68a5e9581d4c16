"""What a folder says about its vectors: outputs, pooling, Dense modules, sizes, prompts.

Who calls it: `gpu.folder.read` for folders that embed; the other readers for sizes and prompts.
What must stay true: JSON only; a pooling or a size is read or set, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.families import Family
from gpu.folder.latent import latent_spec
from gpu.folder.modules import POOLINGS, Modules, pooling_names
from gpu.folder.outputs import extra_outputs, prefixed_prompts
from gpu.folder.spec import Overrides
from gpu.folder.stored import read_json
from schemas.requests import Task


def embed_fields(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    modules: Modules,
    said: Overrides,
) -> dict[str, Any]:
    """Fields of the `ModelSpec`. Raises `ModelLoadError` for what would have to be guessed."""
    pooling = said.pooling
    extra = extra_outputs(
        folder,
        config,
        modules,
        pooling,
        has_mlm_head=family.mlm is not None,
        hidden_size=hidden_size(config),
    )
    notes = list(extra.notes)
    if not extra.dense:
        token_size = extra.multivector.dimensions if extra.multivector else None
        late: set[Task] = {"rerank", "score"} if extra.multivector else set()
        return {
            "tasks": frozenset({"embed", *late}),
            "head": False,
            "normalize": modules.normalize,
            "allowed_dimensions": token_size and allowed_dimensions(config, token_size, said),
            "sparse": extra.sparse,
            "multivector": extra.multivector,
            "notes": extra.notes,
        }
    pooling = extra.pooling if pooling is None and modules.pooling is None else pooling
    if pooling is not None and pooling not in POOLINGS:
        known = ", ".join(dict.fromkeys(POOLINGS.values()))
        raise ModelLoadError(f"pooling = {pooling!r} is not one of {known}")
    architecture = str((config.get("architectures") or [""])[0])
    named = modules.described or pooling is not None
    if modules.pooling is None and not named and "For" in architecture:
        if architecture.endswith("ForMaskedLM"):
            raise ModelLoadError(
                f"{folder}: {architecture} without modules.json says nothing about its vectors: for a "
                'SPLADE model set `pooling = "splade"`; for hidden states `"cls"` or `"mean"`'
            )
        raise ModelLoadError(
            f"{folder}: {architecture} without modules.json has no known task; supported are "
            "*ForSequenceClassification, base models, and Sentence-Transformers folders; for a "
            'language model that reranks set `rerank_template = "qwen3"`, `"bge-gemma"` or a template'
        )
    if pooling is not None:
        chosen: tuple[str, ...] = (POOLINGS[pooling],)
    elif modules.pooling is not None:
        chosen = pooling_names(folder, modules.pooling)
    elif family.default_pooling is not None:
        chosen = (family.default_pooling,)
        notes.append(f"the folder names no pooling; {chosen[0]} is this family's")
    else:
        raise ModelLoadError(
            f"{folder}: the folder names no pooling (no modules.json with a Pooling module); "
            'set `pooling = "cls"`, `"mean"` or `"last_token"` for this model'
        )
    native = _vector_size(modules, hidden_size(config), len(chosen))
    if modules.latent is not None:
        return _latent_fields(folder, modules, said, "+".join(chosen), native)
    return {
        "tasks": frozenset({"embed"}),
        "head": False,
        "pooling": "+".join(chosen),
        "include_prompt": bool((modules.pooling or {}).get("include_prompt", True)),
        "dense": modules.dense,
        "normalize": modules.normalize or extra.normalize,
        "sparse": extra.sparse,
        "multivector": extra.multivector,
        "dimensions": native,
        "allowed_dimensions": allowed_dimensions(config, native, said),
        "notes": tuple(notes),
    }


def _latent_fields(
    folder: Path, modules: Modules, said: Overrides, pooling: str, width: int
) -> dict[str, Any]:
    """A folder whose vector goes through a sparse autoencoder: its library gives the latents alone."""
    for name in ("pooling", "matryoshka_dimensions"):
        if getattr(said, name) is not None:
            raise ModelLoadError(f"{folder}: {name} is not for a model with a SparseAutoEncoder")
    st_config = read_json(folder / "config_sentence_transformers.json")
    assert modules.latent is not None
    latent = latent_spec(
        modules.latent, st_config, pooling=pooling, normalize=modules.normalize, width=width
    )
    return {
        "tasks": frozenset({"embed"}),
        "head": False,
        "include_prompt": bool((modules.pooling or {}).get("include_prompt", True)),
        "dense": modules.dense,
        "sparse": latent,
        "multivector": None,
        "notes": (f"sparse weights are the largest {latent.k} of {latent.hidden_dim} latents",),
    }


def _vector_size(modules: Modules, hidden: int, n_poolings: int) -> int:
    """Follows the width from the hidden states through the Dense modules. Raises `ModelLoadError` where
    two files disagree."""
    width, said_by = hidden, modules.transformer / "config.json"
    pooled = modules.pooling or {}
    for name in ("word_embedding_dimension", "embedding_dimension"):
        if pooled.get(name) not in (None, width):
            raise ModelLoadError(
                f"{modules.pooling_file}: {name} = {pooled[name]}, but {said_by} gives {width}"
            )
    width *= n_poolings
    for dense in modules.dense:
        if dense.in_features != width:
            raise ModelLoadError(
                f"{dense.folder / 'config.json'}: in_features = {dense.in_features}, but {said_by} "
                f"gives {width}"
            )
        width, said_by = dense.out_features, dense.folder / "config.json"
    return width


def hidden_size(config: Mapping[str, Any]) -> int:
    """Width of the hidden states, under the name that the architecture gives it."""
    own = ("embedding_dim",) if config.get("model_type") == "embedding_gemma2_text" else ()
    for key in (*own, "hidden_size", "dim", "d_model", "n_embd"):
        if key in config:
            return int(config[key])
    raise ModelLoadError("config.json names no hidden_size")


def allowed_dimensions(
    config: Mapping[str, Any], native: int, said: Overrides
) -> tuple[int, ...] | None:
    """Sizes that a vector may be cut to, ascending, native included; None: the native one only."""
    named = said.matryoshka_dimensions
    named = config.get("matryoshka_dimensions") if named is None else named
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


def read_prompts(folder: Path, st_config: Mapping[str, Any], said: Overrides) -> dict[str, Any]:
    """Fields of the `ModelSpec`: prompts by name, and which one a request without a name gets."""
    own = st_config.get("prompts") or {}
    if not isinstance(own, Mapping) or not all(isinstance(v, str | None) for v in own.values()):
        raise ModelLoadError(
            f"{folder / 'config_sentence_transformers.json'}: prompts is no map of names to texts"
        )
    read = {**prefixed_prompts(st_config), **(said.prompts or {})}
    prompts = {str(k): str(v) for k, v in read.items() if v is not None}
    default = said.default_prompt_name or st_config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"{folder}: default_prompt_name {default!r} is not among the prompts: "
            f"{', '.join(sorted(prompts)) or 'there are none'}"
        )
    return {"prompts": prompts, "default_prompt_name": default}

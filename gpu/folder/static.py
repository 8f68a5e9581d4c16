"""Reads the folder of a static model: one vector per token, averaged; no transformer.

Who calls it: `gpu.folder.read`, before it looks for a transformer.
What must stay true: JSON and hashes only, as in `gpu.folder.read`; the two published layouts are told
apart by their files, because their libraries treat unknown tokens and long texts differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.embedder import allowed_dimensions, read_prompts
from gpu.folder.families import Family
from gpu.folder.fingerprint import fingerprint_of
from gpu.folder.keys import KeyReader
from gpu.folder.outputs import vocabulary
from gpu.folder.sentence_bert import check_shared_files
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.stored import read_json, weight_files

MODEL2VEC, STATIC_EMBEDDING = "model2vec", "static_embedding"
STATIC_TYPES = (MODEL2VEC, STATIC_EMBEDDING)
MODEL2VEC_MAX_TOKENS = 512  # model2vec's own default where its config names none
ANY_LENGTH = 1_048_576  # sentence-transformers cuts nothing; the largest `max_tokens` one may set


def read_static(folder: Path, said: Overrides) -> ModelSpec | None:
    """None: the folder holds no static model. Raises `ModelLoadError`."""
    kind = _kind(folder)
    if kind is None:
        return None
    if said.pooling not in (None, "mean"):
        raise ModelLoadError(
            f"{folder}: pooling = {said.pooling!r}; a static model is a mean of vectors"
        )
    keys = KeyReader(folder, said.ignore_keys)
    where, normalize = _modules(folder, kind, keys)
    check_shared_files(folder, where, keys)
    config = read_json(folder / "config.json") if kind == MODEL2VEC else {}
    if kind == MODEL2VEC:
        keys.check(folder / "config.json", config, "model2vec config.json")
    if not weight_files(where) or weight_files(where)[0].suffix != ".safetensors":
        raise ModelLoadError(f"{where}: no weights (model.safetensors) in the folder")
    if kind == MODEL2VEC:
        normalize = bool(config.get("normalize", False))
    limit = config.get("max_length", MODEL2VEC_MAX_TOKENS) if kind == MODEL2VEC else None
    native = _table_width(weight_files(where)[0])
    st_config = read_json(folder / "config_sentence_transformers.json")
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": where,
        "architecture": "StaticModel" if kind == MODEL2VEC else "StaticEmbedding",
        "model_type": kind,
        "family": Family(kind, learned_positions=False, default_pooling="mean", head=None),
        "config": {**config, "vocab_size": 1 + max(vocabulary(where).values(), default=0)},
        "tasks": frozenset({"embed"}),
        "head": False,
        "max_tokens": said.max_tokens or limit or ANY_LENGTH,
        "position_offset": 0,
        "dimensions": native,
        "pooling": "mean",
        "normalize": normalize,
        "allowed_dimensions": allowed_dimensions(config, native, said),
        **read_prompts(folder, st_config, said),
    }
    return ModelSpec(
        **common, fingerprint=fingerprint_of(where, meaning=common), honoured=keys.honoured
    )


def _kind(folder: Path) -> str | None:
    """Which of the two published layouts the folder has."""
    if read_json(folder / "config.json").get("model_type") == MODEL2VEC:
        return MODEL2VEC
    entries = read_json(folder / "modules.json") or [{}]
    first = str(entries[0].get("type", "")).rsplit(".", 1)[-1]
    return STATIC_EMBEDDING if first == "StaticEmbedding" else None


def _modules(folder: Path, kind: str, keys: KeyReader) -> tuple[Path, bool]:
    """(folder of the table, whether a Normalize module follows). Other modules are refused."""
    entries = read_json(folder / "modules.json") or []
    for entry in entries:
        keys.check(folder / "modules.json", entry, "modules.json")
    kinds = [str(entry.get("type", "")).rsplit(".", 1)[-1] for entry in entries]
    if kinds not in ([], ["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        raise ModelLoadError(
            f"{folder}: modules {', '.join(kinds)} in modules.json are not supported for a static "
            "model; supported are StaticEmbedding, Normalize, in this order"
        )
    path = str(entries[0].get("path", "")) if kind == STATIC_EMBEDDING else ""
    return folder / path, len(kinds) == 2


def _table_width(path: Path) -> int:
    """The vector size, from the header of the safetensors file."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in ("embeddings", "embedding.weight") if name in file.keys()]  # noqa: SIM118
            shape = file.get_slice(names[0]).get_shape() if names else []
    except Exception as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error
    if len(shape) != 2:
        raise ModelLoadError(f"{path}: no table of vectors (embeddings, or embedding.weight)")
    return int(shape[1])

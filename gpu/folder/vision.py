"""Reads the folder of a model that takes images: CLIP, SigLIP, and Qwen2-VL used for embeddings (GME).

Who calls it: `gpu.folder.read`, before it looks for a text model.
What must stay true: JSON and hashes only, as in `gpu.folder.read`; what the folder does not say is the
model's own published code, named here; other multimodal types are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.embedder import allowed_dimensions, read_prompts
from gpu.folder.families import VISION_FAMILIES, Family
from gpu.folder.fingerprint import fingerprint_of
from gpu.folder.keys import KeyReader
from gpu.folder.sentence_bert import check_shared_files
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.stored import check_files, read_json, weight_files
from gpu.folder.towers import (
    SIGLIP,
    TOWERS,
    check_siglip,
    check_tower_calls,
    image_preprocessing,
    tower_config,
)

QWEN2_VL = "qwen2_vl"
# gme_inference.py: max_length, min_image_tokens, max_image_tokens.
GME_MAX_TOKENS, GME_IMAGE_TOKENS = 1800, (256, 1280)
GME = "gme"
"""Key in the config: the folder is GME's, see `_is_gme`."""


def read_vision(folder: Path, said: Overrides) -> ModelSpec | None:
    """None: the folder holds no model that takes images. Raises `ModelLoadError`."""
    if (found := _family(folder)) is None:
        return None
    where, family = found
    config = read_json(where / "config.json", required=True)
    keys = KeyReader(folder, said.ignore_keys)
    keys.check_config(where / "config.json", config, family.model_type)
    check_shared_files(folder, where, keys)
    check_files(where)
    if not weight_files(where):
        raise ModelLoadError(f"{where}: no weights (model.safetensors) in the folder")
    preprocessing = image_preprocessing(where, family.model_type, keys)
    apart = family.model_type in TOWERS
    text, vision = tower_config(config, family.model_type)
    if said.pooling not in (None, "last_token"):
        raise ModelLoadError(
            f"{folder}: pooling = {said.pooling!r}; {family.model_type} has its own"
        )
    limits = [int(text["max_position_embeddings"])]
    if not apart:
        limits.append(int(config.get("max_length") or GME_MAX_TOKENS))
    gme = not apart and _is_gme(where, config)
    length = read_json(where / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, int) and length > 0:
        limits.append(length)
    if family.model_type == SIGLIP:
        native, filled = check_siglip(folder, text, vision, preprocessing), min(limits)
    else:
        native = int(config.get("projection_dim", 512) if apart else text["hidden_size"])
        filled = None
    if apart:
        check_tower_calls(folder, where, keys, filled=filled)
        _check_said(said, family.model_type, filled or limits[0], filled)
    st_config = read_json(folder / "config_sentence_transformers.json")
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": where,
        "architecture": str((config.get("architectures") or [""])[0]),
        "model_type": family.model_type,
        "family": family,
        "config": {
            **text,
            "vision_config": vision,
            "vocab_size": int(text["vocab_size"]),
            "preprocessing": preprocessing,
            GME: gme,
        },
        "notes": _notes(gme, apart, filled),
        "tasks": frozenset({"embed"}),
        "head": False,
        "max_tokens": said.max_tokens or min(limits),
        "position_offset": 0,
        "dimensions": native,
        "pooling": "last_token",
        "normalize": _normalizes(folder, keys, default=not apart),
        "allowed_dimensions": allowed_dimensions(config, native, said),
        "causal": said.causal,
        **read_prompts(folder, st_config, said),
    }
    seen = {"preprocessing": preprocessing, GME: gme}
    fingerprint = fingerprint_of(
        where, meaning=common | {"vision": seen}, config=keys.meaning(head=False)
    )
    return ModelSpec(**common, fingerprint=fingerprint, honoured=keys.honoured)


def _family(folder: Path) -> tuple[Path, Family] | None:
    """(folder of the transformer, row) of a model that takes images; None: it is another kind."""
    entries = read_json(folder / "modules.json") or [{}]
    where = folder / str(entries[0].get("path", ""))
    if not (where / "config.json").is_file():
        where = where / "0_CLIPModel" if (where / "0_CLIPModel").is_dir() else folder
    family = VISION_FAMILIES.get(str(read_json(where / "config.json").get("model_type", "")))
    return None if family is None else (where, family)


def _check_said(said: Overrides, model_type: str, longest: int, filled: int | None) -> None:
    if said.causal is not None:
        raise ModelLoadError(f"causal = {said.causal}: {model_type} attends in its own way")
    if said.max_tokens is None or (filled is None and said.max_tokens <= longest):
        return
    if filled is None:
        raise ModelLoadError(f"max_tokens = {said.max_tokens}: the model takes 1 to {longest}")
    if said.max_tokens != filled:
        raise ModelLoadError(
            f"max_tokens = {said.max_tokens}: SigLIP's texts are filled up to {filled} tokens"
        )


def _notes(gme: bool, apart: bool, filled: int | None) -> tuple[str, ...]:
    if filled is not None:
        return (f"every text is filled up to {filled} tokens, as the model was trained",)
    return () if apart else (_SEQUENCE if gme else _GRID,)


_SEQUENCE = "image tokens are numbered in one row, as GME's own code does, and not by their grid"
_GRID = "image tokens are numbered by their grid (get_rope_index)"


def _is_gme(where: Path, config: Mapping[str, Any]) -> bool:
    """GME's published code gives its language model no positions, which transformers before 4.52 (which it
    demands) numbers in one row, images included. Other Qwen2-VL folders get what their class computes.
    """
    names = [
        str((config.get("architectures") or [""])[0]),
        *map(str, (config.get("auto_map") or {}).values()),
    ]
    return any("Gme" in name for name in names) or (where / "gme_inference.py").is_file()


def _normalizes(folder: Path, keys: KeyReader, *, default: bool) -> bool:
    """Whether vectors are normalised: as modules.json says, else as the model's published code does
    (GME normalises, CLIP gives the projection as it is, and so does Sentence-Transformers)."""
    entries = read_json(folder / "modules.json")
    if not entries:
        return default
    for entry in entries:
        keys.check(folder / "modules.json", entry, "modules.json")
    kinds = [str(entry.get("type", "")).rsplit(".", 1)[-1] for entry in entries]
    odd = [kind for kind in kinds[1:] if kind not in ("Normalize", "Pooling")]
    if odd:
        raise ModelLoadError(
            f"{folder}: module {odd[0]} in modules.json is not supported for a model with images"
        )
    return "Normalize" in kinds or default

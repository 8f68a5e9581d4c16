"""Models with one tower for texts and one for images, CLIP and SigLIP: what their folders say.

Who calls it: `gpu.folder.vision`; the encoder and the towers use its names.
What must stay true: JSON only; what a config leaves out is its class's own default; a folder whose library
would prepare texts or images otherwise than is done here is refused by the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.keys import KeyReader
from gpu.folder.sentence_bert import sentence_bert_file
from gpu.folder.stored import read_json

CLIP, SIGLIP = "clip", "siglip"
TOWERS = (CLIP, SIGLIP)
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"

# What transformers' config classes put where a published config.json says nothing.
_TEXT = {
    SIGLIP: {"vocab_size": 32000, "hidden_size": 768, "max_position_embeddings": 64},
    CLIP: {"max_position_embeddings": 77},
    "qwen2_vl": {"max_position_embeddings": 32768},
}
_VISION = {
    SIGLIP: {"hidden_size": 768, "image_size": 224, "patch_size": 16, "vision_use_head": True},
    CLIP: {"image_size": 224, "patch_size": 32},
}
# transformers' SiglipImageProcessor; CLIP's own numbers are the defaults of `gpu.forward.pixels`.
_PIXELS = {SIGLIP: {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}
_PREFIX = {CLIP: "CLIP", SIGLIP: "Siglip", "qwen2_vl": "Qwen2VL"}


def tower_config(
    config: Mapping[str, Any], model_type: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the text tower's keys over the model's, the vision tower's keys), defaults filled in."""
    text = {
        **_TEXT.get(model_type, {}),
        **config,
        **(config.get("text_config") or {}),
    }
    vision = {**_VISION.get(model_type, {}), **(config.get("vision_config") or {})}
    return text, vision


def image_preprocessing(where: Path, model_type: str, keys: KeyReader) -> dict[str, Any]:
    """How images are resized and scaled: preprocessor_config.json, or the part of processor_config.json
    that newer libraries write instead. Raises `ModelLoadError`."""
    alone = read_json(where / PREPROCESSOR)
    newer = read_json(where / PROCESSOR).get("image_processor") or {}
    if not alone and not newer:
        raise ModelLoadError(f"{where}: no {PREPROCESSOR}, which says how images are resized")
    if alone and newer:
        odd = sorted(name for name in newer if name in alone and alone[name] != newer[name])
        if odd:
            raise ModelLoadError(
                f"{where}: {odd[0]} in {PREPROCESSOR} and in {PROCESSOR} differ; remove one of the files"
            )
    file, found = (PREPROCESSOR, alone) if alone else (PROCESSOR, newer)
    keys.check(where / file, found, PREPROCESSOR)
    for name in ("image_processor_type", "feature_extractor_type"):
        if name in found and not str(found[name]).startswith(_PREFIX[model_type]):
            raise ModelLoadError(
                f"{where / file}: {name} = {found[name]!r} prepares images otherwise than {model_type}"
            )
    return {**_PIXELS.get(model_type, {}), **found}


def check_tower_calls(folder: Path, where: Path, keys: KeyReader, *, filled: int | None) -> None:
    """sentence_bert_config.json of a model with two towers. filled: the tokens that each text has, or None.

    Sentence-Transformers fills a SigLIP text up to the longest one beside it, and its vector then depends
    on that one, unless the folder says otherwise; such a folder is refused.
    """
    path = sentence_bert_file(where)
    config = read_json(path)
    keys.check(path, config, "sentence_bert_config.json of two towers")
    for name, how in (config.get("modality_config") or {}).items():
        wanted = {"method": f"get_{name}_features", "method_output_name": "pooler_output"}
        if name not in ("text", "image") or how != wanted:
            raise ModelLoadError(f"{path}: modality_config.{name} = {how!r} is not supported")
    said = config.get("processing_kwargs") or {}
    keys.check(path, said, "processing_kwargs of two towers")
    text = dict(said.get("text") or {})
    if filled is not None and text.get("max_length") == filled:
        del text["max_length"]
    keys.check(path, text, "processing_kwargs.text")
    if text.get("add_special_tokens") is False:
        raise ModelLoadError(f"{path}: add_special_tokens = False leaves the end token out")
    if filled is None or not (folder / "modules.json").is_file():
        return
    if text.get("padding") != "max_length":
        raise ModelLoadError(
            f"{path}: processing_kwargs.text.padding = {text.get('padding')!r}, so a text's vector would depend "
            "on the texts beside it; SigLIP was trained with texts filled up to one length: set "
            '`"processing_kwargs": {"text": {"padding": "max_length"}}` there'
        )


def check_siglip(
    folder: Path, text: Mapping[str, Any], vision: Mapping[str, Any], pixels: Mapping[str, Any]
) -> int:
    """The size of SigLIP's vectors. Raises `ModelLoadError` for towers that do not go together."""
    n_text = int(text.get("projection_size") or text["hidden_size"])
    side, n_image = vision["image_size"], int(vision["hidden_size"])
    if vision["vision_use_head"] is not True:
        raise ModelLoadError(f"{folder}: vision_use_head = false, so images have no vector")
    if n_text != n_image:
        raise ModelLoadError(
            f"{folder}: texts have {n_text} dimensions and images {n_image}; they cannot be compared"
        )
    size = pixels.get("size", {"height": 224, "width": 224})
    if pixels.get("do_resize", True) is not True or size != {"height": side, "width": side}:
        raise ModelLoadError(
            f"{folder}: images are resized to {size} (do_resize = {pixels.get('do_resize', True)}), the vision "
            f"tower takes {side} x {side}"
        )
    return n_text

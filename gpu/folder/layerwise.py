"""Layerwise MiniCPM rerankers (bge-reranker-v2-minicpm-layerwise): a score may be read behind any layer.

Who calls it: `gpu.folder.read`, before it looks for an ordinary text model.
What must stay true: JSON and hashes only. The folder names a class of its own, which FlagEmbedding publishes;
it is not run: transformers' Granite computes the same with these numbers (`gpu.forward.layerwise`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.families import FAMILIES
from gpu.folder.fingerprint import fingerprint_of
from gpu.folder.keys import KeyReader
from gpu.folder.odd import no_weights
from gpu.folder.prompts import pair_prompt
from gpu.folder.sentence_bert import check_shared_files
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.stored import check_files, read_json, weight_files

MINICPM, LAYERWISE = "minicpm", "LayerWiseMiniCPMForCausalLM"
CUTOFF = "cutoff_layer"
"""Key in the config: layers that are computed, 1 to `num_hidden_layers`."""
# FlagEmbedding's LayerWiseMiniCPMConfig.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "scale_emb": 1,
    "scale_depth": 1, "start_layer": 8, "head_multi": True, "head_type": "simple",
}  # fmt: skip


def read_layerwise(folder: Path, said: Overrides) -> ModelSpec | None:
    """None: the folder holds another kind of model. Raises `ModelLoadError`."""
    given = read_json(folder / "config.json")
    architecture = str((given.get("architectures") or [""])[0])
    if given.get("model_type") != MINICPM or architecture != LAYERWISE:
        return None
    keys = KeyReader(folder, said.ignore_keys)
    keys.check_config(folder / "config.json", given, MINICPM)
    check_shared_files(folder, folder, keys)
    if not weight_files(folder):
        raise ModelLoadError(no_weights(folder))
    check_files(folder)
    for name in ("pooling", "label_tokens", "causal", "matryoshka_dimensions"):
        if getattr(said, name) is not None:
            raise ModelLoadError(
                f"{folder}: {name} is not for a layerwise reranker, whose score has a head of its own"
            )
    config = {**DEFAULTS, **given}
    cut = _cut(said, config)
    limits = [int(config["max_position_embeddings"])]
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, int) and length > 0:
        limits.append(length)
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": folder,
        "architecture": architecture,
        "model_type": MINICPM,
        "family": FAMILIES[MINICPM],
        "config": {**config, CUTOFF: cut},
        "tasks": frozenset({"rerank", "score"}),
        "head": True,
        "labels": ("LABEL_0",),
        "score_activation": "sigmoid",
        "label_activation": "sigmoid",
        "max_tokens": said.max_tokens or min(limits),
        "position_offset": 0,
        # FlagEmbedding writes pairs so, whatever the folder says.
        "pairs": pair_prompt(said.rerank_template or "bge-gemma"),
    }
    read = keys.meaning(head=True) | {CUTOFF: cut}
    return ModelSpec(
        **common,
        notes=(
            f"the score is read behind layer {cut} of {config['num_hidden_layers']}",
            "the folder's own code is not run; transformers' Granite computes the same",
        ),
        fingerprint=fingerprint_of(folder, meaning=common, config=read),
        honoured=keys.honoured,
    )


def _cut(said: Overrides, config: dict[str, Any]) -> int:
    first, last = int(config["start_layer"]), int(config["num_hidden_layers"])
    cut = last if said.cutoff_layer is None else said.cutoff_layer
    if not max(first, 1) <= cut <= last:
        raise ModelLoadError(f"cutoff_layer = {cut}: this model has heads behind {first} to {last}")
    return cut

"""NV-Embed's folder: a bidirectional Mistral and a latent-attention block before the mean.

Who calls it: `gpu.folder.read`, before it looks for an ordinary text model.
What must stay true: JSON and hashes only. The folder names classes of its own; they are not run: what
they compute is computed here (`gpu.forward.nvembed`), and only when the operator trusts that code,
because nothing but that code says what the model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.embedder import allowed_dimensions, read_prompts
from gpu.folder.families import FAMILIES
from gpu.folder.fingerprint import fingerprint_of
from gpu.folder.keys import KeyReader
from gpu.folder.sentence_bert import check_shared_files, read_sentence_bert
from gpu.folder.spec import ModelSpec, Overrides
from gpu.folder.stored import check_files, read_json, weight_files

NVEMBED = "nvembed"
# modeling_nvembed.py's LatentAttentionConfig.
LATENT_DEFAULTS: dict[str, Any] = {
    "num_latents_value": 512, "num_cross_heads": 8, "hidden_dim": 4096, "latent_dim": 4096,
    "cross_dim_head": 4096, "output_normalize": True,
}  # fmt: skip
_MASKED_PROMPT = (
    "with a prompt, its tokens but the last are left out of the mean, as in the folder's code"
)


def _latent_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The block's sizes; what the folder does not say is the published default."""
    given = config.get("latent_attention_config") or {}
    return {name: given.get(name, default) for name, default in LATENT_DEFAULTS.items()}


def read_nvembed(folder: Path, said: Overrides) -> ModelSpec | None:
    """None: the folder is not NV-Embed's. Raises `ModelLoadError`, without `trust_remote_code` always."""
    config = read_json(folder / "config.json")
    if config.get("model_type") != NVEMBED:
        return None
    if not said.trust_remote_code:
        raise ModelLoadError(
            f"{folder}: model type {NVEMBED!r} is defined by Python code in its folder "
            "(modeling_nvembed.py); read it, then set `trust_remote_code = true` for this model"
        )
    text = config.get("text_config") or {}
    keys = KeyReader(folder, said.ignore_keys)
    keys.check_config(folder / "config.json", config, NVEMBED)
    check_shared_files(folder, folder, keys)
    check_files(folder)
    sizes = _latent_config(config)
    if said.pooling not in (None, "mean"):
        raise ModelLoadError(
            f"{folder}: pooling = {said.pooling!r}; NV-Embed is latent attention and a mean"
        )
    hidden = int(text.get("hidden_size") or 0)
    if not hidden or hidden != sizes["hidden_dim"] or hidden != sizes["latent_dim"]:
        raise ModelLoadError(
            f"{folder}: text_config.hidden_size {hidden}, latent_attention_config hidden_dim "
            f"{sizes['hidden_dim']} and latent_dim {sizes['latent_dim']} have to be equal"
        )
    if not weight_files(folder):
        raise ModelLoadError(f"{folder}: no weights (model.safetensors) in the folder")
    limits = [int(text.get("max_position_embeddings") or 32768)]
    length = read_sentence_bert(folder).get("max_seq_length")
    if isinstance(length, int) and length > 0:
        limits.append(length)
    st_config = read_json(folder / "config_sentence_transformers.json")
    common: dict[str, Any] = {
        "folder": folder,
        "transformer": folder,
        "architecture": str((config.get("architectures") or ["NVEmbedModel"])[0]),
        "model_type": NVEMBED,
        "family": FAMILIES[NVEMBED],
        "config": {**text, "latent_attention_config": sizes},
        "tasks": frozenset({"embed"}),
        "head": False,
        "max_tokens": said.max_tokens or min(limits),
        "position_offset": 0,
        "dimensions": hidden,
        "pooling": "mean",
        "include_prompt": not (
            config.get("is_mask_instruction", True)
            and config.get("padding_side", "right") == "right"
        ),
        "normalize": bool(sizes["output_normalize"]),
        "allowed_dimensions": allowed_dimensions(config, hidden, said),
        **read_prompts(folder, st_config, said),
    }
    notes = [
        "trust_remote_code: the folder's own code is not run; what it computes is, natively",
        "attention is bidirectional; latent attention before the mean",
    ]
    if not common["include_prompt"]:
        notes.append(_MASKED_PROMPT)
    return ModelSpec(
        **common,
        notes=tuple(notes),
        fingerprint=fingerprint_of(folder, meaning=common, config=keys.meaning(head=False)),
        honoured=keys.honoured,
    )

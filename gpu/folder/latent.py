"""A sparse autoencoder behind the pooling (CSR): what its folder says.

Who calls it: `gpu.folder.modules` finds it, `gpu.folder.embedder` reads it; `gpu.answer.latent` computes it.
What must stay true: JSON only; sizes that do not fit each other are refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.stored import read_json, weight_files

LATENT = "SparseAutoEncoder"


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """``relu(top_k(W (x - before) + after))`` of one vector: the largest latents and their numbers.

    pooling, normalize: how the vector is made of the hidden states, and whether it has length 1. centred: it
    is brought to mean 0 and deviation 1 first. Formula: Sentence-Transformers' `SparseAutoEncoder`.
    """

    folder: Path
    pooling: str
    normalize: bool
    input_dim: int
    hidden_dim: int
    k: int
    centred: bool = False

    def files(self) -> list[Path]:
        """Weight files beside the model's own."""
        return weight_files(self.folder)

    def meaning(self) -> Any:
        """What gives the weights their meaning, as plain values, for the fingerprint."""
        return ["latent", self.pooling, self.normalize, self.k, self.centred]


def latent_spec(
    where: Path, st_config: Mapping[str, Any], *, pooling: str, normalize: bool, width: int
) -> LatentSpec:
    """width: of the vector that goes in. Raises `ModelLoadError`."""
    config = read_json(where / "config.json", required=True)
    path = where / "config.json"
    sizes = {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    if st_config.get("max_active_dims") is not None:
        sizes["k"] = st_config["max_active_dims"]  # which its library asks the module for
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ModelLoadError(f"{path}: {name} = {value!r} is not 1 and more")
    if sizes["input_dim"] != width:
        raise ModelLoadError(
            f"{path}: input_dim = {sizes['input_dim']}, but the vector before it has {width}"
        )
    if sizes["k"] > sizes["hidden_dim"]:
        raise ModelLoadError(f"{path}: k = {sizes['k']} of {sizes['hidden_dim']} latents")
    return LatentSpec(
        where, pooling, normalize, centred=bool(config.get("normalize", False)), **sizes
    )


_DEFAULTS: dict[str, Any] = {"input_dim": None, "hidden_dim": 512, "k": 8}

"""The module list of a Sentence-Transformers folder: Transformer, Pooling, Dense, Normalize.

Who calls it: `gpu.artifacts`.
What must stay true: a module or a pooling that we do not compute is refused by name; leaving one out
would give vectors of the right size and the wrong direction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batch import Pooling
from .faults import ModelLoadError

POOLINGS: dict[str, Pooling] = {
    "cls": "cls", "mean": "mean", "lasttoken": "last_token", "last_token": "last_token",
}  # fmt: skip
_LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One Dense module: its folder and what it computes, ``activation(x @ W.T + b)``."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # class name in torch.nn


def read_json(path: Path, *, required: bool = False) -> Any:
    """The parsed file, or {} when it does not exist and is not required."""
    if not path.is_file():
        if required:
            raise ModelLoadError(f"{path} is missing: {path.parent} is not a complete model folder")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class Modules:
    """modules.json, read."""

    transformer: Path
    pooling: Mapping[str, Any] | None = None
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    described: bool = False  # there is a modules.json


def read_modules(folder: Path) -> Modules:
    entries = read_json(folder / "modules.json")
    if not entries:
        return Modules(folder)
    transformer: Path | None = None
    pooling: Mapping[str, Any] | None = None
    dense: list[DenseSpec] = []
    normalize = False
    for entry in entries:
        kind = str(entry.get("type", "")).rsplit(".", 1)[-1]
        path = folder / str(entry.get("path", ""))
        if kind == "Transformer" and transformer is None:
            transformer = path
        elif kind == "Pooling" and pooling is None and transformer is not None:
            pooling = read_json(path / "config.json", required=True)
        elif kind == "Dense" and pooling is not None and not normalize:
            dense.append(_dense(folder, path))
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        elif kind == "Dropout":
            continue
        else:
            raise ModelLoadError(
                f"{folder}: module {entry.get('type')!r} in modules.json is not supported at this "
                "place; supported are Transformer, Pooling, Dense, Normalize, in this order"
            )
    if transformer is None:
        raise ModelLoadError(f"{folder}: modules.json names no Transformer module")
    return Modules(transformer, pooling, tuple(dense), normalize, described=True)


def _dense(folder: Path, path: Path) -> DenseSpec:
    config = read_json(path / "config.json", required=True)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    odd = [
        f"{name}={config[name]!r}"
        for name, usual in (
            ("module_input_name", "sentence_embedding"),
            ("module_output_name", "sentence_embedding"),
            ("use_residual", False),
        )
        if config.get(name) not in (None, usual)
    ]
    if not activation.startswith("torch.nn."):
        odd.append(f"activation_function={activation!r}")
    if odd:
        raise ModelLoadError(
            f"{folder}: Dense module {path.name} has {', '.join(odd)}: unsupported"
        )
    return DenseSpec(
        folder=path,
        in_features=int(config["in_features"]),
        out_features=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=activation.rsplit(".", 1)[-1],
    )


def pooling_name(folder: Path, config: Mapping[str, Any]) -> Pooling:
    modes: Any = config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _LEGACY_POOLING_KEYS.items() if config.get(key)]
        modes = modes or ["mean"]  # sentence-transformers' own reading of a config without any
    if isinstance(modes, str):
        modes = [modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelLoadError(
            f"{folder}: pooling {'+'.join(map(str, modes))} is not supported; supported are cls, "
            "mean, last_token"
        )
    return POOLINGS[modes[0]]

"""The module list of a Sentence-Transformers folder: Transformer, Pooling, Dense, Normalize; for
sparse models Transformer, SpladePooling, or a SparseAutoEncoder behind a pooling; for ColBERT Transformer, Dense, MultiVectorMask, Normalize.

Who calls it: `gpu.folder.read`.
What must stay true: a module or a pooling that we do not compute is refused by name; leaving one out
would give vectors of the right size and the wrong direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.batch import Pooling
from gpu.faults import ModelLoadError
from gpu.folder.keys import KeyReader
from gpu.folder.latent import LATENT
from gpu.folder.router import read_router
from gpu.folder.stored import read_json

POOLINGS: dict[str, Pooling] = {
    "cls": "cls", "mean": "mean", "lasttoken": "last_token", "last_token": "last_token", "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean": "weightedmean",
}  # fmt: skip
# In the library's order, in which the vectors of several stand.
_LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


# Modules that have a config.json of their own, and its rows in `gpu.folder.keys`.
_MODULE_FILES = {
    "Pooling": "Pooling", "Dense": "Dense", "Normalize": "Normalize", "Dropout": "Dropout",
    "SpladePooling": "SpladePooling", "MultiVectorMask": "MultiVectorMask",
    "LogitScore": "LogitScore", "CausalScoreHead": "LogitScore", LATENT: LATENT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One Dense module: its folder and what it computes, ``activation(x @ W.T + b)``; with `residual`,
    plus ``x`` (or ``x @ R.T`` where the sizes differ)."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # class name in torch.nn
    residual: bool = False


@dataclass(frozen=True, slots=True)
class Modules:
    """modules.json, read.

    splade: the SpladePooling's config. token_dense: Dense modules that work on every token, there only
    without a pooling. mask: the MultiVectorMask's config. normalize: of the vectors, or of every
    token's.
    """

    transformer: Path
    pooling: Mapping[str, Any] | None = None
    pooling_file: Path | None = None
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    described: bool = False  # there is a modules.json
    splade: Mapping[str, Any] | None = None
    token_dense: tuple[DenseSpec, ...] = ()
    mask: Mapping[str, Any] | None = None
    logit_score: Mapping[str, Any] | None = None  # config of a CrossEncoder's LogitScore
    latent: Path | None = None  # folder of a SparseAutoEncoder, behind everything else
    query_table: Path | None = None  # folder of the weights of queries, which go through no model


def _check_entries(path: Path, entries: list[Any]) -> None:
    """Raises `ModelLoadError` for a list that its library would read otherwise than from first to last."""
    names: set[Any] = set()
    for entry in entries:
        if not isinstance(entry, dict):
            raise ModelLoadError(f"{path}: an entry is no map of name, path and type")
        name, where = entry.get("name"), Path(str(entry.get("path", "")))
        if name is not None and name in names:
            raise ModelLoadError(
                f"{path}: two modules have the name {name!r}, of which its library keeps one; name them apart"
            )
        if where.is_absolute() or ".." in where.parts:
            raise ModelLoadError(f"{path}: the path of a module leads out of the folder")
        names.add(name)


def read_modules(folder: Path, keys: KeyReader) -> Modules:
    """What modules.json lists. Raises `ModelLoadError` for a module, or a key of one, that is not computed."""
    entries = read_json(folder / "modules.json")
    if not entries:
        return Modules(folder)
    if not isinstance(entries, list):
        raise ModelLoadError(f"{folder / 'modules.json'}: a list of modules is expected")
    _check_entries(folder / "modules.json", entries)
    transformer: Path | None = None
    pooling: Mapping[str, Any] | None = None
    pooling_file: Path | None = None
    splade: Mapping[str, Any] | None = None
    mask: Mapping[str, Any] | None = None
    dense: list[DenseSpec] = []
    token_dense: list[DenseSpec] = []
    normalize = False
    logit_score: Mapping[str, Any] | None = None
    query_table: Path | None = None
    latent: Path | None = None
    colbert = is_colbert(folder)
    for entry in entries:
        keys.check(folder / "modules.json", entry, "modules.json")
        kind = str(entry.get("type", "")).rsplit(".", 1)[-1]
        path = folder / str(entry.get("path", ""))
        if kind in _MODULE_FILES:
            config_file = path / "config.json"
            keys.check(config_file, read_json(config_file), _MODULE_FILES[kind])
        done = splade is not None or mask is not None
        if kind in ("Transformer", "MLMTransformer") and transformer is None:
            transformer = path
        elif kind in ("Router", "Asym") and len(entries) == 1:
            routes = read_router(path, keys)
            transformer, query_table = routes.transformer, routes.table
            keys.check(
                routes.pooling / "config.json",
                splade := read_json(routes.pooling / "config.json", required=True),
                "SpladePooling",
            )
        elif transformer is None or splade is not None or latent is not None:
            raise _misplaced(folder, entry)
        elif kind == "SpladePooling" and pooling is None and not token_dense:
            splade = read_json(path / "config.json", required=True)
        elif kind == "Dense" and pooling is None and not done and _on_tokens(path, colbert):
            token_dense.append(_dense(folder, path, "token_embeddings" if not colbert else None))
        elif kind == "MultiVectorMask" and token_dense and mask is None:
            mask = read_json(path / "config.json", required=True)
        elif kind == "Normalize" and token_dense:
            normalize = True
        elif kind == "Pooling" and pooling is None and not token_dense:
            pooling = read_json(path / "config.json", required=True)
            pooling_file = path / "config.json"
        elif kind == "Dense" and pooling is not None and not normalize:
            dense.append(_dense(folder, path))
        elif kind == LATENT and pooling is not None:
            latent = path
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        elif kind in ("LogitScore", "CausalScoreHead") and transformer and pooling is None:
            logit_score = read_json(path / "config.json", required=True)
        elif kind == "Dropout":
            continue
        else:
            raise _misplaced(folder, entry)
    if transformer is None:
        raise ModelLoadError(f"{folder}: modules.json names no Transformer module")
    if (
        token_dense
        and read_json(folder / "config_sentence_transformers.json").get("model_type") == "ColBERT"
    ):
        normalize = True  # PyLate before 4 normalised in its own code and listed no module for it
    return Modules(
        transformer,
        pooling,
        pooling_file=pooling_file,
        dense=tuple(dense),
        normalize=normalize,
        described=True,
        logit_score=logit_score,
        splade=splade,
        token_dense=tuple(token_dense),
        mask=mask,
        query_table=query_table,
        latent=latent,
    )


def _misplaced(folder: Path, entry: Mapping[str, Any]) -> ModelLoadError:
    return ModelLoadError(
        f"{folder}: module {entry.get('type')!r} in modules.json is not supported at this place; "
        "supported are Transformer, Pooling, Dense, Normalize, in this order; Transformer, "
        "SpladePooling; Transformer, Pooling, SparseAutoEncoder; Transformer, Dense (on tokens), MultiVectorMask, Normalize"
    )


def is_colbert(folder: Path) -> bool:
    """The folder calls itself a multi-vector model, so that its Dense modules work on tokens."""
    st_config = read_json(folder / "config_sentence_transformers.json")
    return st_config.get("model_type") in ("ColBERT", "MultiVectorEncoder")


def _on_tokens(path: Path, colbert: bool) -> bool:
    named = read_json(path / "config.json", required=True).get("module_input_name")
    return named == "token_embeddings" or (named in (None, "sentence_embedding") and colbert)


def _dense(folder: Path, path: Path, works_on: str | None = "sentence_embedding") -> DenseSpec:
    """works_on: what its config may name as input and output; None: either, as ColBERT folders do."""
    usual_names = (works_on,) if works_on else ("sentence_embedding", "token_embeddings")
    config = read_json(path / "config.json", required=True)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    odd = [
        f"{name}={config[name]!r}"
        for name, usual in (
            ("module_input_name", usual_names),
            ("module_output_name", usual_names),
        )
        if config.get(name) not in (None, *usual)
    ]
    if not activation.startswith("torch.nn."):
        odd.append(f"activation_function={activation!r}")
    if odd:
        raise ModelLoadError(
            f"{folder}: Dense module {path.name} has {', '.join(odd)}: unsupported"
        )
    sizes = {}
    for name in ("in_features", "out_features"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ModelLoadError(
                f"{path / 'config.json'}: {name} = {config.get(name)!r} is not 1 and more"
            )
        sizes[name] = config[name]
    return DenseSpec(
        folder=path,
        **sizes,
        bias=bool(config.get("bias", True)),
        activation=activation.rsplit(".", 1)[-1],
        residual=bool(config.get("use_residual", False)),
    )


def pooling_names(folder: Path, config: Mapping[str, Any]) -> tuple[Pooling, ...]:
    """What a Pooling module computes; the vectors of several modes stand one behind the other."""
    modes: Any = config.get("pooling_mode")
    if modes is None:
        modes = [name for key, name in _LEGACY_POOLING_KEYS.items() if config.get(key)]
        modes = modes or ["mean"]  # sentence-transformers' own reading of a config without any
    if isinstance(modes, str):
        modes = [modes]
    if not modes or any(mode not in POOLINGS for mode in modes):
        raise ModelLoadError(
            f"{folder}: pooling {'+'.join(map(str, modes))} is not supported; supported are "
            + ", ".join(dict.fromkeys(POOLINGS.values()))
        )
    return tuple(POOLINGS[mode] for mode in modes)

"""Inference-free SPLADE: a Router with a table of weights for queries and a SPLADE model for documents.

Who calls it: `gpu.folder.modules`; `gpu.answer.looked_up` reads the table.
What must stay true: JSON only; any other routing is refused by name, since which texts go where would be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.keys import KeyReader
from gpu.folder.stored import read_json, weight_files

ROUTER_FILES = ("router_config.json", "config.json")  # the second in older folders


@dataclass(frozen=True, slots=True)
class Routes:
    """transformer, pooling: folders of the documents' modules; table: of the queries' one."""

    transformer: Path
    pooling: Path
    table: Path


def read_router(path: Path, keys: KeyReader) -> Routes:
    """The two routes. Raises `ModelLoadError` for anything but a table beside a SPLADE model."""
    file = next((path / name for name in ROUTER_FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelLoadError(f"{path}: a Router without router_config.json")
    config = read_json(file)
    keys.check(file, config, "Router")
    parameters = config.get("parameters") or {}
    keys.check(file, parameters, "Router parameters")
    kinds = {str(k): str(v).rsplit(".", 1)[-1] for k, v in (config.get("types") or {}).items()}
    structure: dict[str, Any] = config.get("structure") or {}
    routes = {name: [kinds.get(str(i), "?") for i in ids] for name, ids in structure.items()}
    told = "; ".join(f"{name}: {', '.join(modules)}" for name, modules in routes.items())
    if set(routes) != {"query", "document"} or (
        routes["query"] != ["SparseStaticEmbedding"]
        or routes["document"]
        not in (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
    ):
        raise ModelLoadError(
            f"{file}: a Router with {told or 'no route'} is not supported; supported is query: "
            "SparseStaticEmbedding; document: a masked-LM transformer, SpladePooling"
        )
    if parameters.get("default_route") != "document":
        raise ModelLoadError(
            f"{file}: default_route = {parameters.get('default_route')!r} is not supported, texts without a "
            "prompt name are documents here"
        )
    transformer, pooling = (_inside(path, str(name)) for name in structure["document"])
    table = _inside(path, str(structure["query"][0]))
    keys.check(table / "config.json", read_json(table / "config.json"), "SparseStaticEmbedding")
    if not weight_files(table):
        raise ModelLoadError(f"{table}: no weights (model.safetensors) of the queries' tokens")
    ours, theirs = (read_json(part / "tokenizer.json") for part in (transformer, table))
    if any(ours.get(part) != theirs.get(part) for part in ("normalizer", "pre_tokenizer", "model")):
        raise ModelLoadError(f"{table}: queries have another tokenizer than documents")
    return Routes(transformer, pooling, table)


def _inside(path: Path, name: str) -> Path:
    if not (path / name).resolve().is_relative_to(path.resolve()):
        raise ModelLoadError(f"{path}: the Router names {name!r}, which lies outside of the folder")
    return path / name

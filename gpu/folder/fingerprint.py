"""The name of a model's numbers: the same weights, tokenizer and meaning give the same fingerprint.

Who calls it: `gpu.folder.read` while it reads a folder.
What must stay true: independent of paths, of file times and of the machine; anything that changes a
vector (weights, tokenizer, pooling, limits, prompts) changes it; compute dtype and device do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_MEANING = (
    "architecture", "tasks", "pooling", "include_prompt", "normalize", "max_tokens",
    "position_offset", "labels", "score_activation", "label_activation", "prompts",
    "default_prompt_name",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "sentencepiece.bpe.model",
    "spiece.model",
)  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder: all safetensors shards, or else pickled ones."""
    safe = sorted(folder.glob("model*.safetensors"))
    return safe or sorted(folder.glob("pytorch_model*.bin"))


def refused_pickle(path: Path) -> str:
    """The message for weights that are pickled."""
    return (
        f"{path} is pickled and may run code when it is read; convert it to safetensors, "
        "or set `allow_pickle = true` for this model"
    )


def file_sha256(path: Path) -> str:
    """Hex digest of a file; remembered in this process while size and time stay the same."""
    stat = path.stat()
    return _digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(
    transformer: Path, *, dense: Sequence[Path] = (), meaning: Mapping[str, Any] = {}
) -> str:
    """``sha256:`` and 32 hex digits over file hashes and the fields that give them their meaning."""
    parts: dict[str, Any] = {
        "weights": [file_sha256(path) for path in weight_files(transformer)],
        "dense": [file_sha256(path) for folder in dense for path in weight_files(folder)],
        "tokenizer": {
            name: file_sha256(transformer / name)
            for name in TOKENIZER_FILES
            if (transformer / name).is_file()
        },
    }
    for name in _MEANING:
        value = meaning.get(name)
        parts[name] = sorted(value) if isinstance(value, frozenset) else value
    for name in ("pairs", "label_head", "causal"):  # only some models have these
        if meaning.get(name) is not None:
            parts[name] = repr(meaning[name])
    if meaning.get("vision") is not None:
        parts["vision"] = meaning["vision"]
    for name in ("sparse", "multivector"):
        extra = meaning.get(name)
        if extra is not None:
            parts[name] = [extra.meaning(), [file_sha256(path) for path in extra.files()]]
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]

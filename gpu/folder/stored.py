"""What lies in a folder beside its JSON: adapters and the dtypes in which weights are stored.

Who calls it: `gpu.folder.read` and the other readers of folders.
What must stay true: headers only, no tensor is read; numbers that need a scale which nobody applies
are refused, and so is an adapter that nobody merges.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError

ADAPTER = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "sentencepiece.bpe.model",
    "spiece.model",
)  # fmt: skip
# Numbers as they are; integer tensors are counters such as position_ids. safetensors' own names.
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_COUNTERS = frozenset({"I64", "I32", "BOOL", "U8"})
_HEADER_LIMIT = 100_000_000  # safetensors' own


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


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder: all safetensors shards, or else pickled ones."""
    safe = sorted(folder.glob("model*.safetensors"))
    return safe or sorted(folder.glob("pytorch_model*.bin"))


def check_files(folder: Path) -> None:
    """Raises `ModelLoadError` for a folder whose weights would be read as other numbers than they are."""
    if (folder / ADAPTER).is_file():
        raise ModelLoadError(
            f"{folder}: {ADAPTER} lies beside the weights, and its library would add that adapter to "
            "them; merge it (peft: `PeftModel.from_pretrained(base, folder).merge_and_unload()`, then "
            "`save_pretrained`), or remove it"
        )
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            _check_dtypes(path)


def _check_dtypes(path: Path) -> None:
    for name, entry in header(path).items():
        if name == "__metadata__":
            continue
        dtype, matrix = str(entry.get("dtype")), len(entry.get("shape") or ()) > 1
        if dtype in _PLAIN or (dtype in _COUNTERS and not (matrix and _is_weight(name))):
            continue
        raise ModelLoadError(
            f"{path}: the tensor {name} is stored as {dtype}, numbers that mean nothing without their "
            "scales; save the model dequantized (float32, bfloat16 or float16)"
        )


def _is_weight(name: str) -> bool:
    return name.endswith(("weight", "kernel", "embeddings"))


def header(path: Path) -> dict[str, Any]:
    """Tensor names, dtypes and shapes of a safetensors file. Raises `ModelLoadError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError("the header is too long")
            found: dict[str, Any] = json.loads(file.read(length))
            return found
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file: {error}") from error

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
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; each may be cut into shards with an index."""
_LFS = b"version https://git-lfs"
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
        text = path.read_bytes()
        if text.startswith(_LFS):
            raise ModelLoadError(_pointer(path))
        return json.loads(text.decode("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder that transformers reads: one file before shards, safetensors before pickles.

    Others that lie beside them (half precision, an older state) are never read. Raises `ModelLoadError` for
    a shard that is not there.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    return []


def _shards(index: Path) -> list[Path]:
    found = read_json(index)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{index} holds no weight_map, which names the file of every tensor")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not name:
            raise ModelLoadError(f"{index} names a file outside of its folder")
        if not (index.parent / name).is_file():
            raise ModelLoadError(
                f"{index.parent / name} is missing, one of the {len(files)} files that {index.name} names; the "
                "download is not complete: fetch the folder again"
            )
    return [index.parent / name for name in files]


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
            start = file.read(len(_LFS))
            if start == _LFS:
                raise ModelLoadError(_pointer(path))
            (length,) = struct.unpack("<Q", start[:8])
            if length > _HEADER_LIMIT:
                raise ValueError("the header is too long")
            file.seek(8)
            found: dict[str, Any] = json.loads(file.read(length))
            size = file.seek(0, 2)
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(
            f"{path}: not a readable safetensors file ({error}); fetch it again"
        ) from error
    ends = [e["data_offsets"][1] for name, e in found.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ModelLoadError(
            f"{path} has {size} bytes and should have {wanted}: the download is not complete; fetch it again"
        )
    return found


def refuse_pointer(path: Path) -> None:
    """Raises `ModelLoadError` for a file that only stands for another."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise ModelLoadError(_pointer(path))


def _pointer(path: Path) -> str:
    return (
        f"{path} is a Git LFS pointer, which stands for a file that was not fetched; run `git lfs pull` in the "
        "repository"
    )

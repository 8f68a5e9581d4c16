"""The name of a model's numbers: whatever changes a vector changes it, and nothing else does.

Who calls it: `gpu.folder.read` and the other readers of folders; `gpu.encode.text` adds the tokenizer as it
is after transformers has built it, the runners add the compute dtype.
What must stay true: independent of paths, file times, shards and the machine; keys without effect,
padding and truncation of a tokenizer.json and tensors that nobody reads leave it as it is. A test
changes every value of three folders and compares with the vectors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.folder.decoders import length_dependent
from gpu.folder.stored import header, weight_files

if TYPE_CHECKING:
    from gpu.folder.modules import DenseSpec

_MEANING = (
    "tasks", "pooling", "normalize", "max_tokens",
    "position_offset", "labels", "score_activation", "label_activation", "prompts",
    "default_prompt_name",
)  # fmt: skip
_BUFFERS = r"(^|\.)(position_ids|rotary_emb\.inv_freq|token_type_ids)$"
# As in `gpu.forward.weights`: a base model reads neither BERT's pooler nor heads of pre-training.
_HEADS = (
    r"(^|\.)pooler\.|^(cls\.|lm_head\.|embed_out\.|head\.|decoder\.|classifier\.|score\.|qa_outputs\.|generator_|"
    r"discriminator_|vocab_(transform|layer_norm|projector)\.)"
)
_CHUNK_BYTES = 1 << 20


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
    transformer: Path,
    *,
    dense: Sequence[DenseSpec] = (),
    meaning: Mapping[str, Any] = {},
    config: Mapping[str, Any] = {},
) -> str:
    """``sha256:`` and 32 hex digits over tensors and the values that give them their meaning.

    config: the keys of config.json that change what is computed (`KeyReader.meaning`).
    """
    reads_head = meaning.get("head") or meaning.get("label_head") or meaning.get("sparse")
    unread = _BUFFERS if reads_head else f"{_BUFFERS}|{_HEADS}"
    parts: dict[str, Any] = {
        "weights": _weights(transformer, unread),
        "dense": [
            [spec.bias, spec.activation, _weights(spec.folder, _BUFFERS)]
            + ([True] if spec.residual else [])
            for spec in dense
        ],
        "config": config,
        "calls": repr(meaning.get("calls")),
    }
    for name in _MEANING:
        value = meaning.get(name)
        parts[name] = sorted(value) if isinstance(value, frozenset) else value
    if meaning.get("pooling") != "last_token":  # which no prompt moves
        parts["include_prompt"] = meaning.get("include_prompt")
    known = meaning.get("config") or {}
    if length_dependent(known) is not None:
        parts["positions"] = known.get("max_position_embeddings")
    if meaning.get("head"):
        parts["pad"] = known.get("pad_token_id")  # some heads look for it
    for name in ("pairs", "label_head", "causal", "chat"):  # only some models have these
        if meaning.get(name) is not None:
            parts[name] = repr(meaning[name])
    if (adapter := meaning.get("adapter")) is not None:
        parts["adapter"] = [adapter.meaning, file_sha256(adapter.weights)]
    if adapters := meaning.get("task_adapters"):
        parts["task_adapters"] = {
            name: [one.meaning, file_sha256(one.weights)] for name, one in adapters.items()
        }
    if meaning.get("vision") is not None:
        parts["vision"] = meaning["vision"]
    for name in ("sparse", "multivector"):
        extra = meaning.get(name)
        if extra is not None:
            parts[name] = [extra.meaning(), [file_sha256(path) for path in extra.files()]]
    return _named(parts)


def with_tokenizer(fingerprint: str, description: Mapping[str, Any], around: Sequence[Any]) -> str:
    """The fingerprint of a folder together with its tokenizer.

    description: the `tokenizers` JSON of the tokenizer as it is used; around: what stands around texts.
    """
    effective = {part: description.get(part) for part in ("normalizer", "pre_tokenizer", "model")}
    # Special tokens are text in a text; where they stand around one, `around` has their ids.
    effective["added_tokens"] = [
        token for token in description.get("added_tokens") or () if not token["special"]
    ]
    return _named({"folder": fingerprint, "tokenizer": effective, "around": list(around)})


def computed_in(fingerprint: str, dtype: str, speed: str = "off") -> str:
    """The fingerprint of a model that computes in that dtype; float32 without `speed` changes nothing."""
    if dtype == "float32" and speed == "off":
        return fingerprint
    return _named({"folder": fingerprint, "dtype": dtype, "speed": speed})


def _named(parts: Mapping[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights(folder: Path, unread: str) -> list[Any]:
    """[name, digest] of every tensor that is read, in the order of names, from all shards; pickled
    files as they are."""
    found: list[Any] = []
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            found.append(file_sha256(path))
            continue
        stat = path.stat()
        found += _tensors(str(path.resolve()), stat.st_size, stat.st_mtime_ns, unread)
    return sorted(found)


@lru_cache(maxsize=256)
def _tensors(path: str, size: int, mtime_ns: int, unread: str) -> tuple[tuple[str, str], ...]:
    skipped = re.compile(unread)
    found = []
    entries = header(Path(path))
    with Path(path).open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for name, entry in sorted(entries.items()):
            if name == "__metadata__" or skipped.search(name):
                continue
            digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode())
            first, end = entry["data_offsets"]
            file.seek(start + first)
            left = end - first
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
            found.append((name, digest.hexdigest()))
    return tuple(found)

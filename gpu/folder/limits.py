"""How long an item may be: what the folder's files say, bounded by what the positions allow.

Who calls it: `gpu.folder.read`.
What must stay true: the order in which sentence-transformers reads the files; never more than the
position table holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.decoders import rope_limit
from gpu.folder.families import Family, position_offset
from gpu.folder.sentence_bert import read_sentence_bert
from gpu.folder.stored import read_json

_UNLIMITED = 1_000_000_000  # tokenizers write 1e30 for "no limit"


def max_tokens(
    folder: Path,
    transformer: Path,
    config: Mapping[str, Any],
    family: Family,
    *,
    named: int | None,
    override: int | None,
) -> int:
    """Special tokens included. named: what sentence_bert_config.json says; override: the setting.

    The file's word beats the tokenizer's `model_max_length`, as in its library; without it, the smaller
    of the tokenizer's and the config's counts. RoBERTa-like `max_position_embeddings` counts
    `pad_token_id + 1` places that hold no token.
    """
    ceiling = _positions(config, family)
    table = ceiling if family.learned_positions else None
    if (stretched := rope_limit(config)) is not None:
        ceiling = table = stretched
    if override is not None:
        if override < 1 or (family.learned_positions and table is not None and override > table):
            raise ModelLoadError(f"max_tokens = {override}: the model takes 1 to {table or 'any'}")
        return override
    limits = [limit for limit in (named, table) if limit is not None]
    if named is None:
        limits = [limit for limit in (_tokenizer_limit(transformer), ceiling) if limit is not None]
    limits += _document_lengths(folder, transformer)
    if not limits:
        raise ModelLoadError(
            f"{folder}: no file limits the length; set `max_tokens` for this model"
        )
    return min(limits)


def _positions(config: Mapping[str, Any], family: Family) -> int | None:
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int | float) or positions <= 0:
        return None
    return int(positions) - position_offset(family, config.get("pad_token_id"))


def _tokenizer_limit(transformer: Path) -> int | None:
    config = read_json(transformer / "tokenizer_config.json")
    return _length(config.get("model_max_length", config.get("max_len")))


def _document_lengths(folder: Path, transformer: Path) -> list[int]:
    """A multi-vector model's own limit of documents."""
    said = (
        read_sentence_bert(transformer).get("document_length"),
        read_json(folder / "config_sentence_transformers.json").get("document_length"),
    )
    return [length for value in said if (length := _length(value)) is not None]


def _length(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and 0 < value < _UNLIMITED else None

"""sentence_bert_config.json: how Sentence-Transformers calls the tokenizer and the model of a folder.

Who calls it: `gpu.folder.read`; `gpu.folder.rerankers` and `gpu.folder.outputs` for their part of it.
What must stay true: every name that the library gave this file is read; a key or a value whose effect
on ids or vectors is not computed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.faults import ModelLoadError
from gpu.folder.keys import KeyReader
from gpu.folder.modules import is_colbert
from gpu.folder.stored import read_json

SENTENCE_BERT = "sentence_bert_config.json"
# In the library's own order: the first that is there counts.
NAMES = (
    SENTENCE_BERT,
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_OLD_NAMES = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
_OUTPUTS = ("last_hidden_state", "logits")


@dataclass(frozen=True, slots=True)
class Calls:
    """What changes ids. limit: the length that the file names, or None. lower_case: texts are lower-cased
    first, whatever the tokenizer does. special_tokens: texts get the tokenizer's special tokens."""

    limit: int | None = None
    lower_case: bool = False
    special_tokens: bool = True


def sentence_bert_file(transformer: Path) -> Path:
    """The file under the first of its names that is there (or the usual one, which is not)."""
    return next(
        (transformer / name for name in NAMES if (transformer / name).is_file()),
        transformer / SENTENCE_BERT,
    )


def read_sentence_bert(transformer: Path) -> Any:
    """The parsed file, or {}; unchecked."""
    return read_json(sentence_bert_file(transformer))


def check_shared_files(
    folder: Path, transformer: Path, keys: KeyReader, *, read: Collection[str] = ()
) -> None:
    """The keys of the two files that every kind of folder may hold. read: those of the library's own file
    that this kind of folder honours whatever their value."""
    for path in (
        transformer / "tokenizer_config.json",
        folder / "config_sentence_transformers.json",
    ):
        data = read_json(path)
        keys.check(path, data, path.name, read=read)


def read_calls(folder: Path, transformer: Path, keys: KeyReader) -> Calls:
    """Check the file and read it. Raises `ModelLoadError` for what would be missed."""
    path = sentence_bert_file(transformer)
    config = read_json(path)
    keys.check(path, config, SENTENCE_BERT)
    for name, value in config.items():
        kind = _OLD_NAMES.get(name, name)
        if kind in ("model_kwargs", "processor_kwargs", "config_kwargs", "processing_kwargs"):
            keys.check(path, value or {}, kind)
    text = (config.get("processing_kwargs") or {}).get("text") or {}
    common = (config.get("processing_kwargs") or {}).get("common") or {}
    keys.check(path, text, "processing_kwargs.text")
    keys.check(path, common, "processing_kwargs.text")
    _check_modalities(folder, path, config.get("modality_config"))
    if config.get("query_expansion") is not None and not is_colbert(folder):
        raise ModelLoadError(
            f"{path}: query_expansion is for multi-vector models; this folder pools, and its library "
            "would expand queries all the same: remove the key"
        )
    processor = config.get("processor_kwargs") or config.get("tokenizer_args") or {}
    return Calls(
        limit=_positive(path, processor.get("model_max_length", config.get("max_seq_length"))),
        lower_case=bool(config.get("do_lower_case")),
        special_tokens=bool(common.get("add_special_tokens", text.get("add_special_tokens", True))),
    )


def _check_modalities(folder: Path, path: Path, modalities: Any) -> None:
    """Text goes in as text, and the last hidden states (or a head's logits) come out."""
    for name, how in (modalities or {}).items():
        if name == "message" and _is_cross_encoder(folder):
            continue
        if name in ("message", "text"):
            odd = not isinstance(how, Mapping) or how.get("method") != "forward"
            if odd or how.get("method_output_name") not in _OUTPUTS:
                raise ModelLoadError(
                    f"{path}: modality_config.{name} = {how!r} is not supported; supported is the method "
                    f"forward with {' or '.join(_OUTPUTS)}"
                )


def _is_cross_encoder(folder: Path) -> bool:
    st_config = read_json(folder / "config_sentence_transformers.json")
    return bool(st_config.get("model_type") == "CrossEncoder")


def _positive(path: Path, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ModelLoadError(f"{path}: max_seq_length = {value!r} is not 1 and more")
    return int(value)

"""BERT's own tokenizer, read from tokenizer.json without transformers, which takes a second to import.

Who calls it: `gpu.encode.folder_tokenizer`, which asks here first.
What must stay true: None unless every file says exactly what transformers' `BertTokenizer` would build from
it; a folder with anything else in it, however harmless it looks, goes to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.folder.stored import read_json

_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_SPECIAL = dict(zip(_NAMES, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), strict=True))
_CLASSES = ("BertTokenizer", "BertTokenizerFast")
_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
_FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
# Read by nothing that makes ids: see `gpu.folder.key_rows`.
_WITHOUT_EFFECT = frozenset(
    [
        "model_max_length",
        "name_or_path",
        "clean_up_tokenization_spaces",
        "padding_side",
        "truncation_side",
        "max_length",
        "stride",
        "truncation_strategy",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "special_tokens_map_file",
        "tokenizer_file",
        "backend",
        "is_local",
        "local_files_only",
    ]
)
_READ = frozenset(
    [
        "tokenizer_class",
        "do_lower_case",
        "strip_accents",
        "tokenize_chinese_chars",
        "do_basic_tokenize",
        "never_split",
        "added_tokens_decoder",
        "additional_special_tokens",
        "extra_special_tokens",
        "model_input_names",
    ]
)


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """What `gpu.encode.text` reads of transformers' tokenizer object."""

    backend_tokenizer: Any
    model_input_names: tuple[str, ...] = tuple(_INPUTS)
    bos_token: str | None = None


def plain_wordpiece(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder of an ordinary BERT; None: ask transformers."""
    path = folder / "tokenizer.json"
    if not path.is_file() or (folder / "added_tokens.json").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json")
    described = read_json(path)
    if not isinstance(config, Mapping) or not isinstance(described, Mapping):
        return None
    mapped = read_json(folder / "special_tokens_map.json")
    if not _usual_config(config) or not _usual_tokens(mapped):
        return None
    vocabulary = (described.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, Mapping) or not set(_SPECIAL.values()) <= set(vocabulary):
        return None
    wanted = _wanted(config, vocabulary)
    if {name: described.get(name) for name in wanted} != wanted:
        return None
    if {k: v for k, v in described["model"].items() if k != "vocab"} != _MODEL:
        return None
    from tokenizers import Tokenizer

    return PlainTokenizer(Tokenizer.from_file(str(path)))


_MODEL = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}


def _usual_config(config: Mapping[str, Any]) -> bool:
    if not set(config) <= {*_WITHOUT_EFFECT, *_READ, *_NAMES}:
        return False
    decoder = config.get("added_tokens_decoder", {})
    flagged = [
        (t.get("content"), {k: v for k, v in t.items() if k != "content"})
        for t in (decoder.values() if isinstance(decoder, Mapping) else ())
        if isinstance(t, Mapping)
    ]
    return (
        config.get("tokenizer_class") in _CLASSES
        and all(_text(config.get(name, text)) == text for name, text in _SPECIAL.items())
        and config.get("do_basic_tokenize", True) is True
        and config.get("never_split") is None
        and not config.get("additional_special_tokens")
        and not config.get("extra_special_tokens")
        and config.get("model_input_names", _INPUTS) == _INPUTS
        and type(config.get("do_lower_case", True)) is bool
        and type(config.get("tokenize_chinese_chars", True)) is bool
        and config.get("strip_accents") in (None, False, True)
        and len(flagged) == len(decoder)
        and all(
            text in _SPECIAL.values() and flags == _FLAGS | {"special": True}
            for text, flags in flagged
        )
    )


def _usual_tokens(mapped: Any) -> bool:
    """special_tokens_map.json, where there is one."""
    return isinstance(mapped, Mapping) and all(
        name in _SPECIAL and _text(value) == _SPECIAL[name] for name, value in mapped.items()
    )


def _text(value: Any) -> Any:
    """A special token is a text, or an object with one and flags."""
    if isinstance(value, Mapping) and set(value) <= {*_FLAGS, "content", "special", "__type"}:
        return value.get("content") if all(not value.get(flag) for flag in _FLAGS) else None
    return value


def _wanted(config: Mapping[str, Any], vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of tokenizer.json that transformers would build anew, as tokenizers writes them."""
    first, last = _SPECIAL["cls_token"], _SPECIAL["sep_token"]

    def special(text: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    def content(name: str, kind: int = 0) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [special(first), content("A"), special(last)]
    added = sorted((vocabulary[text], text) for text in _SPECIAL.values())
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
            "lowercase": config.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, content("B", 1), special(last, 1)],
            "special_tokens": {
                text: {"id": text, "ids": [vocabulary[text]], "tokens": [text]}
                for text in (first, last)
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "added_tokens": [
            {"id": i, "content": text, **_FLAGS, "special": True} for i, text in added
        ],
    }

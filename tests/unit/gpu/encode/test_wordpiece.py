"""BERT's tokenizer without transformers: the same one, or none at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gpu.encode.wordpiece import plain_wordpiece
from tests.support.models import edit_json, write_model

USUAL: dict[str, Any] = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": True,
    "mask_token": "[MASK]",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_model(tmp_path / "m", "bert")
    edit_json(made / "tokenizer_config.json", **USUAL)
    edit_json(
        made / "tokenizer.json",
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    return made


def described(tokenizer: Any) -> dict[str, Any]:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return dict(json.loads(tokenizer.to_str()))


def same_as_transformers(folder: Path) -> bool:
    """Whether both are one tokenizer, after which every text has the same ids."""
    ours = plain_wordpiece(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return (
        ours is not None
        and described(ours.backend_tokenizer) == described(theirs.backend_tokenizer)
        and list(ours.model_input_names) == list(theirs.model_input_names)
        and ours.bos_token == theirs.bos_token
    )


def normalizer(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["normalizer"] |= fields
    path.write_text(json.dumps(data))


def test_an_ordinary_bert_is_taken_and_is_transformers_tokenizer(folder: Path) -> None:
    assert same_as_transformers(folder)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"do_lower_case": False}, {"lowercase": False}),
        ({"strip_accents": False}, {"strip_accents": False}),
        ({"strip_accents": True}, {"strip_accents": True}),
        ({"tokenize_chinese_chars": False}, {"handle_chinese_chars": False}),
        ({"tokenizer_class": "BertTokenizerFast"}, {}),
        ({"do_lower_case": None}, {}),
        ({"model_max_length": 17, "padding_side": "left", "truncation_side": "left"}, {}),
        ({"model_input_names": None}, {}),
        (
            {
                "added_tokens_decoder": {
                    "0": {
                        "content": "[PAD]", "lstrip": False, "normalized": False, "rstrip": False,
                        "single_word": False, "special": True,
                    }
                }
            },
            {},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_both_files_say_alike_is_taken(
    folder: Path, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    edit_json(folder / "tokenizer_config.json", **config)
    normalizer(folder, **fields)
    assert same_as_transformers(folder)


def test_a_baked_in_padding_and_cut_change_nothing(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path.write_text(json.dumps(data))
    assert same_as_transformers(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"do_lower_case": False},  # tokenizer.json says otherwise; transformers obeys this one
        {"strip_accents": True},
        {"tokenize_chinese_chars": False},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": None},
        {"cls_token": "[MASK]"},
        {"bos_token": "[CLS]"},
        {"additional_special_tokens": ["[X]"]},
        {"never_split": ["a"]},
        {"chat_template": "{{ messages }}"},
        {"auto_map": {"AutoTokenizer": ["t.T", None]}},
        {"model_input_names": ["input_ids"]},
        {"added_tokens_decoder": {"5": {"content": "[X]", "special": True}}},
        {"wordpieces_prefix": "@@"},
    ],
    ids=str,
)
def test_what_is_unusual_goes_to_transformers(folder: Path, config: dict[str, Any]) -> None:
    edit_json(folder / "tokenizer_config.json", **config)
    assert plain_wordpiece(folder) is None


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", None),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("post_processor", None),
        ("added_tokens", []),
        ("model", {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {}}),
    ],
)
def test_another_tokenizer_json_goes_to_transformers(folder: Path, part: str, value: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    assert plain_wordpiece(folder) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"[X]": 300}),
        ("special_tokens_map.json", {"additional_special_tokens": ["[X]"]}),
        ("special_tokens_map.json", {"sep_token": "[CLS]"}),
        ("special_tokens_map.json", {"cls_token": {"content": "[CLS]", "lstrip": True}}),
    ],
)
def test_other_files_with_tokens_go_to_transformers(
    folder: Path, name: str, content: dict[str, Any]
) -> None:
    (folder / name).write_text(json.dumps(content))
    assert plain_wordpiece(folder) is None


def test_a_usual_special_tokens_map_is_no_obstacle(folder: Path) -> None:
    names = {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    assert same_as_transformers(folder)

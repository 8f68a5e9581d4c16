"""No text of a sender yields a control id; prompts of the owner and the operator may hold control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from gpu.encode.control import ControlTokens
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.requests import Document, EmbedRequest, RerankRequest, Text
from tests.support.models import _bytes, _unigram, _wordpiece, write_model

TOKENIZERS = {"wordpiece": _wordpiece, "unigram": _unigram, "bytes": lambda: _bytes(True)}
AROUND = ["{}", "a{}b", "a {} b", "{}{}", "hello {}, world", "{} x", "\n{}\n", "<{}>"]


def control_of(tokenizer: Any) -> ControlTokens:
    return ControlTokens(tokenizer, json.loads(tokenizer.to_str())["model"])


def word_level() -> tuple[Any, None]:
    """A model whose vocabulary holds its control tokens as words, reached by a split at spaces."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[": 3, "SEP]": 4, "CLS]": 5, "a": 6, "b": 7}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer, None


@pytest.mark.parametrize("kind", [*TOKENIZERS, "word level"])
def test_no_special_token_written_in_a_text_becomes_a_control_id(kind: str) -> None:
    """K20: every special token of every kind of tokenizer, alone and inside other text."""
    tokenizer, _ = TOKENIZERS.get(kind, word_level)()
    tokenizer.encode_special_tokens = True
    control = control_of(tokenizer)
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    ids = {i for text, i in special.items() if text not in ("[UNK]", "<unk>")}
    for text in special:
        for form in AROUND:
            written = form.replace("{}", text)
            got = control.spell(np.array(tokenizer.encode(written, add_special_tokens=False).ids))
            assert not ids.intersection(got.tolist()), (kind, written)
    assert bool(control.spelled) is (kind in ("unigram", "word level"))


def test_other_text_keeps_its_ids_when_a_control_token_is_written_out() -> None:
    tokenizer, _ = _unigram()
    tokenizer.encode_special_tokens = True
    control = control_of(tokenizer)
    plain = np.array(tokenizer.encode("the river", add_special_tokens=False).ids)
    assert control.spell(plain) is plain
    ids = control.spell(np.array(tokenizer.encode("a</s>b", add_special_tokens=False).ids))
    assert "".join(tokenizer.id_to_token(int(i)) for i in ids) == "▁a</s>b"


def test_a_control_token_that_cannot_be_written_out_stops_the_load() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[SEP]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    tokenizer.encode_special_tokens = True
    with pytest.raises(ModelLoadError, match=r"\[SEP\].*cannot be written out"):
        control_of(tokenizer)


@pytest.mark.parametrize("family", ["xlm-roberta", "mpnet", "t5"])
def test_no_item_of_a_request_holds_a_control_id_of_its_sender(tmp_path: Path, family: str) -> None:
    """K20: texts, and query and documents of a pair, through the encoder itself."""
    runner = make_runner_factory("m", write_model(tmp_path / "m", family, max_seq_length=64))()
    clean, dirty = ("a b", "a</s>b<s>c<pad>")
    one, two = (
        runner.encoder.encode([EmbedRequest(id="r", input=(Text(text),))])[0].items[0].input_ids
        for text in (clean, dirty)
    )
    ends = [n for n in (0, 1, 2) if n in one.tolist()]
    assert [int((two == n).sum()) for n in ends] == [int((one == n).sum()) for n in ends]


def test_pairs_hold_no_control_id_of_their_sender(tmp_path: Path) -> None:
    runner = make_runner_factory(
        "m", write_model(tmp_path / "m", "xlm-roberta", labels=1, pooling=None)
    )()
    ids = [
        runner.encoder.encode([RerankRequest(id="r", query=q, documents=(Document(text=d),))])[0]
        .items[0]
        .input_ids
        for q, d in (("a b", "c d"), ("a</s>b", "<s>c</s></s>d"))
    ]
    assert [int((one == 2).sum()) for one in ids] == [3, 3]


def test_control_tokens_of_a_prompt_are_the_owners_alone(tmp_path: Path) -> None:
    """K08: a prompt of the folder or of the settings may hold them; one in a request is text."""
    folder = write_model(
        tmp_path / "m", "qwen3", pooling="lasttoken", prompts={"q": "<|endoftext|>ask:\n"}
    )
    runner = make_runner_factory("m", folder, prompts={"op": "a<|endoftext|>"})()
    end = runner.encoder._tokenizer.token_to_id("<|endoftext|>")

    def count(**fields: Any) -> int:
        request = EmbedRequest(id="r", input=(Text("x <|endoftext|> y"),), **fields)
        return int((runner.encoder.encode([request])[0].items[0].input_ids == end).sum())

    assert count() == 1, "the one that closes the text"
    assert count(prompt_name="q") == count(prompt_name="op") == 2
    assert count(prompt="<|endoftext|>ask:\n") == 1

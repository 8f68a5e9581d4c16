"""Texts are cut into what the model takes, counted in its own tokens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pipeline.indexing.chunking import Chunker
from pipeline.indexing.options import ChunkOptions


def wordpiece() -> str:
    """Letters, and a few words: most words are several tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz.#,0123456789é"
    vocab = {"[UNK]": 0}
    for word in ("the", "cat", "sat", *letters, *(f"##{c}" for c in letters)):
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return str(tokenizer.to_str())


TOKENIZER = wordpiece()


def chunker(**options: object) -> Chunker:
    """For a model that takes 64 tokens."""
    return Chunker(ChunkOptions(**options), tokenizer_json=TOKENIZER, room=64)  # type: ignore[arg-type]


BY = ["tokens", "sentences", "markdown"]


@pytest.mark.parametrize("by", BY)
def test_a_text_that_fits_is_one_chunk_and_a_blank_one_is_none(by: str) -> None:
    assert chunker(by=by).chunks("  the cat sat.\n") == ["the cat sat."]
    assert chunker(by=by).chunks("") == []
    assert chunker(by=by).chunks(" \n\t ") == []


@pytest.mark.parametrize("by", BY)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.text("the catsé.#\n ,0", max_size=600),
    overlap=st.integers(0, 4),
)
def test_no_chunk_has_more_tokens_than_asked_and_only_white_space_is_lost(
    by: str, text: str, overlap: int
) -> None:
    cut = chunker(by=by, max_tokens=8, overlap=overlap)
    chunks = cut.chunks(text)
    assert all(0 < cut.count(chunk) <= 8 for chunk in chunks if cut.count(chunk))
    assert all(cut.count(chunk) <= 8 for chunk in chunks)
    if not overlap:
        assert "".join("".join(chunks).split()) == "".join(text.split())
    assert chunks == cut.chunks(text)


def test_windows_repeat_the_overlap_and_cut_between_words() -> None:
    cut = chunker(by="tokens", max_tokens=8, overlap=2)
    chunks = cut.chunks("the cat sat the cat sat the cat sat the cat sat")
    assert chunks == ["the cat sat the cat sat the cat", "the cat sat the cat sat"]


def test_a_word_longer_than_a_chunk_is_cut_hard() -> None:
    cut = chunker(by="sentences", max_tokens=8)
    chunks = cut.chunks("a" * 50)
    assert "".join(chunks) == "a" * 50
    assert all(cut.count(chunk) <= 8 for chunk in chunks)


def test_sentences_stay_whole_where_they_fit() -> None:
    cut = chunker(by="sentences", max_tokens=10)
    assert cut.chunks("The cat sat. The cat sat. The cat sat. The cat sat.") == [
        "The cat sat. The cat sat.",
        "The cat sat. The cat sat.",
    ]


def test_markdown_is_cut_at_headings_even_when_it_fits() -> None:
    cut = chunker(by="markdown", max_tokens=12)
    chunks = cut.chunks("# the cat\n\nsat the cat sat\n\n# the sat\n\ncat sat the cat")
    assert chunks[0].startswith("# the cat") and chunks[-1].startswith("# the sat")


def test_what_the_model_does_not_take_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="takes 64"):
        chunker(max_tokens=65)
    with pytest.raises(ValueError, match=r"chunk\.overlap"):
        chunker(overlap=40)
    with pytest.raises(ValueError, match=r"chunk\.overlap"):
        chunker(max_tokens=8, overlap=5)


def test_chunking_is_described_in_one_line_that_compares() -> None:
    assert chunker().described == "by=sentences max_tokens=64 overlap=0"
    assert chunker(max_tokens=64).described == chunker().described

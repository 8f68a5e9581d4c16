"""Late chunking: each chunk whole in one window, no window longer than the model takes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.indexing.chunking import Chunker, Cut
from pipeline.indexing.options import ChunkOptions
from tests.unit.pipeline.indexing.test_chunking import TOKENIZER

ROOM = 32


def chunker(room: int = ROOM, **options: object) -> Chunker:
    given_ = {"late": True, "max_tokens": 8, **options}
    return Chunker(ChunkOptions(**given_), tokenizer_json=TOKENIZER, room=room)  # type: ignore[arg-type]


def pooled(cut: Cut) -> tuple[str, ...]:
    """The texts that the vectors are of."""
    return tuple(item.text[a:b] for item in cut.items for a, b in item.spans)


@pytest.mark.parametrize("by", ["tokens", "sentences", "markdown"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text("the catsé.#\n ,0", max_size=900), overlap=st.integers(0, 4))
def test_chunks_are_those_of_plain_chunking_and_windows_fit(
    by: str, text: str, overlap: int
) -> None:
    late, plain = chunker(by=by, overlap=overlap), chunker(by=by, overlap=overlap, late=False)
    cut = late.cut(text)
    assert cut.texts == tuple(plain.chunks(text)) == pooled(cut)
    for item in cut.items:
        assert item.spans and late.count(item.text) <= ROOM
        assert item.text in text
    assert late.cut(text) == cut


def test_a_document_that_fits_is_one_window_and_a_blank_one_is_none() -> None:
    text = " the cat sat. the cat sat.\nthe cat sat. "
    cut = chunker().cut(text)
    assert [item.text for item in cut.items] == [text.strip()] and len(cut.texts) == 2
    assert chunker().cut(" \n") == Cut((), ())


def test_windows_overlap_by_context_that_is_no_chunk_of_theirs() -> None:
    text = "the cat sat " * 60
    first, *rest = chunker(by="tokens").cut(text).items
    assert first.spans[0][0] == 0
    assert all(item.spans[0][0] > 0 for item in rest), "what stands before is read as well"
    assert rest[-1].spans[-1][1] == len(rest[-1].text), "the last one ends where the text does"
    assert rest[0].spans[-1][1] < len(rest[0].text), "what stands behind is read as well"


def test_a_chunk_as_long_as_the_model_takes_is_a_window_of_its_own() -> None:
    cut = chunker(by="tokens", max_tokens=ROOM).cut("a" * 100)
    assert [item.text for item in cut.items] == list(cut.texts) == list(pooled(cut))


def test_a_long_document_takes_time_in_proportion() -> None:
    """A hundred thousand tokens: nothing compares each chunk with each token."""
    cut = chunker(room=512, by="tokens", max_tokens=64).cut("the cat sat " * 33_000)
    assert len(cut.texts) > 1500 and pooled(cut) == cut.texts


def test_chunks_that_are_cut_already_stay_whole_and_are_read_one_behind_the_other() -> None:
    texts = ["the cat sat.", "sat the cat.", "the " * 20]
    cut = chunker().cut_again(texts)
    assert cut.texts[:2] == tuple(texts[:2]) and pooled(cut) == cut.texts
    assert all(chunker().count(text) <= 8 for text in cut.texts) and len(cut.texts) == 5
    assert cut.items[0].text.startswith("the cat sat.\n\nsat the cat.\n\nthe")
    plain = chunker(late=False).cut_again(texts)
    assert plain.texts == cut.texts == tuple(item.text for item in plain.items)


def test_late_needs_a_size_and_is_described() -> None:
    with pytest.raises(ValueError, match=r"chunk\.late needs chunk\.max_tokens"):
        chunker(max_tokens=None)
    assert chunker().described == "by=sentences max_tokens=8 overlap=0 late=true window=32"
    assert chunker(late=False).described == "by=sentences max_tokens=8 overlap=0"
    assert chunker(room=64).described != chunker().described

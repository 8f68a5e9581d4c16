"""The memory beside a committed offset: written, read, bounded, and never believed when damaged."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.transports.kafka.options import EXACTLY_ONCE_WINDOW
from pipeline.transports.kafka.progress import MAX_BYTES, NOTHING, dump, parse

offsets = st.integers(0, 2**40)


@given(
    offsets, st.sets(st.integers(0, 1024)), st.dictionaries(st.integers(0, 50), st.integers(1, 9))
)
def test_what_was_written_is_read(offset: int, done: set[int], attempts: dict[int, int]) -> None:
    done = {offset + one for one in done}
    attempts = {offset + one: count for one, count in attempts.items()}
    found = parse(offset, dump(offset, offset + 2000, done, attempts))
    assert found.handed_out == offset + 2000
    assert found.done <= done
    assert found.attempts == attempts


def test_a_window_of_alternating_offsets_fits() -> None:
    """E06: the worst case of a full window stays below what a broker takes."""
    done = set(range(1, 1024, 2))
    text = dump(0, 1024, done, {0: 3})
    assert len(text) <= MAX_BYTES
    assert parse(0, text).done == done


def test_what_does_not_fit_is_left_out_from_the_top() -> None:
    done = {i * i for i in range(1, 40_000)}
    text = dump(0, 2, done, {5: 1})
    found = parse(0, text)
    assert 0 < len(found.done) < len(done)
    assert found.done == set(sorted(done)[: len(found.done)])
    assert found.attempts == {5: 1}
    assert len(text) <= MAX_BYTES


def test_a_tag_makes_two_memories_differ_and_changes_nothing_else() -> None:
    plain, first, second = (dump(7, 9, {8}, {7: 1}, tag) for tag in ("", "a", "b"))
    assert len({plain, first, second, dump(7, 7, set(), {}, "a"), ""}) == 5
    assert parse(7, plain) == parse(7, first) == parse(7, second)


def test_nothing_to_remember_is_no_text() -> None:
    assert dump(7, 7, set(), {}) == ""


@pytest.mark.parametrize(
    "text",
    [
        "", None, "someone else's", "embedstream1:", "embedstream1::00000000", "embedstream1:AAAA:1b851995",
        "embedstream2:AAAA:00000000", "embedstream1:" + "A" * 5000, "e" * 4096, "\x00\xff",
    ],
)  # fmt: skip
def test_foreign_text_means_nothing_is_known(text: str | None) -> None:
    """E08: so work resumes at the committed offset."""
    assert parse(5, text) == NOTHING


@given(st.integers(0, 200), st.characters())
def test_damaged_text_means_nothing_is_known(at: int, character: str) -> None:
    text = dump(5, 900, set(range(10, 300, 3)), {6: 2})
    at = min(at, len(text) - 1)
    damaged = text[:at] + character + text[at + 1 :]
    assert parse(5, damaged) in (NOTHING, parse(5, text))


def test_a_window_of_exactly_once_is_remembered_whole_whatever_its_gaps() -> None:
    """E05: what is forgotten there is answered twice."""
    rng = random.Random(0)
    for step in (1, 2, 10, 100, 1000):
        offsets = list(
            itertools.accumulate(rng.randint(1, step) for _ in range(EXACTLY_ONCE_WINDOW))
        )
        for share in (0.3, 0.5, 0.8):
            done = frozenset(offset for offset in offsets if rng.random() < share)
            text = dump(0, offsets[-1] + 5000, done, {}, "t" * 40)
            assert parse(0, text).done == done

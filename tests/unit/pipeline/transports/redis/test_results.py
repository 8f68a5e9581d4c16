"""A result as a value in Redis: the same result comes back, and nothing else ever does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.batch import ItemResult
from pipeline.transports.redis.results import MAX_VALUE_BYTES, from_value, to_value
from pipeline.transports.redis.results_options import results_options

KEY, OTHER = b"k" * 20, b"l" * 20
DENSE = np.asarray([1.5, -0.0, 3e-39], np.float32)
RESULTS = {
    "dense": ItemResult(dense=DENSE),
    "scores": ItemResult(scores=DENSE[:1]),
    "sparse": ItemResult(sparse=(np.asarray([3, 9], np.int32), np.asarray([0.5, 2], np.float32))),
    "no weights": ItemResult(sparse=(np.zeros(0, np.int32), np.zeros(0, np.float32))),
    "per token": ItemResult(multivector=np.arange(6, dtype=np.float32).reshape(2, 3)),
    "no token": ItemResult(multivector=np.zeros((0, 3), np.float32)),
    "spans": ItemResult(multivector=np.ones((2, 3), np.float32), spans=((0, 2), (2, 5))),
    "several": ItemResult(
        dense=DENSE,
        sparse=(np.asarray([1], np.int32), np.asarray([1], np.float32)),
        multivector=np.ones((1, 4), np.float32),
    ),
}


def same(a: ItemResult, b: ItemResult) -> bool:
    def plain(one: ItemResult) -> list[Any]:
        arrays = (one.dense, one.scores, one.multivector, *(one.sparse or (None, None)))
        return [None if x is None else (x.shape, x.dtype.str, x.tobytes()) for x in arrays]

    return plain(a) == plain(b) and a.spans == b.spans


@pytest.mark.parametrize("name", [n for n in RESULTS if n != "no token"])
def test_a_result_comes_back_bit_for_bit(name: str) -> None:
    found = from_value(KEY, to_value(KEY, RESULTS[name]))
    assert found is not None and same(found, RESULTS[name])
    assert all(not x.flags.writeable for x in (found.dense, found.multivector) if x is not None)


def test_a_text_without_any_vector_is_computed_again() -> None:
    """Of no rows nobody knows how long they are."""
    assert from_value(KEY, to_value(KEY, RESULTS["no token"])) is None


@pytest.mark.parametrize("name", RESULTS)
def test_a_value_of_another_key_is_not_served(name: str) -> None:
    assert from_value(OTHER, to_value(KEY, RESULTS[name])) is None


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), name=st.sampled_from(sorted(RESULTS)))
def test_no_bit_of_a_value_may_differ(at: int, bit: int, name: str) -> None:
    value = bytearray(to_value(KEY, RESULTS[name]))
    value[at % len(value)] ^= 1 << bit
    assert from_value(KEY, bytes(value)) is None


@given(st.one_of(st.binary(max_size=200), st.none(), st.text(), st.integers()))
def test_what_others_wrote_there_is_not_served(value: object) -> None:
    assert from_value(KEY, value) is None
    if isinstance(value, bytes):
        assert from_value(KEY, b"esr1" + value) is None


@pytest.mark.parametrize("cut", [0, 4, 20, 21, -1])
def test_half_a_value_is_not_served(cut: int) -> None:
    assert from_value(KEY, to_value(KEY, RESULTS["several"])[:cut]) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_not_served(bad: float) -> None:
    """A03: even when their digest is right."""
    odd = ItemResult(dense=np.asarray([1, bad], np.float32))
    assert from_value(KEY, to_value(KEY, odd)) is None
    turned = ItemResult(sparse=(np.asarray([2, 1], np.int32), np.ones(2, np.float32)))
    assert from_value(KEY, to_value(KEY, turned)) is None
    large = ItemResult(dense=np.zeros(MAX_VALUE_BYTES // 4, np.float32))
    assert from_value(KEY, to_value(KEY, large)) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kafka://h/t", "redis://host:6379/0"),
        ("redis://h/stream", "database number"),
        ("redis://h?group=x", "unknown parameter 'group'"),
        ("redis://h?cluster=true", "unknown parameter 'cluster'"),
        ("redis://:secret@h:99999", "port"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        results_options(url)
    assert "secret" not in str(caught.value)


def test_an_address_is_read_like_any_other_of_redis() -> None:
    options = results_options("rediss://user:word@host:1234/3?ssl_check_hostname=false")
    assert (options.host, options.port, options.db, options.tls) == ("host", 1234, 3, True)
    assert (options.username, options.password) == ("user", "word")
    assert options.ssl_check_hostname is False

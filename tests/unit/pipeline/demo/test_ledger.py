"""What the demo checks: it must not claim success when something is wrong."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from pipeline.demo.ledger import Ledger, nearest, parse_metrics, quantile, vector_fault
from pipeline.observe.metrics import PrometheusMetrics


def unit(seed: int) -> bytes:
    vector = np.random.default_rng(seed).normal(size=8).astype(np.float32)
    data: bytes = (vector / np.linalg.norm(vector)).astype("<f4").tobytes()
    return data


def reply(request_id: str, *vectors: bytes, first: int = 0, **more: Any) -> bytes:
    data = [
        {"index": first + i, "embedding": vector, "tokens": 3, "truncated": False}
        for i, vector in enumerate(vectors)
    ]
    packed: bytes = msgpack.packb({"id": request_id, "data": data, **more})
    return packed


def test_all_documents_answered_once_is_success() -> None:
    ledger = Ledger({"a": 2, "b": 1})
    ledger.record("b", reply("b", unit(3)))
    assert not ledger.complete
    ledger.record("a", reply("a", unit(1), unit(2)))
    assert ledger.complete
    assert ledger.problems() == []
    assert (ledger.n_answered, ledger.tokens, ledger.duplicates) == (3, 9, 0)
    want = np.stack([np.frombuffer(unit(n), dtype="<f4") for n in (1, 2, 3)])
    np.testing.assert_array_equal(ledger.matrix(), want)


def test_a_reply_in_parts_counts_by_document() -> None:
    ledger = Ledger({"a": 3})
    ledger.record("a", reply("a", unit(3), first=2, part=1, parts=2))
    ledger.record("a", reply("a", unit(1), unit(2), part=0, parts=2))
    assert ledger.complete and ledger.problems() == []


def test_the_same_answer_twice_is_counted_and_harmless() -> None:
    ledger = Ledger({"a": 2})
    for _ in range(2):
        ledger.record("a", reply("a", unit(1), unit(2)))
    assert ledger.duplicates == 2
    assert ledger.problems() == []


def test_another_answer_to_the_same_document_is_a_failure() -> None:
    ledger = Ledger({"a": 1})
    ledger.record("a", reply("a", unit(1)))
    ledger.record("a", reply("a", unit(2)))
    assert ledger.problems() == ["document 0 of a was answered twice, differently"]


def test_a_lost_document_is_a_failure() -> None:
    ledger = Ledger({"a": 2, "b": 4})
    ledger.record("a", reply("a", unit(1), unit(2)))
    assert not ledger.complete
    assert ledger.problems() == ["4 of 6 documents were never answered"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1]), "names another request"),
        (msgpack.packb({"id": "b"}), "names another request"),
        (msgpack.packb({"id": "a", "error": {"code": "overloaded"}}), "failed: overloaded"),
        (
            msgpack.packb({"id": "a", "data": [{"index": 0, "error": {"code": "too_long"}}]}),
            "document 0 of a failed: too_long",
        ),
        (reply("a", unit(1), first=7), "document 7 of a was never sent"),
        (reply("a", np.full(8, np.nan, dtype="<f4").tobytes()), "not finite"),
        (reply("a", np.ones(8, dtype="<f4").tobytes()), "length 2.8284"),
        (reply("a", b""), "no float32 vector"),
    ],
)
def test_every_wrong_answer_is_a_failure(body: bytes, message: str) -> None:
    ledger = Ledger({"a": 1})
    ledger.record("a", body)
    assert ledger.complete, "there is no use in waiting for more"
    assert len(ledger.problems()) == 1
    assert message in ledger.problems()[0]


def test_vectors_of_different_sizes_are_a_failure() -> None:
    ledger = Ledger({"a": 2})
    ledger.record("a", reply("a", unit(1), np.array([1.0], dtype="<f4").tobytes()))
    assert ledger.problems() == ["vectors of different sizes: [1, 8]"]


def test_replies_to_others_are_counted_and_ignored() -> None:
    """D11: an unknown request id is no error."""
    ledger = Ledger({"a": 1})
    ledger.record("zzz", b"anything")
    assert ledger.unknown == 1
    assert not ledger.complete


def test_many_problems_are_told_shortly() -> None:
    ledger = Ledger({"a": 1})
    for _ in range(9):
        ledger.record("a", b"\xc1")
    assert len(ledger.problems()) == 6
    assert ledger.problems()[-1] == "and 4 more"


def test_vector_fault_takes_whatever_a_reply_may_hold() -> None:
    assert vector_fault(unit(1)) is None
    for value in (None, [0.1], "text", b"abc"):
        assert vector_fault(value) == "no float32 vector"


def test_nearest_is_by_cosine_and_ties_by_row() -> None:
    matrix = np.array([[0, 1], [1, 0], [0, 1], [0.6, 0.8]], dtype=np.float32)
    query = np.array([0, 1], dtype=np.float32)
    assert [row for row, _ in nearest(matrix, query, 3)] == [0, 2, 3]
    assert nearest(matrix, query, 10)[-1] == (1, 0.0)


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 51)]
    assert quantile(values, 0.5) == 25.0
    assert quantile(values, 0.99) == 50.0
    assert quantile([7.0], 0.5) == 7.0


def test_metrics_are_read_as_our_service_writes_them() -> None:
    metrics = PrometheusMetrics()
    for tokens in (100.0, 300.0):
        metrics.observe("batch_tokens", tokens, model="m")
    metrics.count("padding_avoided_tokens_total", 50.0, model="m")
    metrics.count("padding_avoided_tokens_total", 7.0, model="other")
    sums = parse_metrics(metrics.exposition().decode())
    assert sums["embedstream_batch_tokens_sum"] == {"m": 400.0}
    assert sums["embedstream_batch_tokens_count"] == {"m": 2.0}
    assert sums["embedstream_padding_avoided_tokens_total"] == {"m": 50.0, "other": 7.0}

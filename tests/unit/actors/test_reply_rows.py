"""The short way of a reply that is one float32 vector an item: the bytes of the long one, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.messages import InFlight
from actors.replies import build_reply
from actors.reply_records import HEADER_ROOM_BYTES, MAX_ROWS_NUMBERS, encode, rows_record
from gpu.batch import ItemResult, ModelInfo
from schemas._parts import WIDENING_BYTES
from schemas.errors import EmbedstreamError, ModelError
from schemas.requests import ClassifyRequest, EmbedRequest, Text
from tests.support.stations import in_flight

INFO = ModelInfo(
    name="m", fingerprint="sha256:0", architecture="BertModel", dtype="float32", device="cpu",
    tasks=frozenset({"embed"}), max_tokens=8, max_batch_tokens=8, dimensions=16,
)  # fmt: skip


def ended(outcomes: list[Any], *, prompt: str | None = None, **fields: Any) -> InFlight:
    """A request whose items have these outcomes."""
    items = tuple(Text("x") for _ in outcomes)
    one = in_flight(EmbedRequest(**{"id": "r", "input": items, **fields}))
    one.outcomes[:] = outcomes
    one.tokens[:] = [3 + i for i in range(len(outcomes))]
    one.truncated[:] = [i % 2 == 1 for i in range(len(outcomes))]
    one.first_forward_at, one.forward_s, one.prompt = 0.25, 0.003, prompt
    return one


def vectors(n: int, size: int = 16) -> list[ItemResult]:
    table = np.random.default_rng(n).standard_normal((n, size)).astype(np.float32)
    return [ItemResult(dense=row) for row in table]


def both(one: InFlight, info: ModelInfo = INFO, limit: int | None = None) -> tuple[bytes | None, list[bytes]]:  # fmt: skip
    """What the short way writes, and the long one."""
    reply = build_reply(one, info, now=1.0, received_at=0.0)
    long = encode(reply, limit, one.request.content_type, one.request.encoding)
    return rows_record(one, info, 1.0, 0.0, limit), long


@given(
    n=st.integers(1, 40),
    size=st.integers(1, 70),
    request_id=st.text(min_size=1, max_size=40),
    normalize=st.none() | st.booleans(),
    outputs=st.sampled_from([(), ("dense",)]),
    prompt=st.none() | st.text(max_size=10),
    metadata=st.none()
    | st.dictionaries(
        st.text(max_size=5), st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=5)
    ),
)
def test_the_short_way_writes_the_bytes_of_the_long_one(
    n: int, size: int, request_id: str, normalize: bool | None, outputs: tuple[Any, ...],
    prompt: str | None, metadata: dict[str, Any] | None,
) -> None:  # fmt: skip
    one = ended(
        vectors(n, size), prompt=prompt, id=request_id, normalize=normalize, outputs=outputs,
        metadata=metadata,
    )  # fmt: skip
    short, long = both(one)
    assert [short] == long


def test_rows_that_do_not_lie_together_are_written_all_the_same() -> None:
    table = np.arange(64, dtype=np.float32).reshape(4, 16)
    for rows in (table[::2], table.T[:3], table[:, ::2], table[:1, ::4]):
        short, long = both(ended([ItemResult(dense=row) for row in rows]))
        assert short in (None, *long)
    short, long = both(ended([ItemResult(dense=row) for row in table[::2]]))
    assert [short] == long


NAN = np.full(16, np.nan, np.float32)


@pytest.mark.parametrize(
    "one",
    [
        ended([*vectors(2), ModelError("x", items=(2,))]),
        ended([*vectors(2), ItemResult(dense=NAN)]),
        ended([*vectors(2), None]),
        ended([*vectors(2), *vectors(1, 8)]),
        ended([ItemResult(dense=np.zeros(0, np.float32))]),
        ended([ItemResult(dense=NAN[:1] * 0 + 1, scores=np.ones(1, np.float32))]),
        ended([ItemResult(multivector=np.ones((2, 3), np.float32))], outputs=("multivector",)),
        ended(vectors(2), dtype="float16"),
        ended(vectors(2), encoding="float"),
        ended(vectors(2), encoding="base64", content_type="application/json"),
        ended(vectors(2), encoding="bytes", content_type="application/json"),
        ended(vectors(2), metadata={"x": object()}),
        ended(vectors(2), id="\ud800"),
        ended(vectors(2, MAX_ROWS_NUMBERS)),
    ],
)
def test_what_is_no_row_of_plain_vectors_is_left_to_the_long_way(one: InFlight) -> None:
    assert rows_record(one, INFO, 1.0, 0.0, None) is None


def test_what_failed_or_is_no_embedding_is_left_to_the_long_way() -> None:
    failed = ended(vectors(1))
    failed.failure = EmbedstreamError("x")
    classified = in_flight(ClassifyRequest(id="r", input=(Text("x"),)))
    classified.outcomes[:] = vectors(1)
    for one in (failed, classified):
        assert rows_record(one, INFO, 1.0, 0.0, None) is None


@given(limit=st.integers(HEADER_ROOM_BYTES + 100, HEADER_ROOM_BYTES + 2000))
def test_under_a_limit_it_writes_one_whole_record_or_nothing(limit: int) -> None:
    one = ended(vectors(12))
    short, long = both(one, limit=limit)
    assert short is None or [short] == long
    whole = rows_record(one, INFO, 1.0, 0.0, None)
    assert whole is not None
    assert (short is not None) == (len(whole) + WIDENING_BYTES <= limit - HEADER_ROOM_BYTES)

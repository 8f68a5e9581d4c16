"""Outputs and dtypes in a reply: quantisation, scales, sizes, and the round trip over the wire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.replies import build_reply, quantize
from actors.reply_records import OFF_LOOP_NUMBERS, numbers_in
from gpu.batch import ItemResult, ModelInfo
from schemas.codec import decode_reply, encode_reply
from schemas.errors import NonFinite
from schemas.requests import DType, EmbedRequest, Text
from schemas.results import Reply

INFO = ModelInfo(
    name="m", fingerprint="sha256:0", architecture="XLMRobertaModel", dtype="float32", device="cpu",
    tasks=frozenset({"embed"}), max_tokens=8, max_batch_tokens=8, dimensions=16,
    multivector_dimensions=6, normalized=True,
    outputs=frozenset({"dense", "sparse", "multivector"}),
)  # fmt: skip


def rows(n: int, size: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, size)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def reply_to(outcomes: list[ItemResult], info: ModelInfo = INFO, **fields: Any) -> Reply:
    """Built, written and read back, as a client sees it."""
    request = EmbedRequest(id="r", input=tuple(Text("x") for _ in outcomes), **fields)
    in_flight: Any = SimpleNamespace(
        request=request, failure=None, outcomes=outcomes, tokens=[3] * len(outcomes),
        truncated=[False] * len(outcomes), prompt=None, forward_s=0.0, first_forward_at=None,
        labels=(),
    )  # fmt: skip
    built = build_reply(in_flight, info, now=1.0, received_at=0.0)
    read = decode_reply(encode_reply(built), {"content-type": b"application/msgpack"})
    assert isinstance(read, Reply)
    return read


FULL = ItemResult(
    dense=rows(1, 16)[0],
    sparse=(np.array([3, 77], np.int32), np.array([0.5, 1.25], np.float32)),
    multivector=rows(4, 6),
)


def test_every_output_survives_the_wire() -> None:
    reply = reply_to([FULL], outputs=("dense", "sparse", "multivector"))
    item = reply.items[0]
    assert (reply.dimensions, reply.dtype, reply.normalized) == (16, "float32", True)
    assert FULL.dense is not None and FULL.multivector is not None
    assert item.embedding == FULL.dense.tobytes() and item.scale is None
    assert item.sparse is not None
    assert (item.sparse.indices, item.sparse.values) == ([3, 77], [0.5, 1.25])
    assert item.multivector == [row.tobytes() for row in FULL.multivector]
    assert item.scales is None


def test_int8_token_vectors_have_a_scale_each() -> None:
    """D09: integer x scale is within half a step of every component, vector by vector."""
    vectors = rows(5, 6) * np.array([[1e-4], [1], [100], [1e4], [0]], np.float32)
    item = reply_to(
        [ItemResult(multivector=vectors)], outputs=("multivector",), dtype="int8"
    ).items[0]
    assert item.multivector is not None and item.scales is not None
    assert len(item.scales) == len(item.multivector) == 5 and item.scale is None
    for data, scale, vector in zip(item.multivector, item.scales, vectors, strict=True):
        restored = np.frombuffer(data, np.int8) * scale
        assert np.abs(restored - vector).max() <= 0.5001 * scale
        assert scale == (np.abs(vector).max() / 127 if vector.any() else 1.0)


def test_an_item_without_token_vectors_has_empty_lists() -> None:
    """A document of skipped tokens only: no vector is an answer, not an absence."""
    empty = ItemResult(multivector=np.zeros((0, 6), np.float32))
    item = reply_to([empty], outputs=("multivector",), dtype="int8").items[0]
    assert (item.multivector, item.scales) == ([], [])


def test_the_size_in_the_reply_is_that_of_its_vectors() -> None:
    assert reply_to([FULL], outputs=("dense", "multivector")).dimensions == 16
    tokens = ItemResult(multivector=rows(2, 6))
    assert reply_to([tokens], outputs=("multivector",)).dimensions == 6
    # 16 is accepted because it is native for the dense vector; it says nothing of these
    assert reply_to([tokens], outputs=("multivector",), dimensions=16).dimensions == 6
    colbert = ModelInfo(
        **{f: getattr(INFO, f) for f in INFO.__slots__}
        | {"dimensions": None, "default_outputs": ("multivector",)}
    )
    cut = ItemResult(multivector=rows(2, 4))
    assert reply_to([cut], colbert, dimensions=4).dimensions == 4
    assert reply_to([tokens], colbert).dimensions == 6


def test_a_sparse_reply_names_no_size_and_no_dtype() -> None:
    sparse = ItemResult(sparse=FULL.sparse)
    reply = reply_to([sparse], outputs=("sparse",), dtype="int8")
    assert (reply.dimensions, reply.dtype, reply.normalized) == (None, None, None)
    assert reply.items[0].sparse is not None
    assert reply.items[0].sparse.values == [0.5, 1.25], "weights stay float32"


def test_outputs_that_were_not_named_are_the_models_own() -> None:
    info = ModelInfo(
        **{f: getattr(INFO, f) for f in INFO.__slots__}
        | {"dimensions": None, "default_outputs": ("sparse",)}
    )
    reply = reply_to([ItemResult(sparse=FULL.sparse)], info)
    assert reply.dimensions is None and reply.items[0].sparse is not None


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "binary"])
@given(
    vector=st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=1, max_size=40)
)
def test_round_trip_errors_are_bounded(dtype: DType, vector: list[float]) -> None:
    """D09: float32 exactly; float16 within 2^-11 relative (or its smallest step); int8 within half
    a step; binary keeps every sign."""
    x = np.array(vector, np.float32)
    data, scale = quantize(x, dtype)
    assert (scale is not None) == (dtype == "int8")
    if dtype == "float32":
        assert data == x.astype("<f4").tobytes()
    elif dtype == "float16":
        got = np.frombuffer(data, "<f2").astype(np.float64)
        assert (np.abs(got - x) <= np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)).all()
    elif dtype == "int8":
        assert scale is not None
        got = np.frombuffer(data, np.int8) * scale
        assert (np.abs(got - x) <= scale * 0.5001).all()
    else:
        bits = np.unpackbits(np.frombuffer(data, np.uint8))[: len(x)]
        assert (bits.astype(bool) == (x > 0)).all()


def test_int8_and_binary_keep_the_direction_of_unit_vectors() -> None:
    """D09: the figures of docs/outputs.md, on random directions of 384 numbers."""
    x = rows(500, 384)
    restored = np.stack([
        np.frombuffer(data, np.int8) * np.float64(scale)
        for data, scale in (quantize(row, "int8") for row in x)
        if scale is not None
    ])  # fmt: skip
    cosine = (x * restored).sum(1) / np.linalg.norm(restored, axis=1)
    assert len(restored) == 500 and cosine.min() >= 0.9999
    half = np.stack([np.frombuffer(quantize(row, "float16")[0], "<f2") for row in x])
    assert np.abs(half.astype(np.float32) - x).max() <= 1e-3


def test_float16_overflow_is_an_error_of_that_item() -> None:
    """A02, D09: a component past 65,504 is refused, in a dense and in a token-level vector."""
    big = np.full(6, 7e4, np.float32)
    with pytest.raises(NonFinite):
        quantize(big, "float16")
    good, bad = ItemResult(multivector=rows(2, 6)), ItemResult(multivector=np.stack([big, big]))
    items = reply_to([good, bad], outputs=("multivector",), dtype="float16").items
    assert items[0].error is None and items[0].multivector is not None
    assert items[1].error is not None and items[1].error.code == "non_finite"


def test_a_reply_of_many_token_vectors_is_encoded_off_the_event_loop() -> None:
    """E03: what decides is every number in the reply, not one vector per item."""
    many = [ItemResult(multivector=rows(4000, 6))]
    assert numbers_in(reply_to(many, outputs=("multivector",))) > OFF_LOOP_NUMBERS
    weights = (np.arange(11_000, dtype=np.int32), np.ones(11_000, np.float32))
    assert numbers_in(reply_to([ItemResult(sparse=weights)], outputs=("sparse",))) > 20_000
    assert numbers_in(reply_to([FULL], outputs=("dense", "sparse", "multivector"))) < 1000

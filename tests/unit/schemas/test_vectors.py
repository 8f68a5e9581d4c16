"""Vectors between bytes, numbers and base64: exact, little-endian, finite."""

from __future__ import annotations

import base64
import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import vectors as v
from schemas.errors import InvalidRequest, NonFinite

float32s = st.floats(allow_nan=False, allow_infinity=False, width=32)
float16s = st.floats(allow_nan=False, allow_infinity=False, width=16)


@given(st.lists(float32s, max_size=40))
def test_float32_round_trips_exactly(values):
    data = struct.pack(f"<{len(values)}f", *values)
    assert v.to_numbers(data, "float32") == values
    assert v.from_numbers(values, "float32") == data
    for encoding in ("bytes", "float", "base64"):
        assert v.from_wire(v.to_wire(data, "float32", encoding), "float32") == data


@given(st.lists(float16s, max_size=40))
def test_float16_round_trips_exactly(values):
    data = struct.pack(f"<{len(values)}e", *values)
    assert v.from_wire(v.to_wire(data, "float16", "float"), "float16") == data


@given(st.binary(max_size=64))
def test_int8_and_binary_round_trip_exactly(data):
    for dtype in ("int8", "binary"):
        for encoding in ("bytes", "float", "base64"):
            assert v.from_wire(v.to_wire(data, dtype, encoding), dtype) == data


def test_numbers_of_each_dtype():
    assert v.to_wire(b"\x00\x7f\x80\xff", "int8", "float") == [0, 127, -128, -1]
    assert v.to_wire(b"\x80\x01", "binary", "float") == [128, 1]
    assert v.to_wire(b"\x00\x3c\x00\xc0", "float16", "float") == [1.0, -2.0]


def test_base64_is_little_endian_float32():
    """D01: length 4*d, decodes with `<f4`."""
    data = struct.pack("<3f", 1.0, -2.5, 0.1)
    text = v.to_wire(data, "float32", "base64")
    assert struct.unpack("<3f", base64.b64decode(text)) == struct.unpack("<3f", data)


@pytest.mark.parametrize("encoding", ["bytes", "float", "base64"])
@pytest.mark.parametrize(("dtype", "code"), [("float32", "f"), ("float16", "e")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_refused_in_every_encoding(encoding, dtype, code, bad):
    """A04: no encoding carries NaN."""
    data = struct.pack(f"<3{code}", 1.0, bad, 2.0)
    with pytest.raises(NonFinite):
        v.to_wire(data, dtype, encoding)
    with pytest.raises(NonFinite):
        v.from_wire(data, dtype)


@given(st.binary(max_size=80))
def test_finite_check_agrees_with_the_numbers(data):
    for dtype, code, size in (("float32", "f", 4), ("float16", "e", 2)):
        whole = data[: len(data) // size * size]
        numbers = struct.unpack(f"<{len(whole) // size}{code}", whole)
        assert v.all_finite(whole, dtype) == all(map(math.isfinite, numbers))


def test_largest_floats_are_finite():
    data = struct.pack("<3f", 3.4028234663852886e38, -3.4028234663852886e38, 1.7014118346046923e38)
    assert v.all_finite(data, "float32")
    assert v.all_finite(struct.pack("<e", 65504.0), "float16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ragged_bytes_are_refused(dtype):
    with pytest.raises(InvalidRequest):
        v.check_vector(b"abc", dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (["a"], "float32"), ([1e39], "float32"), ([70000.0], "float16"), ([200], "int8"),
        ([1.5], "int8"), ([256], "binary"), ([-1], "binary"), ("@@", "float32"), (3, "float32"),
        ({"a": 1}, "float32"), ([[1.0]], "float32"), ([None], "float16"), ("YWI=", "float32"),
    ],
)  # fmt: skip
def test_what_is_no_vector_is_refused(value, dtype):
    with pytest.raises((InvalidRequest, NonFinite)):
        v.from_wire(value, dtype)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 384, 65_535, 65_536])
def test_single_precision_array_for_msgpack(n):
    values = [(-1) ** i * i / 7 for i in range(n)]
    data = struct.pack(f"<{n}f", *values)
    packed = v.single_floats_msgpack(data)
    assert packed == msgpack.packb(list(struct.unpack(f"<{n}f", data)), use_single_float=True)

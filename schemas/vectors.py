"""Vectors between memory and wire: little-endian bytes <-> numbers <-> base64.

Who calls it: `schemas.codec` when it writes and reads replies; clients that decode vectors.
What must stay true: standard library only (the client vendors this file); bytes are already in the
reply's dtype (quantising float32 into another dtype happens in the service, not here); every number
survives a round trip exactly; nothing non-finite passes.

| dtype   | bytes per value            | as numbers                     |
|---------|----------------------------|--------------------------------|
| float32 | 4, IEEE 754 binary32, LE   | float                          |
| float16 | 2, IEEE 754 binary16, LE   | float                          |
| int8    | 1, two's complement        | int, -128..127                 |
| binary  | 1 per 8 signs, MSB first   | int, 0..255: one per *byte*    |
"""

from __future__ import annotations

import base64
import binascii
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

from .errors import InvalidRequest, NonFinite
from .requests import DType, Encoding

ITEM_BYTES: Final[dict[DType, int]] = {"float32": 4, "float16": 2, "int8": 1, "binary": 1}
_LITTLE: Final = sys.byteorder == "little"
_F32_TOP_SUSPECT: Final = (0x7F, 0xFF)  # exponent 254 or 255: |x| >= 2**127 or non-finite
_F16_NON_FINITE: Final = bytes(1 if b & 0x7C == 0x7C else 0 for b in range(256))


def all_finite(data: bytes, dtype: DType) -> bool:
    """True when no float in `data` is NaN or infinite. Integers always are finite."""
    if dtype == "float32":
        top = data[3::4]
        if _F32_TOP_SUSPECT[0] not in top and _F32_TOP_SUSPECT[1] not in top:
            return True
        second = data[2::4]
        return not any(t & 0x7F == 0x7F and s & 0x80 for t, s in zip(top, second, strict=True))
    if dtype == "float16":
        return 1 not in data[1::2].translate(_F16_NON_FINITE)
    return True


def check_vector(data: bytes, dtype: DType) -> None:
    """Refuse bytes that are no whole finite vector.

    Raises:
        InvalidRequest: the length is no multiple of the value size.
        NonFinite: a value is NaN or infinite.
    """
    if len(data) % ITEM_BYTES[dtype]:
        raise InvalidRequest(
            f"a {dtype} vector needs a multiple of {ITEM_BYTES[dtype]} bytes", given=len(data)
        )
    if not all_finite(data, dtype):
        raise NonFinite("a vector holds NaN or infinity")


def to_numbers(data: bytes, dtype: DType) -> list[float] | list[int]:
    """Bytes of one vector -> its numbers (for `binary`: one int per packed byte)."""
    check_vector(data, dtype)
    if dtype == "float32":
        values = array("f", data)
        if not _LITTLE:
            values.byteswap()
        return values.tolist()
    if dtype == "float16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "int8":
        return array("b", data).tolist()
    return list(data)


def from_numbers(values: Sequence[float], dtype: DType) -> bytes:
    """Numbers of one vector -> little-endian bytes; the inverse of `to_numbers`.

    Raises:
        InvalidRequest: a value is no number, or does not fit the dtype.
        NonFinite: a value is NaN or infinite.
    """
    try:
        if dtype == "float32":
            packed = array("f", values)
            if not _LITTLE:
                packed.byteswap()
            data = packed.tobytes()
        elif dtype == "float16":
            data = struct.pack(f"<{len(values)}e", *values)
        elif dtype == "int8":
            data = array("b", values).tobytes()
        else:
            data = array("B", values).tobytes()
    except (TypeError, ValueError, OverflowError, struct.error):
        raise InvalidRequest(f"a value does not fit a vector of {dtype}") from None
    check_vector(data, dtype)
    return data


def to_base64(data: bytes) -> str:
    """Standard base64 with padding, as OpenAI's `encoding_format: base64` has it."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: str) -> bytes:
    """Bytes of a base64 string. Raises `InvalidRequest` for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("not valid base64") from None


def to_wire(
    embedding: bytes, dtype: DType, encoding: Encoding
) -> bytes | str | list[float] | list[int]:
    """One vector as the reply carries it: raw bytes, base64 text, or a list of numbers.

    Raises:
        NonFinite: a value is NaN or infinite, whatever the encoding.
    """
    if encoding == "float":
        return to_numbers(embedding, dtype)
    check_vector(embedding, dtype)
    return embedding if encoding == "bytes" else to_base64(embedding)


def from_wire(value: object, dtype: DType) -> bytes:
    """One received vector, in whichever of the three forms, as little-endian bytes.

    Raises:
        InvalidRequest: the value is none of them.
    """
    if isinstance(value, str):
        value = from_base64(value)
    if isinstance(value, bytes):
        check_vector(value, dtype)
        return value
    if isinstance(value, list):
        return from_numbers(value, dtype)
    raise InvalidRequest("a vector must be bytes, base64 text or a list of numbers")


def single_floats_msgpack(data: bytes) -> bytes:
    """A float32 vector as a msgpack array of single-precision floats (5 bytes a value).

    Packers write Python floats as 8-byte doubles; interleaving the type byte keeps the reply at
    the size of the numbers, without a loop.
    """
    n = len(data) // 4
    if n < 16:
        header = bytes((0x90 | n,))
    elif n < 1 << 16:
        header = struct.pack(">BH", 0xDC, n)
    else:
        header = struct.pack(">BI", 0xDD, n)
    out = bytearray(5 * n)
    out[0::5] = b"\xca" * n
    for i in range(4):
        out[1 + i :: 5] = data[3 - i :: 4]
    return header + bytes(out)

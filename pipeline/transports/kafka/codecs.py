"""Decompression with an end: a few kilobytes of a hostile producer must not become gigabytes here.

Who calls it: `client_gaps.install`.
What must stay true: a batch that holds more than `MAX_BATCH_BYTES` is an unreadable one, at the cost of that
much memory at most; every other batch is decoded as ever.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cramjam
from aiokafka import codec
from aiokafka.errors import CorruptRecordException

MAX_BATCH_BYTES = 128 * 1024 * 1024
"""Of one batch once it is decompressed. Brokers take batches of 1 MiB unless told otherwise."""
_FIRST_BYTES = 1 << 20
_USUAL_RATIO = 16
_GROWTH = 8
_XERIAL_HEADER_BYTES = 16
_FULL = "failed to write whole buffer"  # what cramjam says


class TooLarge(CorruptRecordException):  # type: ignore[misc]
    """The text is ours and quotes nothing."""

    def __init__(self) -> None:
        super().__init__(f"it holds more than {MAX_BATCH_BYTES} bytes once it is decompressed")


def _gzip(payload: Any) -> bytes:
    decoder = zlib.decompressobj(wbits=31)
    found = decoder.decompress(bytes(payload), MAX_BATCH_BYTES + 1)
    if len(found) > MAX_BATCH_BYTES:
        raise TooLarge
    if not decoder.eof:
        raise CorruptRecordException("its gzip stream ends early")
    return found


def _growing(decompress_into: Callable[[bytes, bytearray], int]) -> Callable[[Any], bytes]:
    """Into a buffer that is as large as it has to be, up to the bound."""

    def decode(payload: Any) -> bytes:
        data = bytes(payload)
        size = min(MAX_BATCH_BYTES, max(_FIRST_BYTES, _USUAL_RATIO * len(data)))
        while True:
            room = bytearray(size)
            try:
                n = decompress_into(data, room)
            except Exception as error:
                if _FULL not in str(error):
                    raise
                if size == MAX_BATCH_BYTES:
                    raise TooLarge from None
                size = min(MAX_BATCH_BYTES, _GROWTH * size)
            else:
                return bytes(memoryview(room)[:n])

    return decode


def _snappy(payload: Any) -> bytes:
    data = memoryview(payload)
    if not codec._detect_xerial_stream(data):
        size = cramjam.snappy.decompress_raw_len(data)
    else:
        size, at = 0, _XERIAL_HEADER_BYTES
        while at < len(data) and size <= MAX_BATCH_BYTES:
            (length,) = struct.unpack_from("!i", data, at)
            if length < 0:
                raise CorruptRecordException("a block of its snappy stream has a negative length")
            size += cramjam.snappy.decompress_raw_len(data[at + 4 : at + 4 + length])
            at += 4 + length
    if size > MAX_BATCH_BYTES:
        raise TooLarge
    return bytes(codec.snappy_decode(data))


def bound(*modules: ModuleType) -> None:
    """Make these readers of batches decompress so."""
    decoders = {
        "gzip_decode": _gzip,
        "snappy_decode": _snappy,
        "lz4_decode": _growing(cramjam.lz4.decompress_into),
        "zstd_decode": _growing(cramjam.zstd.decompress_into),
    }
    for module in modules:
        for name, decoder in decoders.items():
            if hasattr(module, name):
                setattr(module, name, decoder)

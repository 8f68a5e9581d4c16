"""Fetched batches that a hostile producer wrote, read through aiokafka's own fetcher."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import aiokafka.consumer.fetcher as fetcher
import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from pipeline.transports.kafka import client_gaps as kafka_records

CRC_AT, CRC_FROM = struct.calcsize(">qiib"), struct.calcsize(">qiibI")


@pytest.fixture
def installed() -> Iterator[None]:
    original = fetcher.MemoryRecords
    kafka_records.install()
    yield
    fetcher.MemoryRecords = original


def batch(base_offset: int, *names: str, break_name: str | None = None) -> bytes:
    """One record per header name; `break_name` becomes bytes that are no UTF-8."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=-1, producer_epoch=-1,
        base_sequence=-1, batch_size=2**20,
    )  # fmt: skip
    for number, name in enumerate(names):
        builder.append(number, timestamp=1, key=b"k", value=name.encode(), headers=[(name, b"h")])
    raw = bytearray(builder.build())
    if break_name is not None:
        at = raw.rindex(break_name.encode())  # the value comes first, the header's name behind it
        raw[at : at + 2] = b"\xff\xfe"
    struct.pack_into(">q", raw, 0, base_offset)
    struct.pack_into(">I", raw, CRC_AT, calc_crc32c(memoryview(raw)[CRC_FROM:]))
    return bytes(raw)


def read(raw: bytes, fetch_offset: int = 0) -> list[tuple[int, bytes, str]]:
    records = fetcher.PartitionRecords(
        TopicPartition("t", 0), fetcher.MemoryRecords(raw), [], fetch_offset, None, None, True, 0
    )
    return [(one.offset, one.value, one.headers[0][0]) for one in records]


@pytest.mark.usefixtures("installed")
def test_a_header_name_that_is_no_utf8_costs_neither_the_service_nor_its_neighbours() -> None:
    """E13: the record and those around it come out, each once, the name with U+FFFD in it."""
    raw = batch(0, "aaaa", "bbbb", "cccc", break_name="bbbb") + batch(3, "dddd")
    assert read(raw) == [
        (0, b"aaaa", "aaaa"),
        (1, b"bbbb", "\ufffd\ufffdbb"),
        (2, b"cccc", "cccc"),
        (3, b"dddd", "dddd"),
    ]
    assert [offset for offset, _, _ in read(raw, fetch_offset=2)] == [2, 3]


@pytest.mark.usefixtures("installed")
def test_other_batches_are_read_as_ever() -> None:
    raw = batch(7, "x" * 300, "yy")
    assert read(raw, 7) == [(7, b"x" * 300, "x" * 300), (8, b"yy", "yy")]
    assert read(raw[:-3], 7) == [], "a batch cut by the fetch size is left for the next fetch"
    broken = bytearray(raw)
    broken[-1] ^= 1
    with pytest.raises(fetcher.Errors.CorruptRecordException):
        read(bytes(broken), 7)

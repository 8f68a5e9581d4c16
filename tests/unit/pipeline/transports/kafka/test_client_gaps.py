"""Fetched batches that a hostile producer or a disk made, read through aiokafka's own fetcher."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import aiokafka.consumer.fetcher as fetcher
import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from pipeline.transports.kafka import client_gaps
from pipeline.transports.kafka.client_gaps import MAX_READS, UnreadableBatch

CRC_AT, CRC_FROM = struct.calcsize(">qiib"), struct.calcsize(">qiibI")
GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    original = fetcher.MemoryRecords, fetcher.PartitionRecords
    client_gaps.install()
    client_gaps._reads._counts.clear()
    yield
    fetcher.MemoryRecords, fetcher.PartitionRecords = original


def batch(base_offset: int, *names: str, break_name: str | None = None, codec: int = 0) -> bytes:
    """One record per header name; `break_name` becomes bytes that are no UTF-8."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=0, producer_id=-1, producer_epoch=-1,
        base_sequence=-1, batch_size=2**20,
    )  # fmt: skip
    for number, name in enumerate(names):
        builder.append(number, timestamp=1, key=b"k", value=name.encode(), headers=[(name, b"h")])
    raw = bytearray(builder.build())
    if break_name is not None:
        at = raw.rindex(break_name.encode())  # the value comes first, the header's name behind it
        raw[at : at + 2] = b"\xff\xfe"
    struct.pack_into(">q", raw, 0, base_offset)
    return sealed(raw)


def sealed(raw: bytes | bytearray) -> bytes:
    """With the right checksum."""
    copy = bytearray(raw)
    struct.pack_into(">I", copy, CRC_AT, calc_crc32c(memoryview(copy)[CRC_FROM:]))
    return bytes(copy)


def fetch(raw: bytes, fetch_offset: int = 0) -> tuple[list[Any], int]:
    """Records of one fetch, and where the next one begins."""
    records = fetcher.PartitionRecords(
        TopicPartition("t", 0), fetcher.MemoryRecords(raw), [], fetch_offset, None, None, True, 0
    )
    return list(records), records.next_fetch_offset


def read(raw: bytes, fetch_offset: int = 0) -> list[tuple[int, bytes, str]]:
    return [(one.offset, one.value, one.headers[0][0]) for one in fetch(raw, fetch_offset)[0]]


def read_all(log: list[bytes], fetch_offset: int = 0) -> list[Any]:
    """Fetch again and again, as a broker answers: from the batch that holds the offset."""
    found: list[Any] = []
    end = max(struct.unpack_from(">q", raw)[0] for raw in log) + 1000
    for _ in range(200):
        rest = [
            raw
            for raw, following in zip(log, [*log[1:], None], strict=True)
            if following is None or struct.unpack_from(">q", following)[0] > fetch_offset
        ]
        records, fetch_offset = fetch(b"".join(rest), fetch_offset)
        found += records
        if fetch_offset >= end or (not records and len(rest) == 1 and fetch_offset > end - 1000):
            return found
    return found


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


def test_other_batches_are_read_as_ever() -> None:
    raw = batch(7, "x" * 300, "yy")
    assert read(raw, 7) == [(7, b"x" * 300, "x" * 300), (8, b"yy", "yy")]
    assert read(raw[:-3], 7) == [], "a batch cut by the fetch size is left for the next fetch"


@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY, LZ4, ZSTD])
def test_every_codec_is_read_after_the_plain_install(codec: int) -> None:
    """K01"""
    assert [value for _, value, _ in read(batch(0, "aa", "bb", codec=codec))] == [b"aa", b"bb"]


def bad_checksum() -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc"))
    raw[-1] ^= 1
    return bytes(raw)


def unknown_format() -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc"))
    raw[CRC_AT - 1] = 7
    return sealed(raw)


def unknown_codec() -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc"))
    raw[CRC_FROM + 1] |= 6
    return sealed(raw)


def wrong_codec(codec: int) -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc"))
    raw[CRC_FROM + 1] |= codec
    return sealed(raw)


def too_many_records() -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc"))
    struct.pack_into(">i", raw, 57, 1)
    return sealed(raw)


def shorter_than_its_header() -> bytes:
    raw = bytearray(batch(2, "bbb", "ccc")[:40])
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    return bytes(raw)


BROKEN = {
    "checksum": bad_checksum(),
    "format": unknown_format(),
    "codec": unknown_codec(),
    "gzip": wrong_codec(GZIP),
    "snappy": wrong_codec(SNAPPY),
    "lz4": wrong_codec(LZ4),
    "zstd": wrong_codec(ZSTD),
    "count": too_many_records(),
    "short": shorter_than_its_header(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_batch_that_cannot_be_decoded_costs_itself_only(name: str) -> None:
    """K01: tried a bounded number of times, then its offsets stand in one record; the rest goes on."""
    log = [batch(0, "aa", "ab"), BROKEN[name], batch(4, "dd")]
    found = read_all(log)
    good = [one.value for one in found if not isinstance(one.value, UnreadableBatch)]
    bad = [one for one in found if isinstance(one.value, UnreadableBatch)]
    assert good == ([b"aa", b"ab", b"dd"] if name != "count" else [b"aa", b"ab", b"bbb", b"dd"])
    assert [(one.value.first_offset, one.offset) for one in bad] == [(2 + (name == "count"), 3)]
    assert bytes(bad[0].value) == BROKEN[name]
    assert "cannot be decoded" in bad[0].value.reason


def test_a_batch_that_is_whole_at_the_next_fetch_was_damaged_on_the_way() -> None:
    """K01: nothing is given up at the first try."""
    for _ in range(MAX_READS - 1):
        assert fetch(batch(0, "aa") + bad_checksum(), 0)[1] == 1
    records, position = fetch(batch(2, "bbb", "ccc"), 1)
    assert [one.value for one in records] == [b"bbb", b"ccc"]
    assert position == 4


def test_a_bad_batch_at_the_end_of_a_fetch_takes_no_offset_that_nothing_vouches_for() -> None:
    """K01: a damaged count of offsets must not step over batches that are not in this fetch."""
    raw = bytearray(batch(0, "aa", "bb"))
    struct.pack_into(">i", raw, 23, 1_000_000)  # last offset delta, and so a wrong checksum
    for _ in range(MAX_READS):
        records, position = fetch(bytes(raw), 0)
    assert [(one.offset, one.value.first_offset) for one in records] == [(0, 0)]
    assert position == 1


def test_a_fetch_into_the_middle_of_a_bad_batch_loses_nothing_silently() -> None:
    for _ in range(MAX_READS):
        records, position = fetch(bad_checksum() + batch(4, "dd"), 3)
    assert [(one.offset, one.value.first_offset) for one in records] == [(3, 3)]
    assert position == 4


def test_a_negative_length_ends_the_fetch_and_not_the_consumer() -> None:
    raw = bytearray(batch(2, "bbb"))
    struct.pack_into(">i", raw, 8, -12)
    for _ in range(MAX_READS):
        records, position = fetch(batch(0, "aa") + bytes(raw), 0)
    assert isinstance(records[-1].value, UnreadableBatch)
    assert position > 1


def test_no_reason_quotes_what_was_read() -> None:
    raw = sealed(batch(0, "secret-text")[:-4] + b"\xff" * 4)
    for _ in range(MAX_READS):
        records, _ = fetch(raw, 0)
    assert "secret" not in records[-1].value.reason

"""A batch that decompresses to gigabytes is unreadable, at a bounded cost; all others are read as ever."""

from __future__ import annotations

import tracemalloc

import pytest
from aiokafka import codec
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from pipeline.transports.kafka import client_gaps, codecs

CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


@pytest.fixture(autouse=True)
def _installed() -> None:
    client_gaps.install()


def batch(number: int, values: list[bytes]) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=number, is_transactional=0, producer_id=-1, producer_epoch=-1,
        base_sequence=-1, batch_size=1 << 30,
    )  # fmt: skip
    for offset, value in enumerate(values):
        builder.append(offset, timestamp=0, key=None, value=value, headers=[])
    return bytes(builder.build())


@pytest.mark.parametrize("name", CODECS)
def test_a_bomb_is_refused_and_what_fits_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "MAX_BATCH_BYTES", 4 << 20)
    fits, bomb = batch(CODECS[name], [bytes(3 << 20)]), batch(CODECS[name], [bytes(64 << 20)])
    assert len(bomb) < len(bytes(64 << 20)) / 10
    assert [record.value for record in DefaultRecordBatch(fits)] == [bytes(3 << 20)]
    tracemalloc.start()
    with pytest.raises(codecs.TooLarge, match="more than 4194304 bytes once it is decompressed"):
        list(DefaultRecordBatch(bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * (4 << 20) + len(bomb)


@given(st.sampled_from(sorted(CODECS)), st.lists(st.binary(max_size=2000), min_size=1, max_size=9))
def test_what_a_client_writes_is_read(name: str, values: list[bytes]) -> None:
    assert [record.value for record in DefaultRecordBatch(batch(CODECS[name], values))] == values


def test_both_forms_of_snappy_are_read_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for xerial in (True, False):
        packed = codec.snappy_encode(bytes(100_000), xerial_compatible=xerial)
        assert codecs._snappy(packed) == bytes(100_000)
        with monkeypatch.context() as lower:
            lower.setattr(codecs, "MAX_BATCH_BYTES", 99_999)
            with pytest.raises(codecs.TooLarge):
                codecs._snappy(packed)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_cut_or_damaged_is_an_error_of_its_own(name: str) -> None:
    whole = batch(CODECS[name], [b"some text " * 500])
    cut = whole[:8] + (len(whole) - 12 - 20).to_bytes(4, "big") + whole[12:-20]
    with pytest.raises(Exception) as caught:
        list(DefaultRecordBatch(cut))
    assert not isinstance(caught.value, codecs.TooLarge)

"""Reading fetched batches that aiokafka alone gives up on: one bad batch costs that batch only.

Who calls it: `consumer.start_consumer`, once, before the first consumer is made.
What must stay true: brokers check neither a header's name nor what a disk or another client did to a
batch, so a consumer meets both; whatever cannot be decoded is tried `MAX_READS` times (a network
may have damaged it) and then stands as one `UnreadableBatch` in the place of its records; nothing
that follows a readable length is ever skipped silently.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, SupportsIndex

import aiokafka.consumer.fetcher as fetcher
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record import default_records, legacy_records
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchPy
from aiokafka.record.legacy_records import LegacyRecordBatch

from pipeline.transports.kafka.codecs import TooLarge, bound

MAX_READS = 3
"""Fetches of a batch before it counts as unreadable."""
_MAX_REMEMBERED = 1000
_LENGTH_AT, _LENGTH_END, _MAGIC_AT = 8, 12, 16  # Kafka's record formats 0, 1 and 2
_DELTA_AT, _COUNT_AT, _HEADER_BYTES = 23, 57, 61  # format 2
_LEGACY_HEADER_BYTES = 26


class _Damaged(CorruptRecordException):  # type: ignore[misc]
    """Found here, not by aiokafka: the text is ours and quotes nothing."""


class UnreadableBatch(bytes):
    """The value of a record that stands for a batch nobody can decode: the batch's own bytes.

    first_offset  the first offset that is lost; the record's own offset is the last one
    reason        why, in words that quote nothing of it
    """

    first_offset: int
    reason: str

    def __new__(cls, raw: bytes, first_offset: int, reason: str) -> UnreadableBatch:
        made = super().__new__(cls, raw)
        made.first_offset, made.reason = first_offset, reason
        return made


class _Replacing(bytearray):
    """Bytes whose slices decode whatever they hold."""

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        return _Replacing(found) if isinstance(key, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return super().decode(encoding, "replace")


def _records_of(batch: Any, raw: memoryview) -> Iterator[Any]:
    """The batch's records; names of headers that are no UTF-8 come out with U+FFFD in them."""
    n_read = 0
    try:
        for record in batch:
            n_read += 1
            yield record
    except UnicodeDecodeError:
        slow = _DefaultRecordBatchPy(raw)
        slow._maybe_uncompress()
        slow._buffer = _Replacing(slow._buffer)
        for number, record in enumerate(slow):
            if number >= n_read:
                yield record


class _Records:
    """The batches of one fetched partition, as bytes. A last one that is not whole is left out."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def size_in_bytes(self) -> int:
        return len(self._data)

    def _end(self) -> int | None:
        """Where the next batch ends; None when it is not there as a whole."""
        if len(self._data) - self._at < _LENGTH_END:
            return None
        (length,) = struct.unpack_from(">i", self._data, self._at + _LENGTH_AT)
        if length < 0:  # nothing behind it can be found either
            return len(self._data)
        end = self._at + _LENGTH_END + int(length)
        return end if end <= len(self._data) else None

    def has_next(self) -> bool:
        return self._end() is not None

    def next_batch(self) -> memoryview:
        end = self._end()
        assert end is not None
        found, self._at = self._data[self._at : end], end
        return found

    def next_base_offset(self) -> int | None:
        """First offset of the batch that follows; None when nothing whole follows."""
        if not self.has_next():
            return None
        return int(struct.unpack_from(">q", self._data, self._at)[0])


class _Reads:
    """How often a batch could not be read. Bounded; the oldest are forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[TopicPartition, int], int] = OrderedDict()

    def may_try_again(self, partition: TopicPartition, base_offset: int) -> bool:
        key = (partition, base_offset)
        count = self._counts.pop(key, 0) + 1
        if count >= MAX_READS:
            return False
        self._counts[key] = count
        if len(self._counts) > _MAX_REMEMBERED:
            self._counts.popitem(last=False)
        return True


_reads = _Reads()


class _PartitionRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """aiokafka's reader of one fetched partition, with an end for what cannot be read."""

    next_fetch_offset: int

    def _unpack_records(self) -> Iterator[ConsumerRecord]:
        while self._records.has_next():
            raw = self._records.next_batch()
            try:
                yield from self._unpack(raw)
            except Exception as error:  # noqa: BLE001  boundary: codecs raise errors of many libraries
                base_offset = struct.unpack_from(">q", raw)[0] if len(raw) >= 8 else -1
                if not _reads.may_try_again(self._tp, base_offset):
                    yield self._unreadable(raw, error)
                # The rest is fetched again: what the broker says of aborted transactions is
                # relative to where a fetch begins, and the batch may have been one of them.
                return

    def _unpack(self, raw: memoryview) -> Iterator[ConsumerRecord]:
        batch = _open(raw)
        if self._check_crcs and not batch.validate_crc():
            raise _Damaged("the checksum does not match")
        if self._is_skipped(batch):
            self.next_fetch_offset = max(self.next_fetch_offset, batch.next_offset)
            return
        for record in _records_of(batch, raw):
            if record.offset >= self.next_fetch_offset:  # a fetch may begin inside a batch
                self.next_fetch_offset = record.offset + 1
                yield self._consumer_record(self._tp, record)
        # Compaction takes records out of a batch, its last one too: the batch remembers the offset.
        self.next_fetch_offset = max(self.next_fetch_offset, batch.next_offset)

    def _is_skipped(self, batch: Any) -> bool:
        """Control batches always; those of aborted transactions unless they are asked for."""
        if self._isolation_level != fetcher.READ_COMMITTED or batch.producer_id is None:
            return bool(batch.is_control_batch)
        self._consume_aborted_up_to(batch.base_offset)
        if batch.is_control_batch:
            if self._contains_abort_marker(batch):
                self._aborted_producers.discard(batch.producer_id)
            return True
        return batch.is_transactional and batch.producer_id in self._aborted_producers

    def _unreadable(self, raw: memoryview, error: Exception) -> ConsumerRecord:
        first = self.next_fetch_offset
        last = max(first, _last_offset(raw, self._records.next_base_offset()))
        self.next_fetch_offset = last + 1
        value = UnreadableBatch(bytes(raw), first, _why(error))
        return ConsumerRecord(
            self._tp.topic, self._tp.partition, last, -1, -1, None, value, None, -1, len(raw), ()
        )  # fmt: skip


def _open(raw: memoryview) -> Any:
    if len(raw) <= _MAGIC_AT:
        raise _Damaged("the batch ends before its header does")
    if struct.unpack_from(">i", raw, _LENGTH_AT)[0] != len(raw) - _LENGTH_END:
        raise _Damaged("its length is negative")
    magic = raw[_MAGIC_AT]
    if magic > 2:
        raise _Damaged(f"record format {magic} is unknown")
    if len(raw) < (_HEADER_BYTES if magic == 2 else _LEGACY_HEADER_BYTES):
        raise _Damaged("the batch ends before its header does")
    return DefaultRecordBatch(raw) if magic == 2 else LegacyRecordBatch(raw, magic)


def _last_offset(raw: memoryview, next_base_offset: int | None) -> int:
    """The last offset that a batch takes, as far as something vouches for it; -1 when nothing does:
    then one offset is given up, and the next fetch returns the same batch or the one behind it."""
    if next_base_offset is not None:
        return next_base_offset - 1
    if len(raw) < _HEADER_BYTES:
        return -1
    (base,) = struct.unpack_from(">q", raw)
    (delta,) = struct.unpack_from(">i", raw, _DELTA_AT)
    (count,) = struct.unpack_from(">i", raw, _COUNT_AT)
    # Two fields that say the same were not damaged by chance; only compaction sets them apart.
    whole = delta >= 0 and (count == delta + 1 or _checksum_holds(raw))
    return int(base) + int(delta) if whole else -1


def _checksum_holds(raw: memoryview) -> bool:
    return raw[_MAGIC_AT] == 2 and bool(DefaultRecordBatch(raw).validate_crc())


def _why(error: Exception) -> str:
    """No text of other errors: it may quote what was read."""
    if isinstance(error, UnsupportedCodecError | _Damaged | TooLarge):
        return f"the batch cannot be decoded: {error.args[0]}"
    return f"the batch cannot be decoded: {type(error).__name__}"


def install() -> None:
    """Make consumers of this process read so. Idempotent."""
    fetcher.MemoryRecords = _Records
    fetcher.PartitionRecords = _PartitionRecords
    modules = {sys.modules[one.__module__] for one in (DefaultRecordBatch, LegacyRecordBatch)}
    bound(*modules, default_records, legacy_records)

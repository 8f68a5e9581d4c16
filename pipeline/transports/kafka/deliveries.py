"""From a Kafka record to a delivery, and the way between record keys and request ids.

Who calls it: `source.KafkaSource` for what it hands out, `sink.KafkaSink` for the keys of replies. Pure.
What must stay true: two different keys never give the same id, and the reply to a record without an
id of its own carries that record's key byte for byte, whatever bytes it holds.
"""

from __future__ import annotations

from aiokafka import ConsumerRecord, TopicPartition

from pipeline.transports.delivery import HeldDelivery, Owner
from pipeline.transports.kafka.client_gaps import UnreadableBatch
from pipeline.transports.kafka.watermark import PartitionWatermark

KEY_ID_PREFIX = "key-hex:"
"""Begins the id that stands for a key which is no text, or which begins so itself."""


def id_of_key(key: bytes) -> str:
    """UTF-8 text as it is; any other key as `key-hex:` and its bytes in hex."""
    try:
        text = key.decode("utf-8")
    except UnicodeDecodeError:
        return KEY_ID_PREFIX + key.hex()
    return KEY_ID_PREFIX + key.hex() if text.startswith(KEY_ID_PREFIX) else text


def key_of_id(request_id: str) -> bytes:
    """The inverse of `id_of_key`; any other id as UTF-8."""
    digits = request_id.removeprefix(KEY_ID_PREFIX)
    if digits != request_id:
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if id_of_key(key) == request_id:
            return key
    return request_id.encode("utf-8", "replace")


def place_of(delivery: HeldDelivery) -> tuple[TopicPartition, int]:
    """Partition and offset of a delivery that was made here."""
    place = delivery.token
    assert isinstance(place, tuple)
    return place


def partition_fields(partition: TopicPartition) -> dict[str, str | int]:
    """For logs and origins."""
    return {"topic": partition.topic, "partition": partition.partition}


def unreadable_record(partition: TopicPartition, offset: int, reason: str) -> ConsumerRecord:
    """What stands for a record that cannot be fetched."""
    value = UnreadableBatch(b"", offset, reason)
    return ConsumerRecord(
        partition.topic, partition.partition, offset, -1, -1, None, value, None, -1, 0, ()
    )  # fmt: skip


def delivery_of(
    owner: Owner,
    partition: TopicPartition,
    record: ConsumerRecord,
    mark: PartitionWatermark,
    now: float,
) -> HeldDelivery:
    """One record as a delivery of this assignment; a batch that nobody can read as a damaged one."""
    origin = {"transport": "kafka", **partition_fields(partition), "offset": record.offset}
    damage = None
    if isinstance(record.value, UnreadableBatch):
        damage = record.value.reason
        origin |= {"offset": record.value.first_offset, "last_offset": record.offset}
    key = None if record.key is None else id_of_key(record.key)
    return HeldDelivery(
        owner,
        (partition, record.offset),
        body=record.value,
        headers={name.lower(): value or b"" for name, value in record.headers or ()},
        key=key,
        default_id=key or f"{partition.topic}-{partition.partition}-{record.offset}",
        received_at=now,
        origin=origin,
        attempt=1 + mark.attempts.get(record.offset, 0),
        redelivered=record.offset < mark.known.handed_out,
        epoch=mark.epoch,
        damage=damage,
    )

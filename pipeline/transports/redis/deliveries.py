"""From a stream entry to a delivery, and the entries that are in our hands.

Who calls it: `source.RedisSource`. Pure.
What must stay true: an entry that cannot be read is still a delivery, so that its sender is told;
an entry of a stream that has vanished since (an older epoch) is never taken for one of today's.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.transports.delivery import HeldDelivery, Owner
from pipeline.transports.redis.group import Entry
from pipeline.transports.redis.options import DATA_FIELD

_MAX_HEADERS = 500
"""Fields of one entry beside the record; the sink writes a few more in a dead letter."""
_SHOWN_NAMES, _SHOWN_CHARS = 8, 40
_ANSWERED_BY = ("reply-to", "request-id", "content-type")
"""The headers without which a damaged entry could not be answered."""


def delivery_of(
    owner: Owner, stream: str, entry: Entry, attempt: int, now: float, *, epoch: int, again: bool
) -> HeldDelivery:
    """One entry as a delivery of this epoch; one without a record as a damaged one."""
    fields = dict(entry.fields or {})
    damage = None if DATA_FIELD in fields else _no_data(fields)
    body = fields.pop(DATA_FIELD, b"")
    if len(fields) > _MAX_HEADERS:
        damage = f"the entry has {len(fields)} fields beside data, at most {_MAX_HEADERS} are read"
        read = [*fields][:_MAX_HEADERS] + [name for name in _ANSWERED_BY if name in fields]
        fields = {name: fields[name] for name in read}
    return HeldDelivery(
        owner,
        entry.id,
        body=body,
        headers=fields,
        damage=damage,
        key=None,
        default_id=entry.id,
        received_at=now,
        origin={"transport": "redis", "stream": stream, "id": entry.id},
        attempt=attempt,
        redelivered=again,
        epoch=epoch,
    )


def entry_of(delivery: HeldDelivery) -> str:
    """The entry's id in the stream."""
    assert isinstance(delivery.token, str)
    return delivery.token


class Held:
    """Entries in our hands, of every epoch; `size_bytes` is that of all of them."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], HeldDelivery] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, delivery: HeldDelivery) -> bool:
        return _key(delivery) in self._held

    def has(self, epoch: int, entry: str) -> bool:
        """Is this entry of that epoch among them?"""
        return (epoch, entry) in self._held

    def add(self, delivery: HeldDelivery) -> None:
        """Take it, or take its next attempt in its place."""
        before = self._held.get(_key(delivery))
        self._held[_key(delivery)] = delivery
        self.size_bytes += delivery.size_bytes - (before.size_bytes if before else 0)

    def drop(self, delivery: HeldDelivery) -> None:
        """Out of our hands, if it was in them."""
        if self._held.pop(_key(delivery), None) is not None:
            self.size_bytes -= delivery.size_bytes


def _no_data(fields: Mapping[str, bytes]) -> str:
    """What the sender is told of an entry without a record."""
    names = [repr(name[:_SHOWN_CHARS]) for name in list(fields)[:_SHOWN_NAMES]]
    more = f" and {len(fields) - len(names)} more" if len(fields) > len(names) else ""
    return f"no field named {DATA_FIELD}; it has: {', '.join(names)}{more}"


def _key(delivery: HeldDelivery) -> tuple[int, str]:
    return delivery.epoch, entry_of(delivery)

"""Commit watermarks: offsets settle in any order, only the lowest unsettled one is ever committed.

Who calls it: `kafka.KafkaSource`. Pure: no clock, no I/O.
What must stay true: the committable offset of a partition epoch never goes back and never passes an
unsettled offset; outcomes from an older epoch change nothing; at most `window` offsets per
partition are tracked, so one stuck record bounds memory instead of growing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class PartitionWatermark:
    """One partition in one epoch."""

    __slots__ = (
        "_done",
        "_tracked",
        "committable",
        "committed",
        "epoch",
        "last_handed_out",
        "window",
    )

    def __init__(self, epoch: int, window: int) -> None:
        self.epoch = epoch
        self.window = window
        self.committable: int | None = None
        """Offset to commit (that of the next record to read), None before the first progress."""
        self.committed: int | None = None
        self.last_handed_out = -1
        self._tracked: deque[int] = deque()  # ascending; the leftmost is not settled
        self._done: set[int] = set()  # settled out of order, all of them in `_tracked`

    @property
    def room(self) -> int:
        """How many more offsets may be handed out."""
        return max(0, self.window - len(self._tracked))

    @property
    def in_flight(self) -> int:
        """Handed out and not settled."""
        return len(self._tracked) - len(self._done)

    @property
    def oldest_unsettled(self) -> int | None:
        return self._tracked[0] if self._tracked else None

    def hand_out(self, offset: int) -> None:
        """Offsets come in ascending order; gaps (compaction, transactions) are fine."""
        if offset <= self.last_handed_out:
            raise ValueError(f"offset {offset} after {self.last_handed_out}: a new epoch is needed")
        if not self.room:
            raise ValueError(f"the window of {self.window} offsets is full")
        self.last_handed_out = offset
        self._tracked.append(offset)

    def follow(self, position: int) -> None:
        """All below `position` was read and what had to be handed out is settled: commit it."""
        if not self._tracked and position > (-1 if self.committable is None else self.committable):
            self.committable = position

    def is_in_flight(self, offset: int) -> bool:
        """Handed out in this epoch and not settled."""
        return (
            bool(self._tracked)
            and self._tracked[0] <= offset <= self.last_handed_out
            and offset not in self._done
        )

    def settle(self, offset: int) -> bool:
        """True when this was the first settle of an offset in flight."""
        if not self.is_in_flight(offset):
            return False
        if offset != self._tracked[0]:
            self._done.add(offset)
            return True
        self._tracked.popleft()
        self.committable = offset + 1
        while self._tracked and self._tracked[0] in self._done:
            settled = self._tracked.popleft()
            self._done.discard(settled)
            self.committable = settled + 1
        return True


class Watermarks(Generic[P]):
    """All partitions that are ours now. Every assignment of a partition gets a new epoch."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._epoch = 0
        self._partitions: dict[P, PartitionWatermark] = {}

    def __contains__(self, partition: P) -> bool:
        return partition in self._partitions

    def __getitem__(self, partition: P) -> PartitionWatermark:
        return self._partitions[partition]

    @property
    def partitions(self) -> list[P]:
        return list(self._partitions)

    def assign(self, partitions: Iterable[P]) -> None:
        """They are ours from now on; what was in flight under an older epoch is forgotten."""
        for partition in partitions:
            self._epoch += 1
            self._partitions[partition] = PartitionWatermark(self._epoch, self._window)

    def revoke(self, partitions: Iterable[P]) -> int:
        """They are no longer ours; returns how many records were still in flight."""
        dropped = 0
        for partition in partitions:
            watermark = self._partitions.pop(partition, None)
            dropped += watermark.in_flight if watermark else 0
        return dropped

    def settle(self, partition: P, epoch: int, offset: int) -> bool:
        """False when it changes nothing: another epoch, not in flight, or settled before."""
        watermark = self._partitions.get(partition)
        return watermark is not None and watermark.epoch == epoch and watermark.settle(offset)

    def holds(self, partition: P, epoch: int, offset: int) -> bool:
        """True when the offset is in flight under this epoch."""
        watermark = self._partitions.get(partition)
        return watermark is not None and watermark.epoch == epoch and watermark.is_in_flight(offset)

    def in_flight(self, partitions: Iterable[P] | None = None) -> int:
        chosen = self._partitions if partitions is None else partitions
        return sum(self._partitions[p].in_flight for p in chosen if p in self._partitions)

    def to_commit(self) -> dict[P, int]:
        """What has moved since it was last committed."""
        return {
            partition: watermark.committable
            for partition, watermark in self._partitions.items()
            if watermark.committable is not None and watermark.committable != watermark.committed
        }

    def mark_committed(self, offsets: dict[P, int], epochs: dict[P, int]) -> None:
        """The broker has these. `epochs` are those of the moment when the commit was sent."""
        for partition, offset in offsets.items():
            watermark = self._partitions.get(partition)
            if watermark is not None and watermark.epoch == epochs[partition]:
                watermark.committed = max(offset, watermark.committed or 0)

    def epochs(self, partitions: Iterable[P]) -> dict[P, int]:
        return {partition: self._partitions[partition].epoch for partition in partitions}

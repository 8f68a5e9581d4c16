"""Commit watermarks: offsets settle in any order, only the lowest unsettled one is ever committed.

Who calls it: `kafka.KafkaSource`. Pure: no clock, no I/O.
What must stay true: the committable offset of a partition epoch never goes back and never passes an
unsettled offset; outcomes from an older epoch change nothing; at most `window` offsets per
partition are tracked, so one stuck record bounds memory instead of growing it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from copy import copy
from typing import Generic, TypeVar

from pipeline.transports.kafka.progress import NOTHING, Progress, dump

P = TypeVar("P", bound=Hashable)


class PartitionWatermark:
    """One partition in one epoch."""

    __slots__ = (
        "_done",
        "_tracked",
        "attempts",
        "committable",
        "committed",
        "committed_version",
        "epoch",
        "held_bytes",
        "known",
        "last_handed_out",
        "lost",
        "reserved",
        "version",
        "window",
    )

    def __init__(self, epoch: int, window: int) -> None:
        self.epoch = epoch
        self.window = window
        self.held_bytes = 0
        self.lost = 0
        """Records in flight that will not settle here."""
        self.known = NOTHING
        """What the owner before us remembered."""
        self.attempts: dict[int, int] = {}
        """Steps that took an unsettled record in and have not come back, here or before."""
        self.reserved = -1
        """Offsets below it may be handed out: the broker knows that they may have been."""
        self.version = 0
        """Goes up with everything that a commit would remember."""
        self.committed_version = 0
        self.committable: int | None = None
        """Offset to commit (that of the next record to read), None before the first progress."""
        self.committed: int | None = None
        self.last_handed_out = -1
        self._tracked: deque[int] = deque()  # ascending; the leftmost is not settled
        self._done: set[int] = set()  # settled out of order, all of them in `_tracked`

    def recall(self, offset: int | None, known: Progress) -> None:
        """Begin where the owner before us was: at `offset`, None when nobody has committed."""
        self.known, self.attempts = known, dict(known.attempts)
        self.reserved = known.handed_out
        self.committable = self.committed = offset

    def reserve(self, offset: int) -> None:
        """Offsets below `offset` are about to be handed out; true once the next commit is through."""
        if offset > self.reserved:
            self.reserved = offset
            self.version += 1

    def note_attempt(self, offset: int, more: int) -> None:
        """A step with this record begins (+1) or came back (-1)."""
        if self.is_in_flight(offset):
            self.attempts[offset] = max(0, self.attempts.get(offset, 0) + more)
            self.version += 1

    def begin_at(self, offset: int) -> None:
        """The first record to be handed out, where nobody has committed before."""
        if self.committable is None:
            self.committable = offset

    def memory(self, *, clean: bool, tag: str = "") -> str:
        """What to commit beside `committable`; `clean`: nothing handed out can still kill us."""
        assert self.committable is not None
        handed_out = -1 if clean else self.reserved
        # What was finished before us and we have not come to yet: whoever follows us must know it, too.
        before = {one for one in self.known.done if one > self.last_handed_out}
        return dump(self.committable, handed_out, self._done | before, self.attempts, tag)

    def with_settled(self, offsets: Iterable[int]) -> PartitionWatermark:
        """As it will be once these are settled, too; this one does not change."""
        later = copy(self)
        later._tracked, later._done = self._tracked.copy(), self._done.copy()
        later.attempts = dict(self.attempts)
        for offset in offsets:
            later.settle(offset)
        return later

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
        self.version += 1
        self.attempts.pop(offset, None)
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

    def lost(self, partitions: Iterable[P] | None = None) -> int:
        """Of those in flight, how many will not settle here."""
        chosen = self._partitions if partitions is None else partitions
        return sum(self._partitions[p].lost for p in chosen if p in self._partitions)

    def held_bytes(self) -> int:
        """Bytes of records in flight."""
        return sum(watermark.held_bytes for watermark in self._partitions.values())

    def to_commit(self) -> dict[P, int]:
        """What has moved, or is to be remembered, since it was last committed."""
        return {
            partition: watermark.committable
            for partition, watermark in self._partitions.items()
            if watermark.committable is not None
            and (
                watermark.committable != watermark.committed
                or watermark.version != watermark.committed_version
            )
        }

    def mark_committed(
        self, offsets: dict[P, int], epochs: dict[P, int], versions: dict[P, int]
    ) -> None:
        """The broker has these. `epochs` and `versions` are those of when the commit was sent."""
        for partition, offset in offsets.items():
            watermark = self._partitions.get(partition)
            if watermark is not None and watermark.epoch == epochs[partition]:
                watermark.committed = max(offset, watermark.committed or 0)
                watermark.committed_version = versions[partition]

    def epochs(self, partitions: Iterable[P]) -> dict[P, int]:
        return {partition: self._partitions[partition].epoch for partition in partitions}

"""The packer: which waiting items form the next batch. Pure; `now` is passed in.

Who calls it: the coalescer, one packer per model.
What must stay true: a batch holds at most `max_batch_tokens` tokens (a longer item travels alone);
the oldest item of the lane that is served is always in the batch, so nothing can be overtaken for
ever; interactive items go first but bulk keeps its floor share while it waits; what expired or
ended is dropped here, before any compute; queued counts never go negative; a batch that is put back
leaves no trace: it is as if it had not been packed yet.

Policy (sources: TEI and SGLang emit as soon as the device is idle and use no timer; Kafka's linger
bounds the wait for a fuller batch while the device is busy):
    emit   when a full batch waits, or the executor is idle, or the oldest item waited `linger_s`.
    share  several idle threads divide what waits: a request alone is answered by all of them.
    fill   bulk's earned share first, then interactive in order, then bulk in order; an item that
           does not fit is passed over, within a look-ahead of `max_reorder_items` items.
    brisk  while interactive items are expected, bulk fills up only what takes `brisk_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.messages import Entry
from schemas.requests import LANES, Lane

RECENT_S = 2.0
"""For so long after an interactive item another one is expected."""
BRISK_SHARE = 4
"""Bulk items may always fill this part of the budget: below it a forward costs as much."""
SHARE_TOKENS = 64
"""Idle threads take no less than this: from about 32 rows on a CPU's linears compute at full rate, and below
it two forwards cost more than one (AMD EPYC with AVX2, MiniLM: 14 tokens 12 ms, 28 tokens 18, 64 tokens 32)."""
MAX_SHARES = 8
"""Each batch takes the interpreter's lock for a millisecond or two, whatever it holds."""


@dataclass(frozen=True, slots=True)
class PackingPolicy:
    """Numbers that steer one packer.

    max_batch_tokens: the token budget. max_batch_items: rows of one batch. linger_s: longest wait
    of an item for a fuller batch while the executor is busy. bulk_floor: share of the tokens
    that bulk keeps while both lanes wait, 0 to 1. max_reorder_items: items looked past to fill a gap.
    group_lengths: prefer items near the first one's length (padded models only). brisk_s: bulk items fill
    a batch up to what takes so long, while interactive ones are expected, which wait for it to end.
    """

    max_batch_tokens: int
    max_batch_items: int = 1024
    linger_s: float = 0.005
    bulk_floor: float = 0.2
    max_reorder_items: int = 256
    group_lengths: bool = False
    brisk_s: float = 0.1


@dataclass(slots=True)
class Take:
    """What `next_batch` decided.

    batch: in the order of taking. dropped: expired or ended entries, to be answered by the caller.
    n_tokens: of the batch; spare_tokens: those of bulk items beyond bulk's earned share, which
    interactive items may displace. The rest is what `Packer.put_back` needs.
    """

    batch: list[Entry] = field(default_factory=list)
    dropped: list[Entry] = field(default_factory=list)
    n_tokens: int = 0
    spare_tokens: int = 0
    places: list[tuple[Lane, int]] = field(default_factory=list)
    credit_before: float = 0.0


class Packer:
    """Two lanes of waiting items of one model."""

    def __init__(self, policy: PackingPolicy) -> None:
        self.policy = policy
        self._lanes: dict[Lane, deque[Entry]] = {lane: deque() for lane in LANES}
        self._tokens: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._bulk_credit = 0.0
        self._latest: Take | None = None
        self._interactive_at = float("-inf")
        self._tokens_per_s: float | None = None

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._lanes.values())

    def __repr__(self) -> str:
        lanes = ", ".join(f"{lane}={len(queue)}" for lane, queue in self._lanes.items())
        return f"Packer({lanes}, tokens={self.queued_tokens()})"

    def queued_tokens(self, lane: Lane | None = None) -> int:
        """Tokens waiting, in one lane or in both."""
        return sum(self._tokens.values()) if lane is None else self._tokens[lane]

    def queued_items(self, lane: Lane) -> int:
        return len(self._lanes[lane])

    def add(self, entries: Iterable[Entry], lane: Lane) -> None:
        """Append to a lane."""
        entries = list(entries)
        self._lanes[lane].extend(entries)
        self._tokens[lane] += sum([entry.n_tokens for entry in entries])
        if lane == "interactive" and entries:
            self._interactive_at = max(self._interactive_at, entries[-1].enqueued_at)

    def note_forward(self, n_tokens: int, took_s: float) -> None:
        """How long a batch took, from its submission: what the next ones will take."""
        if took_s > 0:
            rate = n_tokens / took_s
            known = self._tokens_per_s
            self._tokens_per_s = rate if known is None else 0.8 * known + 0.2 * rate

    def expects_interactive(self, now: float) -> bool:
        """Has an interactive item come lately?"""
        return now - self._interactive_at <= RECENT_S

    def bulk_budget(self, now: float) -> int:
        """Tokens up to which bulk items fill a batch."""
        budget, rate = self.policy.max_batch_tokens, self._tokens_per_s
        if rate is None or not self.expects_interactive(now):
            return budget
        return min(budget, max(int(rate * self.policy.brisk_s), budget // BRISK_SHARE))

    def oldest_at(self, lane: Lane) -> float | None:
        """When the lane's first item was queued, or None."""
        queue = self._lanes[lane]
        return queue[0].enqueued_at if queue else None

    def ready_at(self, *, idle: int) -> float | None:
        """The moment from which a batch may be emitted: -inf now, None when nothing waits. idle: threads
        that have nothing to run."""
        if not len(self):
            return None
        full = (
            self.queued_tokens() >= self.policy.max_batch_tokens
            or len(self) >= self.policy.max_batch_items
        )
        if idle or full:
            return float("-inf")
        oldest = min(at for lane in LANES if (at := self.oldest_at(lane)) is not None)
        return oldest + self.policy.linger_s

    def next_batch(self, now: float, epoch_ms: int, *, idle: int) -> Take:
        """Take the next batch, or an empty one when it is better to wait. idle: as `ready_at` has it."""
        take = Take(credit_before=self._bulk_credit)
        self._latest = take
        for lane in LANES:
            self._drop_dead_heads(lane, epoch_ms, take.dropped)
        ready = self.ready_at(idle=idle)
        if ready is None or now < ready:
            return take
        budget = fill_to = self.policy.max_batch_tokens
        if idle > 1:
            shares = min(idle, MAX_SHARES)
            fill_to = min(budget, max(SHARE_TOKENS, -(-self.queued_tokens() // shares)))
        both = bool(self._lanes["interactive"]) and bool(self._lanes["bulk"])
        if both:
            # An item above the cap would wait for as long as interactive items come.
            head_tokens = self._lanes["bulk"][0].n_tokens
            self._bulk_credit = min(
                self._bulk_credit + self.policy.bulk_floor * fill_to,
                max(2.0 * budget, float(head_tokens)),
            )
            if self._bulk_credit >= head_tokens:
                share = min(int(self._bulk_credit), fill_to)
                self._bulk_credit -= self._fill("bulk", take, share, epoch_ms, alone_ok=True)
        else:
            self._bulk_credit = 0.0
        for lane in LANES:
            most = min(fill_to, self.bulk_budget(now)) if lane == "bulk" else fill_to
            room = most - take.n_tokens
            taken = self._fill(lane, take, room, epoch_ms, alone_ok=not take.batch)
            take.spare_tokens = taken if lane == "bulk" else 0
        return take

    def would_gain(self, take: Take) -> bool:
        """May `take` be put back, and would the first interactive item that waits be in it then?"""
        queue = self._lanes["interactive"]
        if take is not self._latest or not take.batch or not queue:
            return False
        if not take.spare_tokens and len(take.batch) >= self.policy.max_batch_items:
            return False
        budget = self.policy.max_batch_tokens
        room = budget - take.n_tokens + take.spare_tokens
        return min(queue[0].n_tokens, budget) <= room

    def put_back(self, take: Take) -> None:
        """Undo the latest `next_batch`: its entries stand where they stood, and bulk has the credit it had."""
        assert take is self._latest, "only the latest batch can be put back; this is a bug"
        self._latest = None
        for entry, (lane, position) in zip(
            reversed(take.batch), reversed(take.places), strict=True
        ):
            self._lanes[lane].insert(position, entry)
            self._tokens[lane] += entry.n_tokens
        self._bulk_credit = take.credit_before

    def _drop_dead_heads(self, lane: Lane, epoch_ms: int, dropped: list[Entry]) -> None:
        queue = self._lanes[lane]
        while queue and _is_dead(queue[0], epoch_ms):
            self._remove(lane, 0, dropped)

    def _remove(self, lane: Lane, position: int, into: list[Entry]) -> None:
        queue = self._lanes[lane]
        entry = queue[position]
        del queue[position]
        self._tokens[lane] -= entry.n_tokens
        into.append(entry)

    def _fill(self, lane: Lane, take: Take, room: int, epoch_ms: int, *, alone_ok: bool) -> int:
        """Move entries that fit in `room` tokens from `lane` into the batch; returns their tokens."""
        queue, batch, places = self._lanes[lane], take.batch, take.places
        first = lane, 0
        max_items, max_position = self.policy.max_batch_items, self.policy.max_reorder_items
        taken = 0
        if self.policy.group_lengths and queue:
            self._bring_near_lengths_forward(queue)
        position, alive = 0, None
        while position < len(queue) and position <= max_position and len(batch) < max_items:
            entry = queue[position]
            if entry.owner is not alive:
                if _is_dead(entry, epoch_ms):
                    self._remove(lane, position, take.dropped)
                    continue
                alive = entry.owner  # and so are those of its other items
            n_tokens = entry.n_tokens
            travels_alone = alone_ok and not batch and position == 0
            if n_tokens > room and not travels_alone:
                position += 1
                continue
            if position:
                del queue[position]
                places.append((lane, position))
            else:
                queue.popleft()
                places.append(first)
            batch.append(entry)
            taken += n_tokens
            room -= n_tokens
            if room <= 0:
                break
        self._tokens[lane] -= taken
        take.n_tokens += taken
        return taken

    def _bring_near_lengths_forward(self, queue: deque[Entry]) -> None:
        window = [queue.popleft() for _ in range(min(len(queue), self.policy.max_reorder_items))]
        # The oldest, not the first: an item that earlier rounds sorted back must not stay there.
        head = window.pop(min(range(len(window)), key=lambda i: window[i].enqueued_at))
        rest = sorted(window, key=lambda entry: abs(entry.n_tokens - head.n_tokens))
        queue.extendleft(reversed([head, *rest]))


def _is_dead(entry: Entry, epoch_ms: int) -> bool:
    owner = entry.owner
    return owner.closed or owner.expired(epoch_ms)

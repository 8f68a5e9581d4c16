"""The coalescer: waiting items of every model, and the next batch when the dispatcher asks.

Who calls it: tokenizers `put` encoded items, the dispatcher calls `next_batch`.
What must stay true: this is only the async shell around `actors.packing.Packer`; queued tokens per
lane are bounded (`put` waits above the bound, so a bulk backlog never blocks the interactive lane; a
batch that is put back may exceed it);
what the packer dropped as expired is failed here, so that nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.messages import Entry, InFlight
from actors.packing import Packer, PackingPolicy, Take
from actors.ports import Clock
from schemas.errors import Cancelled, EmbedstreamError, Expired
from schemas.requests import LANES, Lane


@dataclass(frozen=True, slots=True)
class Selected:
    """One batch's worth of entries of one model, and what `put_back` needs of the moment before.

    owed: the model had been passed over for long enough. passed_over: `Coalescer._passed_over` then.
    """

    model: str
    take: Take
    owed: bool
    passed_over: dict[str, int]

    @property
    def entries(self) -> list[Entry]:
        return self.take.batch


class Coalescer:
    """Packers by model behind one condition.

    Args:
        policies: packing policy per model name.
        max_queued_tokens: bound per model and lane above which `put` waits.
        fail: called with an in-flight request and why it ended without a forward.
    """

    def __init__(
        self,
        policies: dict[str, PackingPolicy],
        *,
        max_queued_tokens: int,
        clock: Clock,
        fail: Callable[[InFlight, EmbedstreamError], None],
    ) -> None:
        self.packers = {model: Packer(policy) for model, policy in policies.items()}
        self._max_queued_tokens = max_queued_tokens
        self._clock = clock
        self._fail = fail
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._turn = 0
        self._passed_over = dict.fromkeys(self.packers, 0)  # batches since a waiting model's last
        self.on_interactive: Callable[[], None] = _nothing
        """Called when interactive items have been queued."""

    def queued_tokens(self, lane: Lane | None = None) -> int:
        """Tokens waiting over all models."""
        return sum(packer.queued_tokens(lane) for packer in self.packers.values())

    async def put(self, model: str, entries: Sequence[Entry], lane: Lane) -> None:
        """Queue entries once the lane is below its bound."""
        packer = self.packers[model]
        while packer.queued_tokens(lane) >= self._max_queued_tokens:
            self._room.clear()
            await self._room.wait()
        packer.add(entries, lane)
        self._work.set()
        if lane == "interactive":
            self.on_interactive()

    async def next_batch(self, *, idle: Callable[[], int]) -> Selected:
        """Wait for the next batch. `idle()` says how many of the executor's threads have nothing to run now.

        Safe to cancel: entries leave a packer only when they are returned.
        """
        while True:
            self._work.clear()
            selected = self.try_next_batch(idle=idle())
            if selected is not None:
                return selected
            now = self._clock.monotonic()
            ready_times = [
                at
                for packer in self.packers.values()
                if (at := packer.ready_at(idle=0)) is not None
            ]
            wait_s = max(0.0005, min(ready_times) - now) if ready_times else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._work.wait()
            except TimeoutError:
                continue

    def try_next_batch(self, *, idle: int) -> Selected | None:
        """A batch if one should be emitted now: interactive work first, but no model waits for more
        than 1 / bulk_floor batches of others; models in turn otherwise."""
        now, epoch_ms = self._clock.monotonic(), self._clock.epoch_ms()
        for model in self._order():
            take = self.packers[model].next_batch(now, epoch_ms, idle=idle)
            if take.dropped or take.batch:
                self._room.set()
            for entry in take.dropped:
                if not entry.owner.closed:
                    self._fail(entry.owner, _why_dropped(entry, epoch_ms))
            if take.batch:
                selected = Selected(model, take, self._is_owed(model), self._passed_over)
                self._turn += 1
                self._note_turn(model)
                return selected
        return None

    def expects_interactive(self) -> bool:
        """Have interactive items come lately, and do none wait now?"""
        now = self._clock.monotonic()
        packers = self.packers.values()
        if any(packer.queued_items("interactive") for packer in packers):
            return False
        return any(packer.expects_interactive(now) for packer in packers)

    def would_gain(self, selected: Selected) -> bool:
        """Would interactive items leave earlier if `selected`, the latest batch, were put back?"""
        if self.packers[selected.model].would_gain(selected.take):
            return True
        only_spare = selected.take.spare_tokens == selected.take.n_tokens and not selected.owed
        return only_spare and any(
            packer.queued_items("interactive")
            for model, packer in self.packers.items()
            if model != selected.model
        )

    def put_back(self, selected: Selected) -> None:
        """Undo the latest `try_next_batch`."""
        self.packers[selected.model].put_back(selected.take)
        self._turn -= 1
        self._passed_over = selected.passed_over
        self._work.set()

    def _is_owed(self, model: str) -> bool:
        # bulk_floor is a share of each model's batches; it is one of all batches, too.
        return self._passed_over[model] * self.packers[model].policy.bulk_floor >= 1.0

    def _order(self) -> list[str]:
        waiting = [model for model, packer in self.packers.items() if len(packer)]
        if len(waiting) < 2:
            return waiting
        turn = self._turn % len(waiting)
        rotated = waiting[turn:] + waiting[:turn]

        def urgency(model: str) -> tuple[bool, float]:
            at = self.packers[model].oldest_at("interactive")
            return not self._is_owed(model), float("inf") if at is None else at

        return sorted(rotated, key=urgency)

    def _note_turn(self, served: str) -> None:
        self._passed_over = {
            model: self._passed_over[model] + 1 if model != served and len(packer) else 0
            for model, packer in self.packers.items()
        }

    def poke(self) -> None:
        """Look again: the executor became idle, or something was cancelled."""
        self._work.set()

    def statistics(self) -> dict[str, dict[str, int]]:
        """Queued tokens by model and lane."""
        return {
            model: {lane: packer.queued_tokens(lane) for lane in LANES}
            for model, packer in self.packers.items()
        }


def _nothing() -> None:
    pass


def _why_dropped(entry: Entry, epoch_ms: int) -> EmbedstreamError:
    if entry.owner.expired(epoch_ms):
        return Expired(
            "deadline_ms passed while the request was queued; nothing was computed",
            limit=entry.owner.request.deadline_ms,
            given=epoch_ms,
        )
    return Cancelled("withdrawn while it was queued")

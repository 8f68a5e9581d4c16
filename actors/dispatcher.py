"""The dispatcher: batches to the executor, outcomes back to their requests.

Who calls it: runs as a supervised task; takes batches from the coalescer, submits to the executor.
What must stay true: at most `executor.width + prefetch` batches are out, and while interactive work is
expected some threads stay free, so that it begins at once; one that has not begun when
interactive work comes is taken back and packed again; a failed batch is halved
until the bad item is alone, at most 2n - 1 forwards for n items; only that item
fails; no cancellation reaches a running forward and its result is always consumed; a dead executor fails
nothing: it is fatal, and unsettled deliveries go to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import structlog

from actors.attempts import Attempts, apart
from actors.coalescer import Coalescer, Selected
from actors.messages import Entry, InFlight
from actors.ports import Clock, Metrics
from actors.result_cache import ResultCache
from gpu.batch import Executor, ExecutorDied, ItemOutcome, pack, scatter
from schemas.errors import EmbedstreamError, ModelError, NonFinite, OutOfMemory
from schemas.requests import Lane

log = structlog.get_logger(__name__)

_owner_of: Callable[[Entry], InFlight] = attrgetter("owner")
Spawn = Callable[[str, Coroutine[Any, Any, None]], object]

RESERVED_SHARE = 4
"""With two threads a free one would halve bulk work as long as somebody asks now and then, for a p99 of 1.4
full batches instead of 1.9 (forwards of 50 ms, two cores)."""
MAX_TAKEN_BACK = 4
"""How often a batch is packed again before the one ahead of it has ended: each time costs the event loop a
pack (0.1 ms of CPU for 64 items, 1.5 ms for 1,024)."""


@dataclass(slots=True, eq=False)
class _Out:
    """A batch on its way through the executor. future: None before it is submitted."""

    selected: Selected
    began_at: float
    future: Future[list[ItemOutcome]] | None = None
    taken_back: bool = False


class Dispatcher:
    """Keeps the executor busy.

    Args:
        spawn: starts a task in the supervisor's TaskGroup.
        prefetch: batches that wait in the executor's queue while all its threads run.
        reserved: threads left free while interactive items are expected; None: a quarter. One stays
            for bulk: what waits behind it is packed again when interactive items come.
        results: where computed items are kept for those that come again.
    """

    def __init__(
        self,
        coalescer: Coalescer,
        executor: Executor,
        *,
        spawn: Spawn,
        attempts: Attempts,
        complete: Callable[[InFlight, int, ItemOutcome], None],
        clock: Clock,
        metrics: Metrics,
        prefetch: int = 1,
        reserved: int | None = None,
        results: ResultCache | None = None,
    ) -> None:
        self._coalescer = coalescer
        self._executor = executor
        self._spawn = spawn
        self._attempts = attempts
        self._complete = complete
        self._clock = clock
        self._metrics = metrics
        self._log = log.bind()  # what the module's does anew for each line
        self._results = ResultCache(0) if results is None else results
        self._max_out = executor.width + prefetch
        wanted = executor.width // RESERVED_SHARE if reserved is None else reserved
        self._reserved = min(wanted, executor.width - 1)
        self._free = asyncio.Event()
        self._died: str | None = None
        self._newest: _Out | None = None
        self._n_taken_back = 0  # since a batch ended
        coalescer.on_interactive = self._pack_again
        self.n_out = 0
        self.tokens_done = 0
        self.items_done = 0
        self.batches_done = 0
        self.batch_tokens_budgeted = 0
        self.padding_avoided_tokens = 0
        self.max_tokens_in_batch = 0

    async def run(self) -> None:
        """Submit batches for ever. Raises `ExecutorDied`."""
        while True:
            while self.n_out >= self._most_out():
                self._free.clear()
                await self._free.wait()
            if self._died is not None:
                raise ExecutorDied(self._died)
            selected = await self._coalescer.next_batch(idle=self._idle)
            self.n_out += 1
            self._newest = out = _Out(selected, self._clock.monotonic())
            for entry in selected.entries:
                if entry.owner.first_forward_at is None:
                    entry.owner.first_forward_at = out.began_at
            self._spawn(f"batch.{selected.model}", self._run_batch(out))

    def _most_out(self) -> int:
        """Batches that may be out before the next one."""
        if self._reserved and self._coalescer.expects_interactive():
            return self._executor.width - self._reserved
        return self._max_out

    def _idle(self) -> int:
        """Threads that have nothing to run."""
        if self._died is not None:
            raise ExecutorDied(self._died)
        return max(0, min(self._executor.width, self._most_out()) - self.n_out)

    def _pack_again(self) -> None:
        """Interactive items have come: a batch that waits behind running ones makes room for them."""
        self._free.set()
        out = self._newest
        if (
            out is None
            or self.n_out < self._max_out
            or self._n_taken_back >= MAX_TAKEN_BACK
            or not self._coalescer.would_gain(out.selected)
            # Their attempts are counted around the step.
            or any(entry.owner.redelivered for entry in out.selected.entries)
            or (out.future is not None and not out.future.cancel())
        ):
            return
        out.taken_back = True
        self._newest = None
        self._n_taken_back += 1
        for entry in out.selected.entries:
            if entry.owner.first_forward_at == out.began_at:
                entry.owner.first_forward_at = None
        self._coalescer.put_back(out.selected)
        self._metrics.count("batches_packed_again_total", model=out.selected.model)

    async def _run_batch(self, out: _Out) -> None:
        selected = out.selected
        try:
            owners = dict.fromkeys(map(_owner_of, selected.entries))
            if not any(owner.redelivered for owner in owners):
                await self._forward(selected.model, selected.entries, out)
            else:
                await self._forward_apart(selected, out)
        except ExecutorDied as error:
            self._died = str(error)
        finally:
            if not out.taken_back:
                self._n_taken_back = 0
                self._note_waits(selected.entries, out.began_at)
            if self._newest is out:
                self._newest = None
            self.n_out -= 1
            self._free.set()
            self._coalescer.poke()

    async def _forward_apart(self, selected: Selected, out: _Out) -> None:
        """What was handed out before, counted, and suspects alone."""
        for owners in apart(map(_owner_of, selected.entries)):
            members = set(owners)
            entries = [entry for entry in selected.entries if entry.owner in members]
            async with self._attempts.counted(owners):
                await self._forward(selected.model, entries, out)

    async def _forward(self, model: str, entries: list[Entry], out: _Out | None = None) -> None:
        """Run entries as one batch; on failure run both halves, down to single items."""
        if out is not None and out.taken_back:
            return
        entries = self._reused(model, [entry for entry in entries if not entry.owner.closed])
        if not entries:
            return
        started = self._clock.monotonic()
        twins = _by_key(entries) if self._results.enabled else None  # no results: no keys
        given = entries
        if twins is not None:
            entries = [alike[0] for alike in twins]
        try:
            batch = pack([entry.item for entry in entries])
            submitted = self._executor.submit(model, batch)
            if out is not None:
                out.future = submitted
            await _ended(submitted)
            if out is not None and out.taken_back:
                return
            outcomes = scatter(batch, submitted.result())
        except ExecutorDied:
            raise
        except Exception as error:  # noqa: BLE001  boundary: any fault of a model is its items' fault
            if self._newest is out:
                self._newest = None
            # Each one alone then, also of those that are alike: one sender's fault is not another's.
            await self._isolate(model, given, error)
            return
        took = self._clock.monotonic() - started
        self._note_batch(model, batch.n_items, batch.n_tokens, batch.max_seqlen, took)
        if twins is None:
            self._scatter(model, given, outcomes, took)
            return
        for alike, outcome in zip(twins, outcomes, strict=True):
            self._results.put(alike[0].key, outcome)
            self._scatter(model, alike, [outcome] * len(alike), took)
            if len(alike) > 1:
                self._metrics.count("items_reused_total", len(alike) - 1, model=model)

    def _scatter(
        self, model: str, entries: list[Entry], outcomes: Sequence[ItemOutcome], took_s: float
    ) -> None:
        """Each entry's outcome to its request."""
        owner: InFlight | None = None
        for entry, outcome in zip(entries, outcomes, strict=True):
            if entry.owner is not owner:
                owner = entry.owner
                owner.forward_s = max(owner.forward_s, took_s)
            if isinstance(outcome, EmbedstreamError):
                outcome = copy(outcome)  # may be another entry's, too
                outcome.items = (entry.index,)
                if isinstance(outcome, NonFinite):
                    self._metrics.count("nonfinite_total", model=model)
            self._complete(owner, entry.index, outcome)

    def _reused(self, model: str, entries: list[Entry]) -> list[Entry]:
        """Complete those whose result is known by now; the others."""
        if not self._results.enabled:
            return entries
        new = []
        for entry in entries:
            known = self._results.get(entry.key)
            if known is None:
                new.append(entry)
            else:
                self._metrics.count("items_reused_total", model=model)
                self._complete(entry.owner, entry.index, known)
        return new

    async def _isolate(self, model: str, entries: list[Entry], error: Exception) -> None:
        self._metrics.count("failed_batches_total", model=model)
        log.warning(
            "batch_failed", model=model, n_items=len(entries), error_type=type(error).__name__
        )
        if len(entries) == 1:
            entry = entries[0]
            self._complete(entry.owner, entry.index, _item_error(error, entry.index))
            return
        middle = len(entries) // 2
        await self._forward(model, entries[:middle])
        await self._forward(model, entries[middle:])

    def _note_waits(self, entries: list[Entry], began_at: float) -> None:
        """One observation per request and encoder call: its items waited together."""
        waits: dict[Lane, list[float]] = {}
        owner, at = None, 0.0
        for entry in entries:
            if entry.owner is owner and entry.enqueued_at == at:
                continue
            owner, at = entry.owner, entry.enqueued_at
            waits.setdefault(owner.lane, []).append(began_at - at)
        for lane, seconds in waits.items():
            self._metrics.observe_all("queue_wait_seconds", seconds, lane=lane)

    def _note_batch(
        self, model: str, n_items: int, n_tokens: int, max_seqlen: int, took_s: float
    ) -> None:
        self.batches_done += 1
        self.items_done += n_items
        self.tokens_done += n_tokens
        avoided = n_items * max_seqlen - n_tokens
        self.padding_avoided_tokens += avoided
        packer = self._coalescer.packers[model]
        packer.note_forward(n_tokens, took_s)
        budget = packer.policy.max_batch_tokens
        self.batch_tokens_budgeted += max(budget, n_tokens)
        self.max_tokens_in_batch = max(self.max_tokens_in_batch, n_tokens)
        self._metrics.observe("batch_items", n_items, model=model)
        self._metrics.observe("batch_tokens", n_tokens, model=model)
        self._metrics.observe("forward_seconds", took_s, model=model)
        self._metrics.count("padding_avoided_tokens_total", avoided, model=model)
        if self._log.is_enabled_for(logging.DEBUG):
            self._log.debug(
                "batch_forwarded",
                model=model,
                n_items=n_items,
                n_tokens=n_tokens,
                forward_ms=round(took_s * 1000, 2),
            )

    def statistics(self) -> dict[str, float]:
        """Totals since the start."""
        return {
            "batches": self.batches_done,
            "items": self.items_done,
            "tokens": self.tokens_done,
            "batch_fill": self.tokens_done / self.batch_tokens_budgeted
            if self.batch_tokens_budgeted
            else 0.0,
            "padding_avoided_tokens": self.padding_avoided_tokens,
            "running": self.n_out,
        }


def _by_key(entries: list[Entry]) -> list[list[Entry]]:
    """Entries that share one computation, in the order of their first."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.key if entry.key is not None else entry, []).append(entry)
    return list(groups.values())


def _item_error(error: Exception, index: int) -> EmbedstreamError:
    if isinstance(error, EmbedstreamError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory(
            "this item alone exhausts the device's memory; shorten it or lower max_tokens",
            items=(index,),
        )
    return ModelError("the forward failed for this item even alone", items=(index,))


async def _ended(submitted: Future[Any]) -> None:
    """Wait until it is done. Cancelled, it goes on, and whatever becomes of it is nobody's."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(wake)

    submitted.add_done_callback(tell)
    await ended

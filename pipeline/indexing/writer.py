"""The index writer: documents of all routes into one collection, in batches, retried.

Who calls it: the publishers of indexing routes `submit` one document each and wait for its outcome;
`run` is one supervised task; the intake asks `known` before it has anything embedded.
What must stay true: a batch holds a document once, its newest version, and the older ones share that
version's outcome unless it is refused; what the store cannot take now is retried with back-off and
given up after `attempts`, never dropped. Interactive writes pass bulk ones and never share a call with them,
but for one in `LIVE_IN_A_ROW` + 1; while they come, calls with bulk ones are kept short and apart. Memory is
bounded by the requests in flight, because each holds at most one write here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import structlog

from actors.ports import Clock, Metrics
from pipeline.indexing.records import Entry, Outcome, Write
from pipeline.indexing.sinks.base import Collection, StoreUnavailable
from pipeline.indexing.turns import Turns
from schemas.requests import LANES, Lane

log = structlog.get_logger(__name__)

CLOSE_S = 2.0
LIVE_IN_A_ROW = 4
"""Calls with interactive writes alone, while bulk ones wait: then those get a place too."""
LIVE_RECENT_S = 5.0
"""For so long after an interactive write another one is expected."""
FEWEST_BULK = 64
"""Documents of a call, however slow the store is: most of what a call takes does not depend on them."""
SLOW_S = 5.0
"""A call that takes longer is told in `/ready`."""
SUPERSEDED = Outcome("stale", "a newer version came before it was written")


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """A batch leaves at `max_documents`, at `max_bytes`, or `linger_s` after its first document.

    beside_live_s: how long a call with bulk writes may take while interactive ones come; the number of its
    documents follows from what calls took.
    write_timeout_s: after this a call counts as unanswered, and the batch is written again.
    The wait between tries doubles from first_backoff_s to max_backoff_s, with jitter.
    """

    max_documents: int = 512
    max_bytes: int = 16 * 1024 * 1024
    linger_s: float = 0.02
    beside_live_s: float = 0.15
    write_timeout_s: float = 60.0
    attempts: int = 60
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Pending:
    """The newest version of a document that waits, and the older ones that it stands for."""

    write: Write
    done: asyncio.Future[Outcome]
    older: list[_Pending] = field(default_factory=list)

    def everyone(self) -> list[_Pending]:
        return [self, *self.older]


class IndexWriter:
    """Writes into one collection, which is open."""

    def __init__(
        self,
        collection: Collection,
        *,
        policy: WritePolicy,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.collection = collection
        self.policy = policy
        self._clock = clock
        self._metrics = metrics
        self._waiting: dict[Lane, dict[str, _Pending]] = {lane: {} for lane in LANES}
        self._n_bytes = 0
        self._arrived = asyncio.Event()
        self._hurry = asyncio.Event()  # no more lingering
        self._calls = Turns()  # a collection takes one call at a time
        self._live_at = float("-inf")
        self._live_in_a_row = 0
        self._bulk_documents = FEWEST_BULK  # of a call beside live ones
        self._bulk_took_s = 0.0
        self._closed = False
        self._began: dict[object, float] = {}  # the calls that run
        self.trouble: str | None = None
        """Why the store takes nothing now; None when the last call went well."""

    def problem(self) -> str | None:
        """`trouble`, or for how long a call has been waited for, when that is long."""
        if self.trouble is None and self._began:
            waited_s = self._clock.monotonic() - min(self._began.values())
            if waited_s > SLOW_S:
                return f"{self.collection.where}: a call has taken {waited_s:.0f} s so far"
        return self.trouble

    async def submit(self, write: Write, lane: Lane = "bulk") -> Outcome:
        """Store one document; returns when it is durable, or will never be.

        Raises:
            StoreUnavailable: given up after `policy.attempts`; nothing is known of it.
        """
        pending = _Pending(write, asyncio.get_running_loop().create_future())
        self._add(pending, lane)
        return await pending.done

    async def known(self, document_ids: Sequence[str], lane: Lane = "bulk") -> dict[str, Entry]:
        """Ledger entries of those that have one. Raises `StoreUnavailable`."""
        async with self._call(lane, beside=self.collection.reads_beside_writes):
            return await self.collection.read_entries(document_ids)

    @contextlib.asynccontextmanager
    async def _call(self, lane: Lane, *, beside: bool = False) -> AsyncIterator[float]:
        """Around one call to the collection; when it began. beside: others may run meanwhile."""
        turn = contextlib.nullcontext() if beside else self._calls.turn(lane)
        async with turn, asyncio.timeout(self.policy.write_timeout_s):
            if self._closed:
                raise StoreUnavailable("the service stops")
            call, began = object(), self._clock.monotonic()
            self._began[call] = began
            try:
                yield began
            finally:
                del self._began[call]

    async def aclose(self) -> None:
        """Disconnect, after the call that runs, if it ends within `CLOSE_S`. What still waits fails."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_S), self._calls.turn("interactive"):
                pass
        except TimeoutError:
            log.warning("index_closed_in_a_call", reason=self.collection.where)
        await self.collection.aclose()

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._waiting.values())

    def _add(self, pending: _Pending, lane: Lane) -> None:
        waiting = self._waiting[lane]
        name = pending.write.document_id
        self._n_bytes += pending.write.n_bytes
        before = waiting.get(name)
        if before is None:
            waiting[name] = pending
        elif pending.write.version.older_than(before.write.version):
            before.older.append(pending)
        else:
            # Last in the order of the dict as well: it is as young as its newest version.
            del waiting[name]
            pending.older.extend(before.everyone())
            before.older = []
            waiting[name] = pending
        if lane == "interactive":
            self._live_at = self._clock.monotonic()
        if lane == "interactive" or self._full():
            self._hurry.set()
        self._arrived.set()

    # --- the task -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write batches until cancelled; what waits then is left to its deliveries."""
        while True:
            await self._arrived.wait()
            await self._linger()
            batch, n_bulk = self._take()
            lane: Lane = "interactive" if n_bulk < len(batch) else "bulk"
            try:
                outcomes = await self._write([pending.write for pending in batch], lane, n_bulk)
            except asyncio.CancelledError:
                for pending in batch:
                    _fail(pending, StoreUnavailable("stopped before it was written"))
                raise
            except Exception as error:  # noqa: BLE001  raised where the document is waited for
                for pending in batch:
                    _fail(pending, error)
            else:
                for pending, outcome in zip(batch, outcomes, strict=True):
                    self._finish(pending, outcome)

    def _full(self) -> bool:
        return len(self) >= self.policy.max_documents or self._n_bytes >= self.policy.max_bytes

    def _beside_live(self) -> bool:
        return self._clock.monotonic() - self._live_at < LIVE_RECENT_S

    async def _linger(self) -> None:
        """Wait for company. Beside live changes the store is left free for twice as long as it was taken."""
        linger_s = self.policy.linger_s
        if self._beside_live():
            linger_s = max(linger_s, 2 * self._bulk_took_s)
        if self._waiting["interactive"] or self._full() or not linger_s:
            return
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await self._hurry.wait()

    def _take(self) -> tuple[list[_Pending], int]:
        """The next batch, and how many of it are bulk: interactive ones first and, mostly, alone; each
        lane as it came. A larger document goes alone."""
        batch: dict[str, _Pending] = {}
        n_bulk = n_bytes = 0
        live_alone = self._waiting["interactive"] and self._live_in_a_row < LIVE_IN_A_ROW
        self._live_in_a_row = self._live_in_a_row + 1 if live_alone else 0
        most_bulk = self._bulk_documents if self._beside_live() else self.policy.max_documents
        for lane in LANES:
            if lane == "bulk" and live_alone:
                break
            waiting = self._waiting[lane]
            for name, pending in list(waiting.items()):
                size = pending.write.n_bytes
                if batch and n_bytes + size > self.policy.max_bytes:
                    break
                if len(batch) >= self.policy.max_documents:
                    break
                if lane == "bulk" and n_bulk >= most_bulk:
                    break
                if name in batch:
                    continue  # the other lane's version of it goes in this batch: this one waits
                batch[name] = waiting.pop(name)
                n_bytes += size
                n_bulk += lane == "bulk"
        for pending in batch.values():
            self._n_bytes -= sum(one.write.n_bytes for one in pending.everyone())
        if not len(self):
            self._arrived.clear()
        return list(batch.values()), n_bulk

    async def _write(self, writes: list[Write], lane: Lane, n_bulk: int) -> list[Outcome]:
        backoff_s = self.policy.first_backoff_s
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._call(lane) as began:
                    outcomes = await self.collection.write(writes, now_ms=self._clock.epoch_ms())
            except (StoreUnavailable, TimeoutError) as error:
                wait_s = self._trouble(error, attempt, backoff_s)
                if attempt >= self.policy.attempts or self._closed:
                    raise StoreUnavailable(self.trouble or "the store is unavailable") from error
                await asyncio.sleep(wait_s)
                backoff_s = min(backoff_s * 2, self.policy.max_backoff_s)
            else:
                self.trouble = None
                took_s = self._clock.monotonic() - began
                self._note(writes, outcomes, took_s)
                if n_bulk:
                    self._size_up(n_bulk, took_s)
                return outcomes

    def _size_up(self, n_bulk: int, took_s: float) -> None:
        """How many bulk documents the next call beside live ones may hold."""
        self._bulk_took_s = took_s
        target_s = self.policy.beside_live_s
        if took_s > target_s:
            fewer = min(self._bulk_documents, int(n_bulk * target_s / took_s))
            self._bulk_documents = max(FEWEST_BULK, fewer)
        elif n_bulk >= self._bulk_documents:
            self._bulk_documents = min(2 * n_bulk, self.policy.max_documents)

    def _trouble(self, error: Exception, attempt: int, backoff_s: float) -> float:
        where, timeout_s = self.collection.where, self.policy.write_timeout_s
        if isinstance(error, TimeoutError):
            self.trouble = f"{where}: no answer within {timeout_s:g} s"
        else:
            self.trouble = f"{where}: {error}"
        self._metrics.count("index_retries_total")
        log.warning("index_write_retried", attempt=attempt, reason=self.trouble)
        asked = getattr(error, "retry_after_s", None)
        return max(asked or 0.0, backoff_s * random.uniform(0.5, 1.0))

    def _note(self, writes: list[Write], outcomes: list[Outcome], seconds: float) -> None:
        self._metrics.observe("index_write_seconds", seconds)
        for write, outcome in zip(writes, outcomes, strict=True):
            self._metrics.count("index_documents_total", outcome=outcome.kind)
            if outcome.kind == "written":
                self._metrics.count("index_chunks_total", len(write.chunks or ()))

    def _finish(self, pending: _Pending, outcome: Outcome) -> None:
        if outcome.kind in ("refused", "moved") and pending.older:
            # What it stood for was never written: the newest of those is next.
            for one in pending.older:
                self._add(one, "bulk")
            pending.older = []
        if not pending.done.done():
            pending.done.set_result(outcome)
        for one in pending.older:
            if not one.done.done():
                one.done.set_result(SUPERSEDED)


def _fail(pending: _Pending, error: Exception) -> None:
    for one in pending.everyone():
        if not one.done.done():
            one.done.set_exception(error)

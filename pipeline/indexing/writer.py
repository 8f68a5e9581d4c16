"""The index writer: documents of all routes into one collection, in batches, retried.

Who calls it: the publishers of indexing routes `submit` one document each and wait for its outcome;
`run` is one supervised task; the intake asks `known` before it has anything embedded.
What must stay true: a batch holds a document once, its newest version, and the older ones share that
version's outcome unless it is refused; what the store cannot take now is retried with back-off and
given up after `attempts`, never dropped; interactive writes go before bulk ones. Memory is bounded by
the requests in flight, because each holds at most one write here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from actors.ports import Clock, Metrics
from pipeline.indexing.records import Entry, Outcome, Write
from pipeline.indexing.sinks.base import Collection, StoreUnavailable
from schemas.requests import LANES, Lane

log = structlog.get_logger(__name__)

CLOSE_S = 2.0
SUPERSEDED = Outcome("stale", "a newer version came before it was written")


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """A batch leaves at `max_documents`, at `max_bytes`, or `linger_s` after its first document.

    write_timeout_s: after this a call counts as unanswered, and the batch is written again.
    The wait between tries doubles from first_backoff_s to max_backoff_s, with jitter.
    """

    max_documents: int = 512
    max_bytes: int = 16 * 1024 * 1024
    linger_s: float = 0.02
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
        self._calls = asyncio.Lock()  # a collection takes one call at a time
        self._closed = False
        self.trouble: str | None = None
        """Why the store takes nothing now; None when the last call went well."""

    async def submit(self, write: Write, lane: Lane = "bulk") -> Outcome:
        """Store one document; returns when it is durable, or will never be.

        Raises:
            StoreUnavailable: given up after `policy.attempts`; nothing is known of it.
        """
        pending = _Pending(write, asyncio.get_running_loop().create_future())
        self._add(pending, lane)
        return await pending.done

    async def known(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """Ledger entries of those that have one. Raises `StoreUnavailable`."""
        async with self._calls, asyncio.timeout(self.policy.write_timeout_s):
            self._check_open()
            return await self.collection.read_entries(document_ids)

    async def aclose(self) -> None:
        """Disconnect, after the call that runs, if it ends within `CLOSE_S`. What still waits fails."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_S), self._calls:
                pass
        except TimeoutError:
            log.warning("index_closed_in_a_call", reason=self.collection.where)
        await self.collection.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the service stops")

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
        self._arrived.set()

    # --- the task -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write batches until cancelled; what waits then is left to its deliveries."""
        while True:
            await self._arrived.wait()
            if not self._full() and self.policy.linger_s:
                await asyncio.sleep(self.policy.linger_s)
            batch = self._take()
            try:
                outcomes = await self._write([pending.write for pending in batch])
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

    def _take(self) -> list[_Pending]:
        """The next batch: interactive first, then as they came. A larger document goes alone."""
        batch: dict[str, _Pending] = {}
        n_bytes = 0
        for lane in LANES:
            waiting = self._waiting[lane]
            for name, pending in list(waiting.items()):
                size = pending.write.n_bytes
                if batch and n_bytes + size > self.policy.max_bytes:
                    break
                if len(batch) >= self.policy.max_documents:
                    break
                if name in batch:
                    continue  # the other lane's version of it goes in this batch: this one waits
                batch[name] = waiting.pop(name)
                n_bytes += size
        for pending in batch.values():
            self._n_bytes -= sum(one.write.n_bytes for one in pending.everyone())
        if not len(self):
            self._arrived.clear()
        return list(batch.values())

    async def _write(self, writes: list[Write]) -> list[Outcome]:
        backoff_s = self.policy.first_backoff_s
        attempt = 0
        while True:
            attempt += 1
            started = self._clock.monotonic()
            try:
                async with self._calls, asyncio.timeout(self.policy.write_timeout_s):
                    self._check_open()
                    outcomes = await self.collection.write(writes, now_ms=self._clock.epoch_ms())
            except (StoreUnavailable, TimeoutError) as error:
                wait_s = self._trouble(error, attempt, backoff_s)
                if attempt >= self.policy.attempts or self._closed:
                    raise StoreUnavailable(self.trouble or "the store is unavailable") from error
                await asyncio.sleep(wait_s)
                backoff_s = min(backoff_s * 2, self.policy.max_backoff_s)
            else:
                self.trouble = None
                self._note(writes, outcomes, self._clock.monotonic() - started)
                return outcomes

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

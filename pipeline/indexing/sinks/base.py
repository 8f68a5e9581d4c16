"""What a vector store must do to be a destination, and what all of them do alike.

Who calls it: the index writer, one batch at a time; the commands `search`, `index status`,
`reindex`. Each store is one file beside this one and one row in `registry`.
What must stay true: a document's chunks are stored before its ledger entry, and its entry before the
outcome is told. Where the store has no transactions, an entry is marked unfinished before the chunks
under it change: after a crash in between, the next version is written whole, whichever it is (a
compacted topic need not give the same one again). Surplus chunks are found by document id and
ordinal, never by what the ledger remembers. One bad document fails alone. Vectors that are not
finite, zero, or of the wrong size never reach a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
from pipeline.indexing.records import (
    UNCHANGED,
    UNFINISHED,
    WRITTEN,
    Entry,
    Outcome,
    Write,
    judge,
)
from pipeline.indexing.vectors import TAKEN_BY, Vector, flaw_of
from schemas.requests import Output

T = TypeVar("T")


class StoreUnavailable(Exception):
    """The store cannot take it now: down, full, read-only, overloaded. The same write may pass later.

    retry_after_s: how long the store asked to wait, None when it did not say.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreRefused(Exception):
    """The store will never take this batch as it is; one document in it is to blame."""


@dataclass(frozen=True, slots=True)
class SinkLimits:
    """What one call to the store may hold."""

    max_points: int = 1000
    max_bytes: int = 4 * 1024 * 1024  # Qdrant's advice is below 5 MB; every store is faster below


@dataclass(frozen=True, slots=True)
class CollectionStatus:
    """What `index status` shows. `changed_at_ms`: epoch of the last write, None when there was none."""

    identity: CollectionIdentity
    n_documents: int
    n_chunks: int
    changed_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """One chunk found. `score`: by the collection's metric, larger is nearer."""

    document_id: str
    ordinal: int
    text: str
    metadata: Mapping[str, Any]
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One stored chunk, as `rows` reads it back."""

    chunk_id: str
    document_id: str
    ordinal: int
    text: str
    metadata: Mapping[str, Any]
    vector: Vector


@dataclass(slots=True)
class Plan:
    """A batch after judging. outcomes: by document, all of them."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    puts: list[Write] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def keep(self) -> dict[str, int]:
        """Document -> how many chunks it keeps: those at this ordinal and above are surplus."""
        return {write.document_id: len(write.chunks or ()) for write in self.puts}


class Collection(ABC):
    """One collection of one store. Calls come one at a time.

    where: what messages call it; never holds a password.
    """

    limits: SinkLimits = SinkLimits()
    has_aliases: bool = False
    """The store can give a collection a second name, for readers, and move it in one step."""
    kinds: frozenset[Output] = frozenset({"dense"})
    """Of vectors that the store has."""
    transactional: bool = False
    """Chunks and ledger change together or not at all."""
    reads_beside_writes: bool = False
    """`read_entries` may be called while another call runs."""
    where: str

    def __init__(self) -> None:
        self.identity: CollectionIdentity | None = None

    # --- what each store does -------------------------------------------------------------------

    @abstractmethod
    async def connect(self) -> None:
        """Reach the store. Raises `StoreUnavailable` with a one-line remedy."""

    @abstractmethod
    async def read_identity(self) -> CollectionIdentity | None:
        """What stands beside the collection; None when there is no such collection.
        Raises `WrongCollection` when others made it."""

    @abstractmethod
    async def create(self, identity: CollectionIdentity) -> None:
        """Make the collection and its ledger; nothing happens to what exists."""

    @abstractmethod
    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """Ledger entries of those that have one."""

    @abstractmethod
    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """Store every chunk of these documents, over what has the same id.
        Raises `StoreRefused` or `StoreUnavailable`."""

    @abstractmethod
    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """Delete the chunks of these documents at and above the given ordinals."""

    @abstractmethod
    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """Write ledger entries over what has the same id, after all else."""

    @abstractmethod
    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """The k nearest chunks, best first."""

    @abstractmethod
    async def count(self) -> tuple[int, int, int | None]:
        """Documents that are there, their chunks, epoch milliseconds of the last change."""

    @abstractmethod
    def rows(self) -> AsyncIterator[Row]:
        """Every stored chunk, in no order."""

    @abstractmethod
    def entries(self) -> AsyncIterator[Entry]:
        """Every ledger entry, in no order; those of deleted documents too."""

    @abstractmethod
    async def drop(self) -> None:
        """Delete the collection and its ledger."""

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect."""

    async def lead_alias(self, alias: str) -> None:
        """Let `alias` name this collection from now on, for readers; only where `has_aliases`."""
        raise NotImplementedError(f"{type(self).__name__} has no aliases")

    # --- what all do alike ----------------------------------------------------------------------

    async def open(self, identity: CollectionIdentity, *, create: bool = True) -> None:
        """Connect, make the collection when it is not there, check it when it is.

        Raises:
            StoreUnavailable: the store does not answer.
            WrongCollection: another model, prompt, size or cutting; others made it; or the store has no
                vectors of this kind.
        """
        if identity.kind not in self.kinds:
            raise WrongCollection(
                f"{self.where}: the store has no {identity.kind} vectors; these have: "
                + ", ".join(TAKEN_BY[identity.kind])
            )
        await self.connect()
        found = await self.read_identity()
        if found is None:
            if not create:
                raise WrongCollection(f"{self.where} does not exist")
            await self.create(identity)
            found = await self.read_identity()
            assert found is not None, "a collection that was just made is not there"
        found.check(identity, self.where)
        self.identity = found

    async def open_as_is(self) -> CollectionIdentity:
        """Connect to what exists, for reading. Raises `WrongCollection` when there is nothing."""
        await self.connect()
        found = await self.read_identity()
        if found is None:
            raise WrongCollection(f"{self.where} does not exist: index something into it first")
        self.identity = found
        return found

    async def write(self, writes: Sequence[Write], *, now_ms: int) -> list[Outcome]:
        """Apply a batch with at most one write per document; one outcome per write, in order.

        Raises `StoreUnavailable`; nothing or all of it or a part may be stored then, and the same
        batch can be written again.
        """
        assert self.identity is not None, "open comes before write"
        refused = {w.document_id: r for w in writes if (r := _fault(w, self.identity)) is not None}
        sound = [write for write in writes if write.document_id not in refused]
        outcomes = {name: Outcome("refused", reason) for name, reason in refused.items()}
        # By id, so that two writers that lock rows lock them in the same order.
        await self._write_isolated(sorted(sound, key=lambda w: w.document_id), outcomes, now_ms)
        return [outcomes[write.document_id] for write in writes]

    async def _write_isolated(
        self, writes: list[Write], outcomes: dict[str, Outcome], now_ms: int
    ) -> None:
        """Halve a batch that is refused until the bad document is alone."""
        if not writes:
            return
        try:
            outcomes.update(await self.transact(writes, now_ms))
        except StoreRefused as error:
            if len(writes) == 1:
                outcomes[writes[0].document_id] = Outcome("refused", str(error))
                return
            half = len(writes) // 2
            await self._write_isolated(writes[:half], outcomes, now_ms)
            await self._write_isolated(writes[half:], outcomes, now_ms)

    async def transact(self, writes: Sequence[Write], now_ms: int) -> dict[str, Outcome]:
        """Judge and apply. Stores that have transactions wrap this one."""
        entries = await self.read_entries([write.document_id for write in writes])
        plan = planned(writes, entries, now_ms)
        if plan.puts:
            if not self.transactional and (torn := unfinished(plan.puts, entries)):
                await self.put_entries(torn)
            if any(write.chunks for write in plan.puts):
                await self.put_chunks([write for write in plan.puts if write.chunks])
            await self.delete_surplus(plan.keep)
        if plan.entries:
            await self.put_entries(plan.entries)
        return plan.outcomes

    async def status(self) -> CollectionStatus:
        """Raises `StoreUnavailable`."""
        assert self.identity is not None
        n_documents, n_chunks, changed = await self.count()
        return CollectionStatus(self.identity, n_documents, n_chunks, changed)


def planned(writes: Sequence[Write], entries: Mapping[str, Entry], now_ms: int) -> Plan:
    """What a batch does to documents whose ledger entries are `entries`. Pure."""
    plan = Plan()
    for write in writes:
        entry = entries.get(write.document_id)
        outcome = plan.outcomes[write.document_id] = judge(entry, write)
        if outcome is WRITTEN:
            plan.puts.append(write)
            plan.entries.append(
                Entry(
                    write.document_id,
                    write.version,
                    write.content_hash,
                    len(write.chunks or ()),
                    now_ms,
                )
            )
        elif outcome is UNCHANGED and entry is not None and entry.version != write.version:
            plan.entries.append(
                Entry(
                    write.document_id,
                    write.version,
                    entry.content_hash,
                    entry.n_chunks,
                    entry.changed_at_ms,
                )
            )
    return plan


def unfinished(puts: Sequence[Write], entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries of documents that are about to change, marked so. Pure."""
    known = (entries.get(write.document_id) for write in puts)
    return [
        replace(entry, content_hash=UNFINISHED)
        for entry in known
        if entry is not None and entry.content_hash != UNFINISHED
    ]


def _fault(write: Write, identity: CollectionIdentity) -> str | None:
    """Why no store shall see this write, or None."""
    for chunk in write.chunks or ():
        flaw = flaw_of(chunk.vector, identity.kind, identity.dimensions)
        if flaw is not None:
            return f"the vector of chunk {chunk.ordinal} {flaw}"
    return None


def batched(items: Iterable[tuple[T, int]], limits: SinkLimits) -> Iterator[list[T]]:
    """Items with their sizes in bytes, in calls that keep both limits; a larger one goes alone."""
    batch: list[T] = []
    n_bytes = 0
    for item, size in items:
        if batch and (len(batch) >= limits.max_points or n_bytes + size > limits.max_bytes):
            yield batch
            batch, n_bytes = [], 0
        batch.append(item)
        n_bytes += size
    if batch:
        yield batch

"""A second collection from the text that the first one stores, while the first one serves.

Who calls it: `embedstream reindex`.
What must stay true: a document is taken over with the version and the content hash that the first
ledger tells, so that a topic goes on where it was and unchanged documents are skipped; what changes
while it is read is left to the next pass, never stored half old and half new; what the second
collection has, or has newer from a route of its own, is left alone. A run that was cut short is run again.
"""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.indexing.chunking import Chunker
from pipeline.indexing.records import UNFINISHED, Chunk, Entry, Outcome, Version, Write
from pipeline.indexing.sinks.base import Collection, Hit, Row
from pipeline.indexing.vectors import Vector
from schemas.errors import EmbedstreamError
from schemas.requests import Text

Embed = Callable[[Sequence[Text]], Awaitable[Sequence[Sequence[Vector] | EmbedstreamError]]]
"""Texts to their vectors, or one error, in order: one vector, or one for each span of a text."""

DOCUMENTS_A_STEP = 64
NEIGHBOURS = 10
"""Documents that agreement compares: overlap@10."""
_SEARCHED = 50
"""Chunks that are asked for to find so many documents."""


@dataclass(slots=True)
class Totals:
    """What one pass did. failed: (document id, reason)."""

    written: int = 0
    there: int = 0
    changing: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


class Reindexing:
    """Fills `new` from `old`; both are open.

    Args:
        chunker: cuts stored chunks that are longer than the new collection's may be.
        on_document: told after each document that was looked at.
        n_sampled: chunks whose neighbours `agreement` compares.
    """

    def __init__(
        self,
        old: Collection,
        new: Collection,
        *,
        chunker: Chunker,
        embed: Embed,
        now_ms: Callable[[], int],
        on_document: Callable[[], object] = lambda: None,
        n_sampled: int = 100,
        seed: int = 0,
    ) -> None:
        self._old, self._new = old, new
        self._chunker = chunker
        self._embed = embed
        self._now_ms = now_ms
        self._on_document = on_document
        self._n_sampled = n_sampled
        self._random = random.Random(seed)

    async def once(self) -> Totals:
        """One pass over all documents. Raises `StoreUnavailable`; what was written stays."""
        totals = Totals()
        with _Stage() as stage:
            await stage.read(self._old)
            for entries in stage.steps():
                await self._step(stage, entries, totals)
        return totals

    async def _step(self, stage: _Stage, entries: list[Entry], totals: Totals) -> None:
        names = [entry.document_id for entry in entries]
        now = await self._old.read_entries(names)
        there = await self._new.read_entries(names)
        writes: list[tuple[Entry, list[_Stored] | None]] = []
        for entry in entries:
            has = there.get(entry.document_id)
            stored = stage.chunks(entry.document_id)
            if entry.content_hash == UNFINISHED:
                totals.changing += 1
            elif has is not None and entry.version.older_than(has.version):
                totals.there += 1
            elif has is not None and has.content_hash == entry.content_hash:
                if has.version == entry.version:
                    totals.there += 1
                else:
                    writes.append((entry, None))
            elif now.get(entry.document_id) != entry or len(stored) != entry.n_chunks:
                totals.changing += 1
            else:
                writes.append((entry, stored))
        await self._write(writes, totals)
        for _ in entries:
            self._on_document()

    async def _write(
        self, wanted: list[tuple[Entry, list[_Stored] | None]], totals: Totals
    ) -> None:
        cuts = [self._chunker.cut_again([s.text for s in stored or ()]) for _, stored in wanted]
        items = [item for cut in cuts for item in cut.items]
        answers = iter(await self._embed(items) if items else ())
        writes: list[Write] = []
        for (entry, stored), cut in zip(wanted, cuts, strict=True):
            found = [next(answers) for _ in cut.items]
            error = next((one for one in found if isinstance(one, EmbedstreamError)), None)
            if error is not None:
                totals.failed.append((entry.document_id, f"{error.code}: {error.message}"))
                continue
            vectors = [v for one in found if not isinstance(one, EmbedstreamError) for v in one]
            chunks = tuple(
                Chunk(ordinal, text, vector)
                for ordinal, (text, vector) in enumerate(zip(cut.texts, vectors, strict=True))
            )
            metadata = stored[0].metadata if stored else {}
            writes.append(
                Write(
                    entry.document_id,
                    entry.version,
                    entry.content_hash,
                    None if stored is None else chunks,
                    metadata,
                )
            )
        outcomes = await self._new.write(writes, now_ms=self._now_ms()) if writes else []
        for write, outcome in zip(writes, outcomes, strict=True):
            _count(totals, write, outcome)

    async def agreement(self) -> float | None:
        """Mean overlap@10 of the documents that both collections find for sampled chunks, 0 to 1.

        The chunk's own document is left out; None when there is nothing to compare.
        """
        shares: list[float] = []
        rows = await self._sampled()
        vectors = await self._embed([Text(row.text) for row in rows]) if rows else ()
        for row, found in zip(rows, vectors, strict=True):
            if isinstance(found, EmbedstreamError):
                continue
            before = _others(await self._old.search(row.vector, _SEARCHED), row.document_id)
            after = _others(await self._new.search(found[0], _SEARCHED), row.document_id)
            if before:
                shares.append(len(set(before) & set(after)) / len(before))
        return sum(shares) / len(shares) if shares else None

    async def _sampled(self) -> list[Row]:
        """A uniform sample of the old collection's chunks (reservoir, algorithm R)."""
        sample: list[Row] = []
        seen = 0
        async for row in self._old.rows():
            seen += 1
            if len(sample) < self._n_sampled:
                sample.append(row)
            elif (at := self._random.randrange(seen)) < self._n_sampled:
                sample[at] = row
        return [row for row in sample if self._chunker.count(row.text) <= self._chunker.max_tokens]


def _count(totals: Totals, write: Write, outcome: Outcome) -> None:
    if outcome.kind in ("written", "unchanged"):
        totals.written += 1
    elif outcome.kind == "stale":
        totals.there += 1
    elif outcome.kind == "moved":
        totals.changing += 1
    else:
        totals.failed.append((write.document_id, outcome.reason))


def _others(hits: Sequence[Hit], document_id: str) -> list[str]:
    names = dict.fromkeys(hit.document_id for hit in hits if hit.document_id != document_id)
    return list(names)[:NEIGHBOURS]


@dataclass(frozen=True, slots=True)
class _Stored:
    text: str
    metadata: dict[str, Any]


class _Stage:
    """A collection's ledger and texts in a temporary file: stores give chunks in no order, and a
    collection may be larger than the memory."""

    def __enter__(self) -> _Stage:
        self._file = tempfile.NamedTemporaryFile(prefix="embedstream-reindex-")
        self._db = sqlite3.connect(self._file.name, isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE entry (id TEXT PRIMARY KEY, source TEXT, number INTEGER, hash TEXT,"
            " n_chunks INTEGER, changed_at_ms INTEGER) WITHOUT ROWID;"
            "CREATE TABLE chunk (id TEXT, ordinal INTEGER, text TEXT, metadata TEXT,"
            " PRIMARY KEY (id, ordinal)) WITHOUT ROWID"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._file.close()

    async def read(self, collection: Collection) -> None:
        """The ledger first: a document that changes behind it differs from it afterwards."""
        entries = (
            (
                e.document_id,
                e.version.source,
                e.version.number,
                e.content_hash,
                e.n_chunks,
                e.changed_at_ms,
            )
            async for e in collection.entries()
        )
        await self._insert("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?)", entries)
        chunks = (
            (r.document_id, r.ordinal, r.text, json.dumps(dict(r.metadata), ensure_ascii=False))
            async for r in collection.rows()
        )
        await self._insert("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?)", chunks)

    async def _insert(self, statement: str, rows: AsyncIterator[tuple[Any, ...]]) -> None:
        batch: list[tuple[Any, ...]] = []
        async for row in rows:
            batch.append(row)
            if len(batch) == 1000:
                self._db.executemany(statement, batch)
                batch = []
        self._db.executemany(statement, batch)

    def steps(self) -> Iterator[list[Entry]]:
        """All entries by document id, some at a time."""
        last = ""
        while True:
            found = self._db.execute(
                "SELECT * FROM entry WHERE id > ? ORDER BY id LIMIT ?", (last, DOCUMENTS_A_STEP)
            ).fetchall()
            if not found:
                return
            yield [Entry(row[0], Version(row[1], row[2]), *row[3:]) for row in found]
            last = found[-1][0]

    def chunks(self, document_id: str) -> list[_Stored]:
        """The chunks of a document, in order."""
        rows = self._db.execute(
            "SELECT text, metadata FROM chunk WHERE id = ? ORDER BY ordinal", (document_id,)
        )
        return [_Stored(text, json.loads(metadata)) for text, metadata in rows]

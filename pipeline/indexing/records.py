"""What indexing speaks of: documents, their versions, their chunks, and what became of a write. Pure.

Who calls it: the mapping makes `Change`s, the chunker cuts their text, the writer hands `Write`s to
a `Collection` and gets one `Outcome` each.
What must stay true: a chunk's id is a function of document id and ordinal alone, so a write that is
repeated overwrites itself; a version says in which log its number counts, because numbers of two
logs cannot be compared.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.indexing.vectors import Vector

CHUNK_NAMESPACE = uuid.UUID("6f6a1f0e-53f4-5c9b-9d58-0e1d4b1a3c55")
"""uuid5 namespace of chunk ids; part of the stored data, so it never changes."""

DUMP = "dump"
"""The source of what a file says: a backfill fills gaps, and never overwrites what a log has told."""

DELETED = ""
"""The content hash of a document that is gone."""

UNFINISHED = "?"
"""The content hash of a document whose chunks are being written: it equals no content, so whatever
version comes next is written whole."""


@dataclass(frozen=True, slots=True)
class Version:
    """When a change was made: `number` counts in `source`.

    source: the log that numbers the changes (``topic/partition``, a stream); "" when the document
    itself carries its version; `DUMP` for a file.  number: int64, larger is newer.
    """

    source: str
    number: int

    def older_than(self, other: Version) -> bool:
        """Known to be older: a smaller number of the same log, or a dump where a log has written."""
        if self.source != other.source:
            return self.source == DUMP
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Change:
    """One document as its source tells it. `text` None: the document is gone."""

    document_id: str
    version: Version
    text: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """blake2b-128 over text and metadata, in hex; `DELETED` for a delete."""
        if self.text is None:
            return DELETED
        canonical = json.dumps([self.text, self.metadata], ensure_ascii=False, sort_keys=True)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of a document with its vector, of the collection's kind."""

    ordinal: int
    text: str
    vector: Vector


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """What shall become of one document in a collection.

    chunks: in order; empty for a delete; None when the content is believed to be stored already
    (the content hash says so), and only the version shall move.
    """

    document_id: str
    version: Version
    content_hash: str
    chunks: tuple[Chunk, ...] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """About what it takes on the wire."""
        meta = len(str(self.metadata)) + len(self.document_id) + 64
        return meta + sum(len(c.text) + c.vector.nbytes + meta for c in self.chunks or ())


@dataclass(frozen=True, slots=True)
class Entry:
    """What the collection's ledger knows of a document, written after its chunks.

    A document that was deleted keeps its entry (`content_hash` is `DELETED`), so that a late older
    version cannot bring it back.
    """

    document_id: str
    version: Version
    content_hash: str
    n_chunks: int
    changed_at_ms: int = 0  # epoch

    def to_fields(self) -> dict[str, Any]:
        """Flat, as a store keeps it."""
        return {
            "document_id": self.document_id,
            "source": self.version.source,
            "number": self.version.number,
            "content_hash": self.content_hash,
            "n_chunks": self.n_chunks,
            "changed_at_ms": self.changed_at_ms,
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Entry:
        """The inverse of `to_fields`; other fields are not read."""
        return Entry(
            fields["document_id"],
            Version(fields["source"], fields["number"]),
            fields["content_hash"],
            fields["n_chunks"],
            fields["changed_at_ms"],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a write.

    written: stored. unchanged: the content was there; at most its version moved. stale: a newer
    version is there. refused: the store will never take it; `reason` says why, without its text.
    moved: it was to be unchanged, and another writer changed the document meanwhile: embed it.
    """

    kind: Literal["written", "unchanged", "stale", "refused", "moved"]
    reason: str = ""


WRITTEN, UNCHANGED, STALE = Outcome("written"), Outcome("unchanged"), Outcome("stale")
MOVED = Outcome("moved", "another version was written in between")


def chunk_id(document_id: str, ordinal: int) -> str:
    """The id of a chunk in every store: uuid5 over ordinal and document id."""
    return str(uuid.uuid5(CHUNK_NAMESPACE, f"{ordinal}:{document_id}"))


def judge(entry: Entry | None, write: Write) -> Outcome:
    """What a write would do to a document whose ledger entry is `entry`: `WRITTEN` means that its
    chunks must be stored, `UNCHANGED` that at most the entry moves."""
    if entry is None:
        return WRITTEN if write.chunks is not None else MOVED
    if write.version.older_than(entry.version):
        return STALE
    if write.content_hash == entry.content_hash:
        return UNCHANGED
    return WRITTEN if write.chunks is not None else MOVED

"""A collection as Parquet files: a log of batches in one folder, and what it amounts to.

Who calls it: the sink `parquet`, from one thread at a time.
What must stay true: a file that was named is never changed; one process writes at a time, which a lock
on the folder sees to; readers need none, and look again when a merge took a file away. A row is a chunk
(`ordinal` 0 and above) or a ledger entry (`ordinal` -1). The newest entry of a document (`batch`) says
in which batch its chunks were written (`chunks_batch`): other rows of it are history. Files are named
after the batches they hold. The ledger is in memory: some 300 bytes per document.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.indexing.records import Entry, Write, chunk_id

T = TypeVar("T")

MAX_FILES = 32
"""More than these are merged: the newest, and older ones as long as they are at most twice as large."""
_ROWS = 1024
_TRIES = 5
_ENTRY = -1
"""The ordinal of a row that is a ledger entry."""


class FolderTaken(OSError):
    """Another process writes, merges faster than this one reads, or has made the folder anew."""


class NotStorable(ValueError):
    """No Parquet file can hold a value of this batch."""


class ParquetLog:
    """The files of one collection. Methods block, and raise `OSError` and `pyarrow.ArrowException`.

    entries: the ledger, by document id, as of the last `refresh`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self.names: list[str] = []  # of the files whose entries are in memory
        self._identity_file = folder / "identity.json"
        self._entry_batch: dict[str, int] = {}
        self._chunks_batch: dict[str, int] = {}
        self._lock: int | None = None
        self._made_at: int | None = None  # of the collection that was opened

    def read_identity(self) -> str | None:
        """The text beside the files; "" when others made them, None when there is nothing."""
        if not self._identity_file.exists():
            return "" if any(self.folder.glob("*.parquet")) else None
        self._made_at = self._identity_file.stat().st_mtime_ns
        return self._identity_file.read_text("utf-8")

    def create(self, identity: str) -> None:
        """The folder with the identity; nothing happens to one that has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._new_file() as (file, name):
            file.write(identity.encode())
            _durable(file)
            with contextlib.suppress(FileExistsError):  # another process made it meanwhile
                os.link(name, self._identity_file)
        _durable_folder(self.folder)

    def drop(self) -> None:
        """Renamed first, so that no half of it is left under its name."""
        if self._identity_file.exists():
            self.be_the_writer()
            gone = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.dropped")
            self.folder.rename(gone)
            shutil.rmtree(gone)
        self.release()

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[tuple[Any, Path]]:
        """A file under a temporary name, which is gone at the end unless it was renamed."""
        name = self.folder / f"{os.getpid()}-{id(self)}.tmp"
        try:
            with name.open("wb") as file:
                yield file, name
        finally:
            name.unlink(missing_ok=True)

    # --- what the files say ---------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the ledger in memory up to the files that are there.

        Raises `FolderTaken` when they are not those of the collection that was opened.
        """
        if self._identity_file.stat().st_mtime_ns != self._made_at:
            raise FolderTaken("the collection was made anew by another: open it again")
        for _ in range(_TRIES):
            names = _current(path.name for path in self.folder.glob("*-*.parquet"))
            if names == self.names:
                return
            if names[: len(self.names)] != self.names:  # merged by another process
                self.names, self.entries = [], {}
                self._entry_batch, self._chunks_batch = {}, {}
            try:
                for name in names[len(self.names) :]:
                    self._load(name)
                    self.names.append(name)
            except FileNotFoundError:
                continue  # merged while it was read
            return
        raise FolderTaken("the files are merged faster than they can be read")

    def _load(self, name: str) -> None:
        columns = [*LEDGER.names, "batch", "chunks_batch"]
        found = pq.read_table(
            self.folder / name, columns=columns, filters=[("ordinal", "=", _ENTRY)]
        )
        for row in found.to_pylist():
            self._remember(Entry.from_fields(row), row["batch"], row["chunks_batch"])

    def _remember(self, entry: Entry, batch: int, chunks_batch: int) -> None:
        name = entry.document_id
        if batch >= self._entry_batch.get(name, -1):
            self.entries[name] = entry
            self._entry_batch[name], self._chunks_batch[name] = batch, chunks_batch

    def _lives(self, document_id: str, ordinal: int, batch: int) -> bool:
        newest = self._entry_batch if ordinal == _ENTRY else self._chunks_batch
        return newest.get(document_id) == batch

    def live(self, names: Sequence[str], *, entries: bool) -> Iterator[pa.RecordBatch]:
        """The rows that are no history, file by file; with `entries` those of the ledger too.

        All files are open before the first row comes: a merge takes none of them away.
        """
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(pq.ParquetFile(self.folder / name)) for name in names]
            for rows in itertools.chain.from_iterable(
                file.iter_batches(batch_size=_ROWS) for file in files
            ):
                keys = [rows.column(key).to_pylist() for key in ("document_id", "ordinal", "batch")]
                mask = [
                    (entries or ordinal != _ENTRY) and self._lives(document_id, ordinal, batch)
                    for document_id, ordinal, batch in zip(*keys, strict=True)
                ]
                if any(mask):
                    yield rows.filter(pa.array(mask))

    # --- writing --------------------------------------------------------------------------------

    def be_the_writer(self) -> None:
        """Take the lock, once. Raises `FolderTaken` while another process has it."""
        self._identity_file.stat()  # raises when there is no such collection any more
        if self._lock is None:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                raise FolderTaken("another process writes it") from error
            self._lock = lock
            for left in self.folder.glob("*.tmp"):
                left.unlink(missing_ok=True)
            self._remove_merged()
        self.refresh()

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def commit(self, entries: Sequence[Entry], writes: Sequence[Write], dimensions: int) -> None:
        """Write one batch: the chunks of `writes`, and entries, whose other chunks stay where they are.

        Raises `NotStorable`.
        """
        batch = 1 + (_range(self.names[-1])[1] if self.names else 0)
        put = {write.document_id for write in writes}
        homes = [
            batch if e.document_id in put or not e.n_chunks else self._chunks_batch[e.document_id]
            for e in entries
        ]
        schema = _schema(dimensions)
        try:
            tables = [_entry_rows(entries, homes, batch, schema)]
            if put:
                tables.append(_chunk_rows(writes, batch, schema))
        except (pa.ArrowInvalid, UnicodeEncodeError, OverflowError) as error:
            raise NotStorable(f"no Parquet file can hold it ({type(error).__name__})") from error
        self._write(f"{batch:012d}-{batch:012d}.parquet", schema, tables)
        for entry, home in zip(entries, homes, strict=True):
            self._remember(entry, batch, home)

    def _write(self, final: str, schema: pa.Schema, tables: Iterable[Any]) -> None:
        """One new file; then it is the newest that is known."""
        with self._new_file() as (file, name):
            options = {"compression": "zstd", "use_dictionary": ["document_id", "source"]}
            with pq.ParquetWriter(file, schema, **options) as writer:
                for table in tables:
                    writer.write(table)
            _durable(file)
            name.rename(self.folder / final)
        _durable_folder(self.folder)
        self.names = _current([*self.names, final])

    def merge(self, dimensions: int) -> None:
        """Make one file of the newest ones, without their history, when there are many."""
        if len(self.names) <= MAX_FILES:
            return
        sizes = [(self.folder / name).stat().st_size for name in self.names]
        start = len(sizes) - 2
        while start and sizes[start - 1] <= 2 * sum(sizes[start:]):
            start -= 1
        merged = self.names[start:]
        final = f"{_range(merged[0])[0]:012d}-{_range(merged[-1])[1]:012d}.parquet"
        self._write(final, _schema(dimensions), self.live(merged, entries=True))
        self._remove_merged()

    def _remove_merged(self) -> None:
        names = {path.name for path in self.folder.glob("*-*.parquet")}
        for name in names - set(_current(names)):
            (self.folder / name).unlink(missing_ok=True)

    def again(self, read: Callable[[], T]) -> T:
        """Read the newest files, anew when a merge of another process took one away."""
        for _ in range(_TRIES):
            self.refresh()
            with contextlib.suppress(FileNotFoundError):
                return read()
        raise FolderTaken("the files are merged faster than they can be read")


LEDGER = pa.schema(
    [
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("source", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("content_hash", pa.string()),
        pa.field("n_chunks", pa.int32()),
        pa.field("changed_at_ms", pa.int64()),
    ]
)


def _schema(dimensions: int) -> pa.Schema:
    beside = [
        pa.field("ordinal", pa.int32(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("chunks_batch", pa.int64()),
        pa.field("id", pa.string()),
        pa.field("text", pa.string()),
        pa.field("metadata", pa.string()),  # JSON
        pa.field("vector", pa.list_(pa.float32(), dimensions)),
    ]
    return pa.schema([*LEDGER, *beside])


def _entry_rows(
    entries: Sequence[Entry], homes: Sequence[int], batch: int, schema: pa.Schema
) -> pa.Table:
    rows = [
        {**entry.to_fields(), "ordinal": _ENTRY, "batch": batch, "chunks_batch": home}
        for entry, home in zip(entries, homes, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def _chunk_rows(writes: Sequence[Write], batch: int, schema: pa.Schema) -> pa.Table:
    chunks = [(write, chunk) for write in writes for chunk in write.chunks or ()]
    vectors = pa.array(np.concatenate([chunk.vector for _, chunk in chunks]), pa.float32())
    columns: dict[str, Any] = {
        "document_id": [write.document_id for write, _ in chunks],
        "ordinal": [chunk.ordinal for _, chunk in chunks],
        "batch": [batch] * len(chunks),
        "id": [chunk_id(write.document_id, chunk.ordinal) for write, chunk in chunks],
        "text": [chunk.text for _, chunk in chunks],
        "metadata": [json.dumps(write.metadata, ensure_ascii=False) for write, _ in chunks],
        "vector": pa.FixedSizeListArray.from_arrays(vectors, schema.field("vector").type.list_size),
    }
    nothing = {f.name: pa.nulls(len(chunks), f.type) for f in schema if f.name not in columns}
    return pa.table({**nothing, **columns}, schema=schema)


def _range(name: str) -> tuple[int, int]:
    first, _, last = name.removesuffix(".parquet").partition("-")
    return int(first), int(last)


def _current(names: Iterable[str]) -> list[str]:
    """In order of their batches, without those that a merged file holds."""
    kept: list[str] = []
    for name in sorted(names, key=lambda one: (_range(one)[0], -_range(one)[1])):
        if not kept or _range(name)[1] > _range(kept[-1])[1]:
            kept.append(name)
    return kept


def _durable(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _durable_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

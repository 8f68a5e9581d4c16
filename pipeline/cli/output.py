"""Replies on their way out: a table for people, JSON lines for programs, npz for numpy.

Who calls it: `pipeline.cli.ask`.
What must stay true: results only on stdout (or in --out); a JSONL line is the wire reply with float
vectors; a failed request or item is visible in every form; a file of --out is whole or as it was.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from pipeline.cli.console import usage_error
from pipeline.lifecycle import OperatorError
from pipeline.whole_file import WholeFile, append_line
from schemas.codec import encode_reply
from schemas.errors import EmbedstreamError
from schemas.headers import JSON
from schemas.requests import DType
from schemas.results import FailureReply, ItemReply, Reply

MAX_FAILURE_LINES = 5


@dataclass(frozen=True, slots=True)
class Question:
    """One request: the id its sender knows, the id on the wire, the record, or why there is none."""

    user_id: str
    wire_id: str
    record: dict[str, Any]
    refused: EmbedstreamError | None = None


@dataclass(slots=True)
class Failures:
    """What went wrong, bounded: the first few lines and the rest as a number."""

    n_answered: int = 0
    n_requests: int = 0
    n_items: int = 0
    first: list[str] = field(default_factory=list)

    def note(self, reply: Reply | FailureReply) -> None:
        """Count the failures of one reply."""
        self.n_answered += 1
        if isinstance(reply, FailureReply):
            self.n_requests += 1
            self._say(f"{reply.id}: {_error_text(reply.error)}")
            return
        for item in reply.items:
            if item.error is not None:
                self.n_items += 1
                self._say(f"{reply.id}, item {item.index}: {_error_text(item.error)}")

    def _say(self, line: str) -> None:
        if len(self.first) < MAX_FAILURE_LINES:
            self.first.append(line)

    def lines(self) -> list[str]:
        """What to tell, one line each."""
        hidden = self.n_requests + self.n_items - len(self.first)
        return self.first + ([f"and {hidden} more failures"] if hidden else [])

    def __bool__(self) -> bool:
        return bool(self.n_requests or self.n_items)


def _error_text(error: EmbedstreamError) -> str:
    where = f" ({error.path})" if error.path else ""
    sizes = f" [limit {error.limit}, given {error.given}]" if error.limit is not None else ""
    return f"{error.code}: {error.message}{where}{sizes}"


class Writer(ABC):
    """One output. Leaving the `with` block without `finish` leaves a file as it was."""

    def __init__(self, out: Path | None) -> None:
        self._out = None if out is None else WholeFile(out, "--out")

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def write(self, question: Question, reply: Reply | FailureReply) -> None:
        """The next reply, in the order of the questions."""

    def finish(self) -> None:
        """All replies are in."""
        if self._out is not None:
            self._out.keep()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._out is not None:
            self._out.__exit__(kind, error, tb)


def open_writer(task: str, output: Literal["table", "jsonl", "npz"], out: Path | None) -> Writer:
    """The writer of a command. Raises `OperatorError` when `out` cannot be written."""
    if output == "npz":
        if out is None:
            raise usage_error("--output npz needs a file: add --out vectors.npz")
        return NpzWriter(out)
    return JsonlWriter(out) if output == "jsonl" else TableWriter(task, out)


class JsonlWriter(Writer):
    """One wire reply a line; on stdout written and flushed at once."""

    def write(self, question: Question, reply: Reply | FailureReply) -> None:
        line = encode_reply(reply, content_type=JSON, encoding="float") + b"\n"
        if self._out is None:
            _print_whole(line)
        else:
            self._out.write(line)


def _print_whole(line: bytes) -> None:
    """To stdout; when the disk behind it is full, the part of the line that went in is taken out."""
    stream = sys.stdout.buffer
    try:
        descriptor = stream.fileno()
    except OSError:  # no file at all: a test's
        stream.write(line)
        return
    try:  # past Python's buffer, which would try to write the rest of it at the exit
        append_line(descriptor, line)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OperatorError(
            f"standard output cannot be written ({error.strerror}): it ends after the last whole line"
        ) from None


class TableWriter(Writer):
    """Rows for people: gathered, printed at the end."""

    _HEADS: ClassVar[dict[str, tuple[str, ...]]] = {
        "embed": ("id", "index", "text", "tokens", "dimensions", "vector"),
        "classify": ("id", "index", "text", "label", "score"),
        "rerank": ("id", "rank", "score", "index", "document"),
    }  # fmt: skip

    def __init__(self, task: str, out: Path | None) -> None:
        super().__init__(out)
        self._task = task
        self._rows: list[tuple[str, ...]] = []
        self._many = False
        self._ids: set[str] = set()

    def write(self, question: Question, reply: Reply | FailureReply) -> None:
        self._ids.add(reply.id)
        width = len(self._HEADS[self._task])
        if isinstance(reply, FailureReply):
            failed = (reply.id, "", f"failed: {_error_text(reply.error)}")
            self._rows.append(failed + ("",) * (width - len(failed)))
            return
        for rank, item in enumerate(reply.items, start=1):
            for cells in self._cells(question, reply, item, rank):
                self._rows.append(cells + ("",) * (width - len(cells)))

    def _cells(
        self, question: Question, reply: Reply, item: ItemReply, rank: int
    ) -> list[tuple[str, ...]]:
        text = _short(_text_of(question, reply.task, item.index))
        if item.error is not None:
            shown = f"failed: {_error_text(item.error)}"
            if self._task == "rerank":
                return [(reply.id, "", "", str(item.index), shown)]
            return [(reply.id, str(item.index), shown)]
        if item.relevance_score is not None:
            score = f"{item.relevance_score:.4f}"
            return [(reply.id, str(rank), score, str(item.index), text)]
        if item.scores is not None:
            best = sorted(item.scores.items(), key=lambda entry: -entry[1])[:3]
            return [(reply.id, str(item.index), text, label, f"{s:.4f}") for label, s in best]
        return [
            (
                reply.id,
                str(item.index),
                text,
                "" if item.tokens is None else str(item.tokens),
                str(reply.dimensions or ""),
                _vector_head(item, reply.dtype or "float32"),
            )
        ]

    def finish(self) -> None:
        if self._rows:
            self._print()
        super().finish()

    def _print(self) -> None:
        from rich.table import Table

        from pipeline.cli.console import out_console

        heads = self._HEADS[self._task]
        first = 0 if len(self._ids) > 1 else 1  # one request: its id says nothing
        table = Table(box=None, pad_edge=False)
        for head in heads[first:]:
            numeric = head in ("index", "rank", "score", "tokens", "dimensions")
            table.add_column(head, justify="right" if numeric else "left", overflow="fold")
        from rich.text import Text

        for row in self._rows:
            table.add_row(*(Text(cell) for cell in row[first:]))  # Text: no markup in user text
        console = out_console()
        if self._out is None:
            console.print(table)
            return
        with console.capture() as capture:
            console.print(table)
        self._out.write(capture.get().encode())


def _text_of(question: Question, task: str, index: int) -> str:
    """The item as it was asked, for the table."""
    record = question.record
    items = record.get("documents" if task in ("rerank", "score") else "input", "")
    item = items[index] if isinstance(items, list) and index < len(items) else items
    if isinstance(item, dict):
        item = item.get("text", "(messages)" if item.get("messages") else "(image)")
    return item if isinstance(item, str) else "(token ids)"


def _short(text: str, width: int = 60) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * width]).split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _vector_head(item: ItemReply, dtype: DType) -> str:
    if item.embedding is None and item.sparse is not None:
        pairs = sorted(zip(item.sparse.values, item.sparse.indices, strict=True), reverse=True)
        heaviest = ", ".join(f"{i}: {weight:.3f}" for weight, i in pairs[:3])
        return f"{len(pairs)} weights" + (f"; heaviest {heaviest}" if pairs else "")
    if item.embedding is None:
        return f"{len(item.multivector or ())} vectors, one per token"
    values = _as_array(item.embedding, dtype)
    head = " ".join(f"{v:.4f}" if values.dtype.kind == "f" else str(v) for v in values[:4])
    return f"{head} …" if len(values) > 4 else head


def _as_array(data: bytes, dtype: DType) -> Any:
    """[dimensions] (binary: [dimensions / 8] uint8), host."""
    import numpy as np

    kinds = {"float32": "<f4", "float16": "<f2", "int8": "i1", "binary": "u1"}
    return np.frombuffer(data, dtype=kinds[dtype])


class NpzWriter(Writer):
    """Everything in one numpy archive, written when all is in.

    ids, index [n]; then by task embeddings [n, dimensions], or scores [n] (rerank), or scores
    [n, labels] and labels; failed items are left out and listed in error_ids, error_index (-1: the
    whole request) and error_codes.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self._ids: list[str] = []
        self._index: list[int] = []
        self._rows: list[Any] = []
        self._kinds: set[tuple[Any, ...]] = set()
        self._labels: list[str] | None = None
        self._errors: list[tuple[str, int, str]] = []

    def write(self, question: Question, reply: Reply | FailureReply) -> None:
        if isinstance(reply, FailureReply):
            self._errors.append((reply.id, -1, reply.error.code))
            return
        for item in reply.items:
            if item.error is not None:
                self._errors.append((reply.id, item.index, item.error.code))
                continue
            self._rows.append(self._row(reply, item))
            self._ids.append(reply.id)
            self._index.append(item.index)

    def _row(self, reply: Reply, item: ItemReply) -> Any:
        import numpy as np

        if item.embedding is not None:
            row = _as_array(item.embedding, reply.dtype or "float32")
            kind: tuple[Any, ...] = ("embeddings", row.dtype.str, row.shape)
        elif item.relevance_score is not None:
            row, kind = np.float32(item.relevance_score), ("scores",)
        elif item.scores is not None:
            self._labels = list(item.scores)
            row = np.array(list(item.scores.values()), np.float32)
            kind = ("scores", tuple(self._labels))
        else:
            raise OperatorError("npz holds dense vectors and scores only: use --output jsonl")
        self._kinds.add(kind)
        if len(self._kinds) > 1:
            raise OperatorError(
                "the replies have different sizes, dtypes or labels, which one array cannot hold: "
                "use --output jsonl"
            )
        return row

    def finish(self) -> None:
        import io

        import numpy as np

        arrays: dict[str, Any] = {
            "ids": np.array(self._ids, dtype=str),
            "index": np.array(self._index, np.int64),
            "error_ids": np.array([e[0] for e in self._errors], dtype=str),
            "error_index": np.array([e[1] for e in self._errors], np.int64),
            "error_codes": np.array([e[2] for e in self._errors], dtype=str),
        }
        for name, *_ in self._kinds:
            arrays[name] = np.stack(self._rows)
        if self._labels is not None:
            arrays["labels"] = np.array(self._labels, dtype=str)
        archive = io.BytesIO()  # zip goes back and forth, a pipe does not
        np.savez(archive, **arrays)
        assert self._out is not None
        self._out.write(archive.getbuffer())
        super().finish()

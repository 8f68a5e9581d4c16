"""Documents from files, for a backfill: JSONL, JSON, CSV, TSV, Parquet, folders of texts, stdin.

Who calls it: `embedstream index`, as the source of its one route.
What must stay true: files are read in a thread, a bounded number of rows ahead; every row is handed
out once, and what is wrong with one is told with its place. A run that was cut short is simply run
again: the collection knows what it has, so nothing is embedded twice.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec

from actors.ports import Deadline, Delivery, SourceClosed, SourceStatus, Withdraw

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".html", ".htm")
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MAX_FILE_BYTES = 16 * 1024 * 1024
_ROWS_AT_ONCE = 128
_LINE_BITS = 20

Row = tuple[str, str | None, bytes]
"""Where it stands ("docs.jsonl:7"), its key, its body."""


def rows_of(path: str) -> Iterator[Row]:
    """The documents of one file or folder, or of stdin ("-").

    Raises `ValueError` with the reason: no such file, a suffix that nobody knows, a damaged table.
    """
    if path == "-":
        return _json_lines(sys.stdin.buffer, "stdin")
    place = Path(path)
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        raise ValueError(f"{path}: no such file or folder")
    suffix = place.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines(place.open("rb"), path)
    if suffix == ".json":
        return _json_array(place)
    if suffix in (".csv", ".tsv"):
        return _csv(place, "\t" if suffix == ".tsv" else ",")
    if suffix == ".parquet":
        return _parquet(place)
    if suffix in TEXT_SUFFIXES:
        return iter([_text_file(place, place.parent)])
    known = ", ".join((*TABLE_SUFFIXES, *TEXT_SUFFIXES))
    raise ValueError(
        f"{path}: nobody knows what is in a {suffix or 'file without suffix'}: {known}"
    )


def _json_lines(stream: Any, name: str) -> Iterator[Row]:
    with stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{name}:{number}", None, line


def _json_array(path: Path) -> Iterator[Row]:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    for number, one in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{path}[{number}]", None, msgspec.json.encode(one)


def _csv(path: Path, delimiter: str) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"{path}:{reader.line_num} has more cells than the head")
                yield f"{path}:{reader.line_num}", None, msgspec.json.encode(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{reader.line_num} cannot be read: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: pyarrow is not installed: pip install 'embedstream[parquet]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}[{number}]", None, msgspec.json.encode(row)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}, row {number + 1}, cannot be read: {error}") from error


def _folder(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix.lower() in TEXT_SUFFIXES:
            yield _text_file(path, folder)


def _text_file(path: Path, folder: Path) -> Row:
    """A document with ``path``, ``title`` (its name) and ``text``; of HTML the text alone."""
    name = path.relative_to(folder).as_posix()
    data = path.read_bytes()[: MAX_FILE_BYTES + 1]
    text, title = data.decode("utf-8", "replace"), path.stem
    if path.suffix.lower() in (".html", ".htm"):
        page = _PageText()
        page.feed(text)
        page.close()
        text, title = page.text, page.title or title
    body = {"path": name, "title": title, "text": text}
    return str(path), name, msgspec.json.encode(body)


class _PageText(HTMLParser):
    """The text of a page as people see it, blocks on lines of their own, headings as Markdown."""

    _UNSEEN = frozenset({"script", "style", "noscript", "template", "head", "svg"})
    _BLOCKS = frozenset(
        [
            "p",
            "div",
            "section",
            "article",
            "header",
            "footer",
            "main",
            "aside",
            "nav",
            "ul",
            "ol",
            "li",
            "table",
            "tr",
            "pre",
            "blockquote",
            "br",
            "hr",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "dl",
            "dt",
            "dd",
            "figure",
            "form",
        ]
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._unseen = 0
        self._in_title = False
        self.title = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Headings keep their level, for a chunker that cuts at headings."""
        self._unseen += tag in self._UNSEEN
        self._in_title = tag == "title"
        if tag in self._BLOCKS:
            heading = len(tag) == 2 and tag[0] == "h" and tag[1].isdecimal()
            start = "\n\n" if heading or tag == "p" else "\n"
            self._parts.append(start + ("#" * int(tag[1]) + " " if heading else ""))

    def handle_endtag(self, tag: str) -> None:
        """What was not seen ends."""
        if tag in self._UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        self._in_title = False
        if tag in self._BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if self._in_title:
            self.title = data.strip()
        elif not self._unseen:
            self._parts.append(data)

    @property
    def text(self) -> str:
        """White space made plain."""
        lines = (" ".join(line.split()) for line in "".join(self._parts).split("\n"))
        kept: list[str] = []
        for line in lines:
            if line or (kept and kept[-1]):
                kept.append(line)
        return "\n".join(kept).strip()


@dataclass(eq=False)
class FileDelivery:
    """One row of a file. See `actors.ports.Delivery`."""

    body: bytes | None
    key: str | None
    default_id: str
    origin: Mapping[str, str | int]
    ended: Callable[[FileDelivery, bool], None]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    attempt: int = 1
    redelivered: bool = False
    withdrawn: bool = False
    held: bool = True
    damage: str | None = None
    received_at: float = field(default_factory=time.monotonic)
    _over: bool = False

    def settle(self) -> None:
        """Stored, unchanged, or told as bad."""
        self._end(True)

    def release(self, reason: str) -> None:
        """Not stored: this run says so at its end, and the next one does it."""
        self._end(False)

    def _end(self, settled: bool) -> None:
        if not self._over:
            self._over = True
            self.ended(self, settled)


class FileSource:
    """Implements `actors.ports.Source` over files.

    on_settled: called for each row that is done.
    """

    def __init__(
        self, paths: list[str], *, on_settled: Callable[[], None], max_in_flight: int = 1024
    ) -> None:
        self._rows = itertools.chain.from_iterable(map(rows_of, paths))
        self._on_settled = on_settled
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._room = asyncio.Event()
        self._room.set()
        self._fewer = asyncio.Event()
        self._closing = asyncio.Event()
        self._number = 0
        # A later run is newer than this one, and later rows of a run are newer than earlier ones.
        self._first_version = int(time.time() * 1000) << _LINE_BITS
        self.n_settled = 0
        self.n_released = 0
        self.error: str | None = None

    async def open(self) -> None:
        """Nothing to connect to."""

    async def run(self) -> None:
        """Rows are read when they are asked for."""
        await self._closing.wait()

    async def receive(self) -> list[Delivery]:
        """The next rows. Raises `SourceClosed` at the end of the last file."""
        await self._room.wait()
        if self._closing.is_set():
            raise SourceClosed
        n = min(_ROWS_AT_ONCE, self._max_in_flight - self._in_flight)
        try:
            rows = await asyncio.to_thread(lambda: list(itertools.islice(self._rows, n)))
        except (ValueError, OSError) as error:
            self.error = str(error)
            rows = []
        if not rows:
            # The end of the files begins the service's drain, which has a budget: a backfill has none.
            while self._in_flight and not self._closing.is_set():
                self._fewer.clear()
                await self._fewer.wait()
            raise SourceClosed
        return [self._delivery(*row) for row in rows]

    def _delivery(self, place: str, key: str | None, body: bytes) -> Delivery:
        self._number += 1
        self._in_flight += 1
        if self._in_flight >= self._max_in_flight:
            self._room.clear()
        version = self._first_version + min(self._number, 2**_LINE_BITS - 1)
        origin = {"transport": "file", "stream": place, "id": self._number, "version": version}
        return FileDelivery(body, key, f"row-{self._number}", origin, self._ended)

    def _ended(self, delivery: FileDelivery, settled: bool) -> None:
        self._in_flight -= 1
        self._room.set()
        self._fewer.set()
        if settled:
            self.n_settled += 1
            self._on_settled()
        else:
            self.n_released += 1

    def pause(self) -> None:
        """Rows in flight are bounded as it is."""

    def resume(self) -> None:
        """See `pause`."""

    def stop_intake(self) -> None:
        """No more rows."""
        self._closing.set()
        self._room.set()
        self._fewer.set()

    def withdraw_with(self, withdraw: Withdraw) -> None:
        """Nobody else takes rows."""

    async def attempt_begins(self, deliveries: Sequence[Delivery]) -> None:
        """A run that dies is run again by a person, who sees what it died of."""

    async def attempt_came_back(self, deliveries: Sequence[Delivery]) -> None:
        """See `attempt_begins`."""

    async def flush(self, deadline: Deadline) -> None:
        """What is settled is in the collection."""

    async def aclose(self) -> None:
        """Nothing to leave."""
        self._closing.set()

    def status(self) -> SourceStatus:
        """Files are always there."""
        return SourceStatus(True, in_flight=self._in_flight)


class FailureSink:
    """Dead letters of a backfill: told one by one, where they stand and why."""

    max_record_bytes: int | None = None
    dead_letter_destination = "failures"

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.n_failed = 0

    def default_destination(self, request_id: str) -> str:
        """Nobody asks for replies."""
        return self.dead_letter_destination

    def check_destination(self, destination: str) -> str | None:
        """Nobody names a destination."""
        return "a backfill answers nobody"

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        """Say which row failed."""
        from schemas import headers as names

        self.n_failed += 1
        origin = msgspec.json.decode(headers[names.DEAD_LETTER_ORIGIN])
        message = headers[names.DEAD_LETTER_MESSAGE].decode()
        self._tell(f"{origin['stream']}: {message}")

    async def aclose(self) -> None:
        """Nothing is open."""


def first_row(paths: list[str]) -> Mapping[str, Any] | None:
    """The first document of files that are tables, to guess at its fields; None for stdin."""
    for path in paths:
        if path == "-":
            return None
        for _, _, body in rows_of(path):
            value = msgspec.json.decode(body)
            return value if isinstance(value, dict) else None
    return None

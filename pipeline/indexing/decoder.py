"""Records of documents in, embed requests out: what a route into a collection decodes.

Who calls it: the route's ingress; `look_ahead` with each hand-out, then `decode` record by record.
What must stay true: mapping and cutting run in a thread; the ledger is asked once per hand-out, and
only ever saves work: whatever it said, the writer judges again. Each record keeps its own request id,
because two versions of a document are never answered with each other's vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.ports import Delivery, Metrics
from actors.route import Decoded, Decoder
from pipeline.indexing.chunking import Chunker, Cut
from pipeline.indexing.mapping import DocumentMapping, Raw
from pipeline.indexing.options import DocumentOptions
from pipeline.indexing.records import (
    DELETED,
    DUMP,
    STALE,
    UNCHANGED,
    Change,
    Entry,
    Outcome,
    Version,
)
from pipeline.indexing.writer import IndexWriter
from schemas.errors import EmbedstreamError, Internal, ItemTooLarge
from schemas.requests import EmbedRequest, Lane, Limits, Output

T = TypeVar("T")
_SEQUENCE_BITS = 20
NOTHING = Cut((), ())


@dataclass(frozen=True, slots=True)
class Pending:
    """A document on its way to the destination. cut: its chunks, None when the ledger says that the
    same content is stored. replayed: this very version, or a newer one, is stored: there is nothing
    to write, and only a report to make."""

    change: Change
    content_hash: str
    cut: Cut | None
    replayed: Outcome | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What look-ahead found for one record. settled: nothing is to be done."""

    pending: Pending | None = None
    error: EmbedstreamError | None = None


class DocumentDecoder(Decoder):
    """Decodes the records of one route."""

    def __init__(
        self,
        options: DocumentOptions,
        mapping: DocumentMapping,
        chunker: Chunker,
        writer: IndexWriter,
        *,
        route: str,
        model: str,
        output: Output,
        limits: Limits,
        metrics: Metrics,
        lane: Lane = "bulk",
        reports: bool = False,
    ) -> None:
        self.options = options
        self._mapping = mapping
        self._chunker = chunker
        self._writer = writer
        self._route = route
        self._lane: Lane = lane
        self._model = model
        self._output: Output = output
        self._limits = limits
        self._metrics = metrics
        self._reports = (
            reports  # of what was there already, too: the report may be what a crash cut off
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="document-decoder")
        self._seen: dict[int, _Seen] = {}  # by id() of the deliveries of the running hand-out

    async def look_ahead(self, deliveries: Sequence[Delivery]) -> None:
        """Map all records, ask the ledger for all documents, cut the texts of those that changed."""
        self._seen = {}
        held = list(deliveries)
        mapped = await self._in_thread(self._mapped_all, held)
        names = list({c.document_id: None for c in mapped if isinstance(c, Change)})
        known = await self._writer.known(names, self._lane) if names else {}
        self._seen = await self._in_thread(self._seen_all, held, mapped, known)

    async def decode(self, delivery: Delivery) -> Decoded | None:
        """See `Decoder`."""
        seen = self._seen.pop(id(delivery), None)
        if seen is None:  # look-ahead failed: it is written without being compared first
            mapped = await self._in_thread(self._mapped_all, [delivery])
            found = await self._in_thread(self._seen_all, [delivery], mapped, {})
            seen = found[id(delivery)]
        if seen.error is not None:
            raise seen.error
        pending = seen.pending
        if pending is None:
            return None
        if pending.cut is None and pending.replayed is None:
            self._metrics.count("index_skipped_total", route=self._route, reason="unchanged")
        request = EmbedRequest(
            id=_record_id(delivery),
            input=() if pending.cut is None else pending.cut.items,
            model=self._model,
            prompt=self.options.prompt,
            prompt_name=self.options.prompt_name,
            dimensions=self.options.dimensions,
            # A text with spans has a vector for each of them, and is never cut.
            outputs=() if self._chunker.options.late else (self._output,),
            truncate="error" if self._chunker.options.late else "right",
        )
        return Decoded(request, payload=pending, order_key=pending.change.document_id)

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _mapped_all(self, deliveries: Sequence[Delivery]) -> list[Change | EmbedstreamError | None]:
        return [self._mapped(delivery) for delivery in deliveries]

    def _mapped(self, delivery: Delivery) -> Change | EmbedstreamError | None:
        body = delivery.body
        try:
            if body is not None and len(body) > self._limits.max_record_bytes:
                return ItemTooLarge(
                    "the record is too large",
                    limit=self._limits.max_record_bytes,
                    given=len(body),
                )
            return self._mapping.change(Raw(delivery.key, body, version_of(delivery)))
        except EmbedstreamError as error:
            return error
        except Exception as error:  # noqa: BLE001  a bug in mapping is told for its own record alone
            return Internal(f"the document could not be mapped: {type(error).__name__}")

    def _seen_all(
        self,
        deliveries: Sequence[Delivery],
        mapped: Sequence[Change | EmbedstreamError | None],
        known: Mapping[str, Entry],
    ) -> dict[int, _Seen]:
        return {
            id(delivery): _Seen(error=one)
            if isinstance(one, EmbedstreamError)
            else _Seen(None if one is None else self._pending(one, known.get(one.document_id)))
            for delivery, one in zip(deliveries, mapped, strict=True)
        }

    def _pending(self, change: Change, entry: Entry | None) -> Pending | None:
        """What is left to do; None when the ledger has this version, or a newer one."""
        content_hash = change.content_hash
        same = entry is not None and entry.content_hash == content_hash
        if entry is not None and (
            change.version.older_than(entry.version) or (same and change.version == entry.version)
        ):
            self._metrics.count("index_skipped_total", route=self._route, reason="replayed")
            if not self._reports:
                return None
            outcome = STALE if change.version.older_than(entry.version) else UNCHANGED
            return Pending(change, content_hash, None, replayed=outcome)
        if change.text is None or same:
            return Pending(change, content_hash, NOTHING if content_hash == DELETED else None)
        return Pending(change, content_hash, self._chunker.cut(change.text))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def version_of(delivery: Delivery) -> Version:
    """The source's own number of a record: Kafka's offset, the id of a stream's entry; a file's
    lines are a dump."""
    origin = delivery.origin
    if "offset" in origin:
        return Version(f"{origin['topic']}/{origin['partition']}", int(origin["offset"]))
    stream, entry = str(origin.get("stream", "")), str(origin.get("id", ""))
    milliseconds, dash, sequence = entry.partition("-")
    if dash and milliseconds.isdecimal() and sequence.isdecimal():
        low = min(int(sequence), 2**_SEQUENCE_BITS - 1)
        return Version(stream, (int(milliseconds) << _SEQUENCE_BITS) | low)
    return Version(DUMP, int(origin.get("version", entry if entry.isdecimal() else 0)))


def _record_id(delivery: Delivery) -> str:
    """Of this very record: the default id of Kafka is its key, which versions share."""
    origin = delivery.origin
    if "offset" in origin:
        return f"{origin['topic']}-{origin['partition']}-{origin['offset']}"
    return f"{origin.get('stream', '')}-{origin.get('id', delivery.default_id)}"

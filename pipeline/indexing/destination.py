"""A vector store as the destination of a route.

Who calls it: egress, under the same rules as replies: retry, dead-letter, settle.
What must stay true: a document is delivered when all of its chunks and its ledger entry are durable; a
document of which one chunk has no vector is not written at all, so that no reader sees half of it;
routes into one collection share one writer, and only one of them runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from actors.ports import Delivery, PublishError
from actors.route import Destination, Finished, Refusal, Retry
from gpu.batch import ItemResult, ModelInfo
from pipeline.indexing.decoder import Pending
from pipeline.indexing.identity import CollectionIdentity, WrongCollection
from pipeline.indexing.records import Chunk, Outcome, Write
from pipeline.indexing.report import Report
from pipeline.indexing.sinks.base import StoreUnavailable
from pipeline.indexing.vectors import vectors_of
from pipeline.indexing.writer import IndexWriter
from schemas.errors import EmbedstreamError, Internal, InvalidRequest
from schemas.requests import AnyRequest, Lane


class CollectionDestination(Destination):
    """Upserts into one collection.

    Args:
        identity: what this route's vectors are.
        owner: this route opens, runs and closes the writer; the others only use it.
        report: tells of each document what became of it, before its record is settled.
    """

    max_concurrent = 512

    def __init__(
        self,
        writer: IndexWriter,
        identity: CollectionIdentity,
        *,
        lane: Lane,
        owner: bool,
        report: Report | None = None,
    ) -> None:
        self._writer = writer
        self._identity = identity
        self._lane: Lane = lane
        self._owner = owner
        self._report = report

    async def open(self, models: Mapping[str, ModelInfo]) -> None:
        """Make the collection, or check that it takes what this route makes."""
        collection = self._writer.collection
        try:
            if self._owner:
                await collection.open(self._identity)
            else:
                assert collection.identity is not None, "its owner is opened first"
                collection.identity.check(self._identity, collection.where)
        except StoreUnavailable as error:
            raise ConnectionError(f"{collection.where}: {error}") from error
        except WrongCollection as error:
            raise ValueError(str(error)) from error

    async def run(self) -> None:
        """The writer's loop."""
        if self._owner:
            await self._writer.run()
        else:
            await asyncio.Event().wait()

    def address(self, request: AnyRequest) -> str:
        """The collection."""
        return self._writer.collection.where

    def address_of_failure(
        self, delivery: Delivery, error: EmbedstreamError, request: AnyRequest | None
    ) -> str | None:
        """Nobody waits for an answer: what cannot enter is a dead letter."""
        return None

    async def deliver(
        self, finished: Finished, info: ModelInfo, retry: Retry
    ) -> Sequence[EmbedstreamError]:
        """Store one document, or say why not."""
        if finished.failure is not None:
            return (finished.failure,)
        errors = [one for one in finished.outcomes if isinstance(one, EmbedstreamError)]
        if errors:
            return errors
        pending = finished.payload
        assert isinstance(pending, Pending), "the route's decoder attaches the document"
        if pending.replayed is not None:
            await self._tell(pending, pending.replayed, None, info, retry)
            return ()
        write = written(pending, finished.outcomes)

        async def submit() -> Outcome:
            try:
                return await self._writer.submit(write, self._lane)
            except StoreUnavailable as error:
                raise PublishError(
                    str(error), retryable=True, retry_after_s=error.retry_after_s
                ) from error

        outcome = await retry(submit, "collection")
        if outcome.kind == "refused":
            return (InvalidRequest(f"the collection refused it: {outcome.reason}"),)
        if outcome.kind == "moved":
            return (Internal(outcome.reason),)  # retryable: it is read and embedded again
        await self._tell(pending, outcome, write.chunks, info, retry)
        return ()

    async def _tell(
        self,
        pending: Pending,
        outcome: Outcome,
        chunks: Sequence[Chunk] | None,
        info: ModelInfo,
        retry: Retry,
    ) -> None:
        if self._report is not None:
            n_chunks = len(chunks) if chunks is not None and outcome.kind == "written" else None
            await self._report(pending.change, outcome, n_chunks, info, retry)

    async def refuse(self, refusal: Refusal, retry: Retry) -> None:
        """Never called: `address_of_failure` names no place."""
        raise AssertionError("an indexing route tells nobody of refusals; this is a bug")

    def problem(self) -> str | None:
        """What the writer last heard from the store."""
        return self._writer.problem()

    async def aclose(self) -> None:
        """Disconnect."""
        if self._owner:
            await self._writer.aclose()


def written(pending: Pending, outcomes: Sequence[object]) -> Write:
    """The write of a document whose chunks have these vectors."""
    change = pending.change
    chunks: tuple[Chunk, ...] | None = None
    if pending.cut is not None:
        results = [one for one in outcomes if isinstance(one, ItemResult)]
        vectors = [
            vector
            for item, one in zip(pending.cut.items, results, strict=True)
            for vector in vectors_of(one, late=bool(item.spans))
        ]
        chunks = tuple(
            Chunk(ordinal, text, vector)
            for ordinal, (text, vector) in enumerate(zip(pending.cut.texts, vectors, strict=True))
        )
    return Write(change.document_id, change.version, pending.content_hash, chunks, change.metadata)

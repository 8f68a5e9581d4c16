"""What became of each document, told beside the collection.

Who calls it: the destination of an indexing route with `report_to`, when the store has confirmed.
What must stay true: told before the record is settled, so that a crash in between tells it again and
never leaves it out; the report of a document holds no text of it.
"""

from __future__ import annotations

from functools import partial

import msgspec

from actors.ports import Sink
from actors.publish import kind_of
from actors.route import Retry
from gpu.batch import ModelInfo
from pipeline.indexing.records import DELETED, Change, Outcome
from schemas.headers import CONTENT_TYPE, JSON


class Report:
    """Publishes one JSON record per document, under the document's id.

    Args:
        sink: its default destination takes the reports.
        where: the collection, without a password.
    """

    def __init__(self, sink: Sink, where: str) -> None:
        self._sink = sink
        self._where = where

    async def __call__(
        self,
        change: Change,
        outcome: Outcome,
        n_chunks: int | None,
        info: ModelInfo,
        retry: Retry,
    ) -> None:
        """Publish; returns when it is durable. Raises `GaveUp`."""
        deleted = outcome.kind == "written" and change.content_hash == DELETED
        body: dict[str, object] = {
            "document_id": change.document_id,
            "outcome": "deleted" if deleted else outcome.kind,
            "version": {"source": change.version.source, "number": change.version.number},
            "collection": self._where,
            "model": {"name": info.name, "fingerprint": info.fingerprint},
        }
        if n_chunks is not None and not deleted:
            body["chunks"] = n_chunks
        address = self._sink.default_destination(change.document_id)
        publish = partial(
            self._sink.publish,
            address,
            change.document_id,
            msgspec.json.encode(body),
            {CONTENT_TYPE: JSON.encode()},
            order_key=change.document_id,
        )
        await retry(publish, kind_of(address))

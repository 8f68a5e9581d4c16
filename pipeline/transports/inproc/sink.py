"""The in-process sink: replies into the boxes of the broker.

Who calls it: egress publishes through it.
What must stay true: destinations are `inproc:NAME`; the dead letters are no reply destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.ports import (
    Metrics,
    PublishError,
    Record,
    RecordTooLargeForBroker,
    Source,
    Told,
)
from pipeline.transports.broker_names import DEAD_LETTERS, name_error
from pipeline.transports.inproc.broker import InprocBroker, InprocReply, broker_for
from pipeline.transports.inproc.options import DESTINATION_PREFIX, InprocOptions


class InprocSink:
    """`actors.ports.Sink` over an `InprocBroker`. Destinations are `inproc:NAME`."""

    dead_letter_destination = f"{DESTINATION_PREFIX}{DEAD_LETTERS}"

    def __init__(self, broker: InprocBroker) -> None:
        self._broker = broker
        self.max_record_bytes = broker.options.max_record_bytes

    def default_destination(self, request_id: str) -> str:
        return f"{DESTINATION_PREFIX}{request_id}"

    def check_destination(self, destination: str) -> str | None:
        if not destination.startswith(DESTINATION_PREFIX):
            return f"a reply destination in this process starts with {DESTINATION_PREFIX!r}"
        if destination == self.dead_letter_destination:
            return "dead letters are no reply destination"
        return name_error(destination.removeprefix(DESTINATION_PREFIX), "reply_to")

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        await self._publish(Record(destination, key, body, headers))

    async def _publish(self, record: Record) -> None:
        limit = self.max_record_bytes
        if limit is not None and record.size_bytes > limit:
            size = record.size_bytes
            raise RecordTooLargeForBroker(
                f"a record of {size} bytes exceeds max_record_bytes ({limit})",
                limit_bytes=limit,
                given_bytes=size,
            )
        reply = InprocReply(record.key, record.body, dict(record.headers))
        await self._broker.publish(record.destination, reply)

    async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
        """See `actors.ports.ListSink`."""
        for number, record in enumerate(records):
            try:
                await self._publish(record)
            except PublishError as error:
                tell(number, error)
            else:
                tell(number, None)

    async def aclose(self) -> None:
        """Nothing to close."""


async def open_sink(
    options: InprocOptions, *, beside: Source | None, metrics: Metrics
) -> InprocSink:
    """A sink over the broker of that name in this process."""
    return InprocSink(broker_for(options))

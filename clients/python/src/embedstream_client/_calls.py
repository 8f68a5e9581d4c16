"""Calls that wait for their reply, by request id. Knows no broker.

Who calls it: the session registers calls, a link hands in what it reads.
What must stay true: a reply reaches the call that has its id and no other, by id and never by order;
what belongs to nobody is counted and dropped; a call ends once; parts are joined whatever their order,
and one that comes twice counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TypeAlias

from ._wire.codec import decode_reply, join_parts
from ._wire.errors import EmbedstreamError
from ._wire.results import FailureReply, Reply
from .errors import BadReply

Outcome: TypeAlias = "Reply | FailureReply"


class Call:
    """One request on its way.

    body, headers   the record; a link sends the same bytes again after an outage, so that the
                    service knows its twin
    bodies          the reply's records, in the order of parts, once `future` has its result
    """

    __slots__ = ("_parts", "bodies", "body", "future", "headers", "id", "sent")

    def __init__(self, request_id: str, body: bytes, headers: dict[str, bytes]) -> None:
        self.id = request_id
        self.body = body
        self.headers = headers
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.bodies: tuple[bytes, ...] = ()
        self.sent = False
        self._parts: dict[int, tuple[Reply, bytes]] = {}

    @property
    def ended(self) -> bool:
        return self.future.done()

    def fail(self, error: BaseException) -> None:
        """End the call, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)

    def add(self, record: Outcome, body: bytes) -> None:
        """One record of the reply; the last one ends the call."""
        if self.future.done():
            return
        if isinstance(record, FailureReply) or record.part is None or record.parts is None:
            self._end(record, (body,))
            return
        others = self._parts.values()
        if any((reply.parts, reply.n) != (record.parts, record.n) for reply, _ in others):
            self._parts.clear()  # of an earlier attempt that was cut elsewhere
        if not 0 <= record.part < record.parts:
            self.fail(BadReply(f"the reply has a part {record.part} of {record.parts}"))
            return
        self._parts[record.part] = record, body
        if len(self._parts) < record.parts:
            return
        ordered = [self._parts[i] for i in range(record.parts)]
        try:
            whole = join_parts([reply for reply, _ in ordered])
        except EmbedstreamError as error:
            self.fail(BadReply(error.message, path=error.path))
            return
        self._end(whole, tuple(one for _, one in ordered))

    def _end(self, outcome: Outcome, bodies: tuple[bytes, ...]) -> None:
        self.bodies = bodies
        self._parts.clear()
        self.future.set_result(outcome)


class Calls:
    """All calls of one session."""

    def __init__(self) -> None:
        self._by_id: dict[str, Call] = {}
        self._some = asyncio.Event()
        self.n_unknown = 0
        """Replies that belonged to nobody here."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Call]:
        return iter(tuple(self._by_id.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, call: Call) -> None:
        assert call.id not in self._by_id, "two calls with one id"
        self._by_id[call.id] = call
        self._some.set()

    def remove(self, call: Call) -> None:
        self._by_id.pop(call.id, None)
        if not self._by_id:
            self._some.clear()

    async def wait_for_some(self) -> None:
        """Until at least one call waits."""
        await self._some.wait()

    def take(self, body: bytes | None, request_id: str | None = None) -> None:
        """One record that was read. `request_id` is what its header or key says."""
        record: Outcome | None = None
        broken: EmbedstreamError | None = None
        if body is not None:
            try:
                record = decode_reply(body)
            except EmbedstreamError as error:
                broken = error
        call = self._by_id.get(record.id if record is not None else request_id or "")
        if call is None:
            self.n_unknown += 1
        elif record is None or body is None:
            call.fail(
                BadReply(f"the reply cannot be read: {broken.message if broken else 'no body'}")
            )
        else:
            call.add(record, body)

    def fail_all(self, error: EmbedstreamError) -> None:
        """End every call with its own copy of `error`."""
        for call in self:
            own = type(error)(error.message)
            own.retryable = error.retryable
            call.fail(own)

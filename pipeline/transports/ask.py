"""Ask a running service over its own broker: put a request, wait for its reply.

Who calls it: `kafka/ask.py` and `redis/ask.py`, which the registry opens for `--via` and the demo.
What must stay true: a reply for nobody is counted and dropped; every wait has a bound;
an asker reads only its own replies and takes nothing away from others; failures to reach the broker
are `ConnectionError`s of one line that end in the remedy.
"""

from __future__ import annotations

import time
from typing import Protocol

from schemas.codec import decode_reply, join_parts
from schemas.errors import ContentType, EmbedstreamError
from schemas.headers import CONTENT_TYPE, DEADLINE_MS, REPLY_TO, REQUEST_ID
from schemas.results import FailureReply, Reply

MAX_CONCURRENT = 32
"""Questions in flight per asker. Each holds one Redis connection; more gain nothing, because the
service batches across askers anyway."""


class Asker(Protocol):
    """One way to ask. Start `run` as a task, then call `ask`, at most `MAX_CONCURRENT` at once."""

    unknown_replies: int
    """Replies that belonged to nobody here."""

    async def run(self) -> None:
        """Read replies until cancelled."""
        ...

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        """Send one record and wait for its reply, parts joined.

        The record's own id must be `request_id`, and no other question in flight may have it.

        Raises:
            TimeoutError: no complete reply in time.
            ConnectionError: the broker went away.
        """
        ...

    async def aclose(self) -> None: ...


def ask_headers(
    request_id: str, content_type: ContentType, reply_to: str, timeout_s: float
) -> dict[str, bytes]:
    """Headers of a question.

    The deadline is our own patience: the service need not compute what nobody waits for any more.
    """
    deadline_ms = time.time_ns() // 1_000_000 + int(timeout_s * 1000)
    return {
        CONTENT_TYPE: content_type.encode(),
        REQUEST_ID: request_id.encode(),
        REPLY_TO: reply_to.encode(),
        DEADLINE_MS: b"%d" % deadline_ms,
    }


class Parts:
    """Collects the parts of one reply; a part that comes twice counts once."""

    def __init__(self) -> None:
        self._parts: dict[int, Reply] = {}

    def add(self, record: Reply | FailureReply) -> Reply | FailureReply | None:
        """The whole reply once it is there."""
        if isinstance(record, FailureReply) or record.part is None or record.parts is None:
            return record
        self._parts[record.part] = record
        if len(self._parts) < record.parts:
            return None
        try:
            return join_parts([self._parts[i] for i in sorted(self._parts)])
        except EmbedstreamError:
            self._parts.clear()  # parts of two different replies: the delivery comes again
            return None


def reply_record(body: bytes | None) -> Reply | FailureReply | None:
    """The reply in a record; None when it holds none."""
    if body is None:
        return None
    try:
        return decode_reply(body)
    except EmbedstreamError:
        return None

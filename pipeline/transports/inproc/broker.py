"""A queue of requests and boxes of replies inside this process.

Who calls it: the in-process source and sink; `pipeline.oneoff` and tests submit to it.
What must stay true: at-least-once like the others: a record leaves the broker only when it is
settled; what a closed source held is queued again with `attempt` + 1.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pipeline.transports.broker_names import DEAD_LETTERS
from pipeline.transports.inproc.options import DESTINATION_PREFIX, InprocOptions


class InprocReply(msgspec.Struct, frozen=True):
    """One published record."""

    key: str
    body: bytes
    headers: Mapping[str, bytes]


@dataclass(slots=True)
class InprocRecord:
    """One request, queued or held."""

    serial: int
    body: bytes | None
    headers: Mapping[str, bytes]
    key: str | None
    default_id: str
    reply_box: str
    done: asyncio.Future[list[InprocReply]] | None = None
    replies: list[InprocReply] = field(default_factory=list)
    attempts: int = 0


class InprocBroker:
    """A queue of requests and a box of replies inside this process and event loop."""

    def __init__(self, options: InprocOptions | None = None) -> None:
        self.options = options or InprocOptions()
        self.dead_letters: deque[InprocReply] = deque(maxlen=self.options.max_kept_replies)
        self._queued: deque[InprocRecord] = deque()
        self._held: dict[int, InprocRecord] = {}
        self._boxes: dict[str, InprocRecord] = {}
        self._kept: OrderedDict[str, list[InprocReply]] = OrderedDict()
        self._kept_count = 0
        self._serial = 0
        self._settled_count = 0
        self.arrival_listeners: set[asyncio.Event] = set()
        self._room = asyncio.Event()

    async def submit(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        key: str | None = None,
    ) -> list[InprocReply]:
        """Send one request and wait until the service has settled it.

        Returns its replies, in the order published: several when a reply was split into parts,
        none when the record was dead-lettered or skipped without a reply. Waits while the queue is
        full. Cancelling stops the waiting only; the request is worked on all the same.
        """
        record = await self._add(body, headers, key, wait_for_reply=True)
        assert record.done is not None
        return await record.done

    async def put(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        key: str | None = None,
    ) -> str:
        """Send one request without waiting for its reply; returns its default request id."""
        record = await self._add(body, headers, key, wait_for_reply=False)
        return record.default_id

    def replies(self, destination: str) -> list[InprocReply]:
        """Take out the replies that no `submit` waited for."""
        taken = self._kept.pop(destination, [])
        self._kept_count -= len(taken)
        return taken

    @property
    def unsettled(self) -> int:
        """Records queued or in flight."""
        return len(self._queued) + len(self._held)

    @property
    def settled(self) -> int:
        """Records settled so far."""
        return self._settled_count

    def crash(self) -> None:
        """As if the consuming process died: everything unsettled is handed out again."""
        self.requeue(list(self._held))

    def redelivered(self, serial: int, attempt: int) -> None:
        """A source hands a held record out once more."""
        if serial in self._held:
            self._held[serial].attempts = attempt

    async def _add(
        self,
        body: bytes | None,
        headers: Mapping[str, bytes] | None,
        key: str | None,
        *,
        wait_for_reply: bool,
    ) -> InprocRecord:
        while len(self._queued) >= self.options.max_queued:
            self._room.clear()
            await self._room.wait()
        self._serial += 1
        default_id = key or uuid.uuid4().hex
        given = {name.lower(): value for name, value in (headers or {}).items()}
        box = DESTINATION_PREFIX + default_id
        done: asyncio.Future[list[InprocReply]] | None = None
        if wait_for_reply:
            box = f"{DESTINATION_PREFIX}{default_id}.{self._serial}"
            given["reply-to"] = box.encode()
            done = asyncio.get_running_loop().create_future()
        record = InprocRecord(self._serial, body, given, key, default_id, box, done)
        if wait_for_reply:
            self._boxes[box] = record
        self._queued.append(record)
        self._announce()
        return record

    def _announce(self) -> None:
        for listener in self.arrival_listeners:
            listener.set()

    def take(self, count: int) -> list[InprocRecord]:
        """Up to `count` records, oldest first, now held by the caller."""
        taken: list[InprocRecord] = []
        while self._queued and len(taken) < count:
            record = self._queued.popleft()
            record.attempts += 1
            self._held[record.serial] = record
            taken.append(record)
        if taken:
            self._room.set()
        return taken

    def settle(self, serial: int) -> None:
        """Finished for good."""
        record = self._held.pop(serial, None)
        if record is None:
            return
        self._settled_count += 1
        self._boxes.pop(record.reply_box, None)
        if record.done is not None and not record.done.done():
            record.done.set_result(record.replies)

    def requeue(self, serials: list[int], *, untouched: bool = False) -> None:
        """Put held records back at the front, oldest first; `untouched` ones were never received."""
        back = [self._held.pop(serial) for serial in sorted(serials) if serial in self._held]
        for record in back:
            record.attempts -= untouched
        self._queued.extendleft(reversed(back))
        if back:
            self._announce()

    async def publish(self, destination: str, reply: InprocReply) -> None:
        """Into the box of that name. Takes effect at once; awaitable as a broker's is."""
        if destination == f"{DESTINATION_PREFIX}{DEAD_LETTERS}":
            self.dead_letters.append(reply)
            return
        waiting = self._boxes.get(destination)
        if waiting is not None:
            waiting.replies.append(reply)
            return
        self._kept.setdefault(destination, []).append(reply)
        self._kept_count += 1
        while self._kept_count > self.options.max_kept_replies:
            _, oldest = self._kept.popitem(last=False)
            self._kept_count -= len(oldest)


_brokers: weakref.WeakValueDictionary[str, InprocBroker] = weakref.WeakValueDictionary()


def broker_for(options: InprocOptions) -> InprocBroker:
    """The broker of that name in this process; made on first use, gone when nobody holds it."""
    broker = _brokers.get(options.name)
    if broker is None:
        broker = _brokers[options.name] = InprocBroker(options)
    return broker

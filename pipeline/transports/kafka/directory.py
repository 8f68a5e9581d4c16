"""Which reply topics exist and what they take, asked once and remembered for a while.

Who calls it: `sink.KafkaSink`, before it hands a record to the client.
What must stay true: aiokafka asks for ever for a topic that was named once, so it is never told of one
that does not exist; a name nobody knows costs its sender one answer and nobody else more than one
request for all names that wait; every table here is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from aiokafka.errors import (
    InvalidTopicError,
    KafkaError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.metadata import MetadataRequest

Verdict: TypeAlias = Literal["exists", "missing", "forbidden", "invalid", "no answer"]

_NAMES_PER_REQUEST = 200
_ASK_S = 5.0
_ASK_AGAIN_S = 0.15
"""Between two looks for a topic: a broker that creates it, or has just heard of it, takes that long."""
_LOOKS = 2
_LOOKS_WHILE_CREATING = 8
_REMEMBER_MISSING_S = 5.0
_FORGET_UNUSED_S = 300.0
_MAX_TOPICS = 10_000
_PERMANENT: dict[type[KafkaError], Verdict] = {
    TopicAuthorizationFailedError: "forbidden",
    InvalidTopicError: "invalid",
}


@dataclass(slots=True)
class _Known:
    used_at: float
    max_bytes: int | None = None  # the topic's own limit, once a refusal made us read it


class TopicDirectory:
    """Topics that replies go to.

    Args:
        broker_creates: the broker makes a topic that is asked for; None where it does not tell.
    """

    def __init__(
        self, *, broker_creates: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._looks = _LOOKS if broker_creates is False else _LOOKS_WHILE_CREATING
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()  # least recently used first
        self._absent: OrderedDict[str, tuple[float, Verdict]] = OrderedDict()  # oldest first
        self._waiting: dict[str, asyncio.Future[Verdict]] = {}
        self._asking = asyncio.Lock()

    async def find(self, client: Any, topic: str) -> Verdict:
        """Whether a topic can be written to. Raises nothing; waits for one answer at most."""
        if self.knows(topic):
            return "exists"
        absent = self._absent.get(topic)
        if absent is not None:
            if self._clock() < absent[0]:
                return absent[1]
            del self._absent[topic]
        answer = self._waiting.get(topic)
        if answer is None:
            answer = self._waiting[topic] = asyncio.get_running_loop().create_future()
        while not answer.done():  # cut short when whoever asked for us was cancelled
            async with self._asking:
                if not answer.done():
                    await self._ask(client, [topic, *self._waiting])
        return answer.result()

    def knows(self, topic: str) -> bool:
        """Has it been found? `find` would answer at once then."""
        known = self._known.get(topic)
        if known is not None:
            known.used_at = self._clock()
            self._known.move_to_end(topic)
        return known is not None

    def forget(self, topic: str) -> None:
        """A send failed as if it were gone: look again."""
        self._known.pop(topic, None)

    def limit(self, topic: str) -> int | None:
        """The topic's own `max.message.bytes`, where it was read."""
        known = self._known.get(topic)
        return None if known is None else known.max_bytes

    def note_limit(self, topic: str, max_bytes: int) -> None:
        if topic in self._known:
            self._known[topic].max_bytes = max_bytes

    def prune(self, client: Any) -> None:
        """Make the client forget topics that nobody has replied to for a while."""
        now = self._clock()
        while self._known:
            topic, known = next(iter(self._known.items()))
            if known.used_at > now - _FORGET_UNUSED_S and len(self._known) <= _MAX_TOPICS:
                break
            del self._known[topic]
        if self._known:  # a client with an empty list asks for every topic of the cluster
            client._topics.intersection_update(self._known)

    async def _ask(self, client: Any, topics: list[str]) -> None:
        wanted = list(dict.fromkeys(topics))[:_NAMES_PER_REQUEST]
        for look in range(self._looks):
            if look:
                await asyncio.sleep(_ASK_AGAIN_S)
            verdicts = await self._look(client, wanted)
            last = look == self._looks - 1
            for topic, verdict in verdicts.items():
                if verdict not in ("missing", "no answer") or last:
                    self._conclude(topic, verdict)
                    wanted.remove(topic)
            if not wanted:
                return

    async def _look(self, client: Any, topics: list[str]) -> dict[str, Verdict]:
        try:
            async with asyncio.timeout(_ASK_S):
                answer = await client.send(client.get_random_node(), MetadataRequest(topics))
        except (KafkaError, TimeoutError):
            return dict.fromkeys(topics, "no answer")
        found: dict[str, Verdict] = dict.fromkeys(topics, "missing")
        for code, topic, *_ in answer.topics:
            error = for_code(code)
            if not code:
                found[topic] = "exists"
            elif error is not UnknownTopicOrPartitionError:
                found[topic] = _PERMANENT.get(error, "no answer")
        return found

    def _conclude(self, topic: str, verdict: Verdict) -> None:
        now = self._clock()
        if verdict == "exists":
            self._known[topic] = _Known(now)
        elif verdict != "no answer":
            self._absent[topic] = (now + _REMEMBER_MISSING_S, verdict)
            if len(self._absent) > _MAX_TOPICS:
                self._absent.popitem(last=False)
        waiting = self._waiting.pop(topic, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(verdict)

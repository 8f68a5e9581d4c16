"""Which reply topics exist: one request for all names that wait, bounded and remembered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pipeline.transports.kafka.directory import TopicDirectory

UNKNOWN, NO_LEADER, FORBIDDEN, INVALID = 3, 5, 29, 17


class Client:
    """Answers metadata requests from a table of error codes; counts them."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.asked: list[list[str]] = []
        self._topics: set[str] = set()

    def get_random_node(self) -> int:
        return 1

    async def send(self, node: int, request: Any) -> Any:
        self.asked.append(list(request._topics))
        await asyncio.sleep(0)
        return SimpleNamespace(
            topics=[(self.codes.get(t, UNKNOWN), t, False, []) for t in request._topics]
        )


async def test_many_unknown_names_cost_a_few_requests_in_all() -> None:
    """K42: names that wait together are asked together, and a known one waits for nobody."""
    client, directory = Client(good=0), TopicDirectory(broker_creates=False)
    assert await directory.find(client, "good") == "exists"
    bad = [directory.find(client, f"bad{i}") for i in range(300)]
    found = await asyncio.gather(*bad, directory.find(client, "good"))
    assert found == ["missing"] * 300 + ["exists"]
    assert len(client.asked) < 10
    assert await directory.find(client, "bad7") == "missing"
    assert len(client.asked) < 10, "the answer is remembered"


async def test_a_missing_topic_is_looked_for_again_later() -> None:
    now = 0.0
    client, directory = Client(), TopicDirectory(broker_creates=False, clock=lambda: now)
    assert await directory.find(client, "late") == "missing"
    client.codes["late"] = 0
    assert await directory.find(client, "late") == "missing"
    now = 6.0
    assert await directory.find(client, "late") == "exists"


async def test_answers_are_told_apart() -> None:
    client = Client(a=FORBIDDEN, b=INVALID, c=NO_LEADER)
    directory = TopicDirectory(broker_creates=False)
    assert await directory.find(client, "a") == "forbidden"
    assert await directory.find(client, "b") == "invalid"
    assert await directory.find(client, "c") == "no answer", "being made, or its leader is away"


async def test_a_cancelled_asker_does_not_leave_the_others_waiting() -> None:
    client, directory = Client(good=0), TopicDirectory(broker_creates=False)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        first = group.create_task(directory.find(client, "missing"))
        second = group.create_task(directory.find(client, "good"))
        await asyncio.sleep(0)
        first.cancel()
    assert second.result() == "exists"


async def test_topics_that_nobody_replies_to_any_more_are_forgotten_by_the_client() -> None:
    """K42: the client's own list does not grow for ever."""
    now = 0.0
    client, directory = Client(a=0, b=0), TopicDirectory(broker_creates=False, clock=lambda: now)
    client._topics = {"a", "b"}
    for name in ("a", "b"):
        await directory.find(client, name)
    now = 200.0
    await directory.find(client, "b")
    now = 400.0
    directory.prune(client)
    assert client._topics == {"b"}

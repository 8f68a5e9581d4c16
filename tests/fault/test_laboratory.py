"""The fault laboratory: real service processes, a real broker, and every id reconciled at the end.

Each scenario runs in both delivery modes and prints one row: sent, answered, dead-lettered, lost, answered
twice. `make chaos ROUNDS=100` runs rounds of them in a row and writes the rows to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.kafka_bench import Bench, collect_some_ids
from tests.support.processes import service_process
from tests.support.servers import ServerInfo, new_apache

ROUNDS = int(os.environ.get("EMBEDSTREAM_CHAOS_ROUNDS", "1"))
pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(120 * ROUNDS)]
REPORT = os.environ.get("EMBEDSTREAM_CHAOS_REPORT")
IN_FLIGHT = 1024
"""Records that a member may hold: what can be answered twice for each that dies."""
MODES = ("at_least_once", "exactly_once")
TIMING = "&transaction_timeout_ms=2000&transaction_interval_ms=50&metadata_max_age_ms=500"


class Ledger:
    """What was sent, and what came of it."""

    def __init__(self, bench: Bench, delivery: str, folder: Path) -> None:
        self.bench = bench
        self.delivery = delivery
        self.folder = folder
        self.sent: set[str] = set()
        self.answered: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        self.recovered_s = 0.0
        self._replies: AIOKafkaConsumer | None = None
        self._dead: AIOKafkaConsumer | None = None

    @asynccontextmanager
    async def reading(self, partitions: int) -> AsyncIterator[None]:
        bench = self.bench
        async with (
            bench.reading(bench.replies, partitions) as self._replies,
            bench.reading(bench.dead_letters, partitions) as self._dead,
        ):
            yield

    def config(self, forward_s: float = 0.005) -> dict[str, Any]:
        return self.bench.config({"delivery": self.delivery}, forward_s=forward_s)

    async def send(self, n: int, **more: bytes) -> None:
        """Requests with new ids; `more`: records by id that are no requests."""
        first = len(self.sent)
        requests = {f"r{first + i}": {"input": f"text {i % 9}"} for i in range(n)}
        self.sent |= requests.keys() | more.keys()
        await self.bench.produce(requests)
        await self.bench.produce_raw(more)

    async def look(self) -> None:
        assert self._replies is not None and self._dead is not None
        await collect_some_ids(self._replies, self.answered)
        await collect_some_ids(self._dead, self.letters)

    async def until(self, share: float) -> None:
        """That much of all that was sent has an outcome."""
        while len(self.done) < share * len(self.sent):
            await self.look()

    @property
    def done(self) -> set[str]:
        return self.sent & (self.answered.keys() | self.letters.keys())

    def row(self, scenario: str, *, may_repeat: int, unreadable: int = 0) -> None:
        """Print and note the row, then judge it."""
        lost = len(self.sent - self.done)
        twice = sum(count - 1 for count in self.answered.values())
        found = {
            "scenario": scenario, "delivery": self.delivery, "sent": len(self.sent),
            "answered": len(self.sent & self.answered.keys()), "dead_lettered": len(self.letters),
            "lost": lost, "duplicated": twice, "recovered_s": round(self.recovered_s, 1),
        }  # fmt: skip
        print(json.dumps(found))
        if REPORT:
            with Path(REPORT).open("a") as report:
                report.write(json.dumps(found) + "\n")
        assert lost == 0
        assert self.answered.keys() <= self.sent and self.letters.keys() <= self.sent
        assert len(self.letters) == unreadable
        assert twice <= (0 if self.delivery == "exactly_once" else may_repeat)


async def rebalance_storm(ledger: Ledger) -> None:
    """Members come and go while requests are answered; two leave by SIGTERM, one by SIGKILL."""
    slow = ledger.config(forward_s=0.1)
    with service_process(slow, ledger.folder, "stays"):
        for number in range(3):
            await ledger.send(200)
            with service_process(slow, ledger.folder, f"guest{number}") as guest:
                await ledger.send(400)
                while "kafka_assigned" not in guest.log():
                    await ledger.look()
                if number == 1:
                    guest.kill()
                else:
                    guest.signal(signal.SIGTERM)
                    assert await asyncio.to_thread(guest.wait) == 0, guest.log()
        await ledger.until(1)
        await ledger.look()
    ledger.row("rebalance storm", may_repeat=2 * IN_FLIGHT)


async def zombie(ledger: Ledger) -> None:
    """Stopped beyond its session while another member takes over, then continued."""
    slow = ledger.config(forward_s=0.1)
    await ledger.send(400)
    with service_process(slow, ledger.folder, "zombie") as stopped:
        await ledger.until(0.2)
        stopped.signal(signal.SIGSTOP)
        began = time.monotonic()
        with service_process(slow, ledger.folder, "successor"):
            await ledger.until(0.7)
            ledger.recovered_s = time.monotonic() - began
            stopped.signal(signal.SIGCONT)
            await ledger.until(1)
            await ledger.send(100)
            await ledger.until(1)
            await ledger.look()
    ledger.row("zombie", may_repeat=IN_FLIGHT)


async def one_percent_poison(ledger: Ledger) -> None:
    """Records that nobody can read between those that somebody can, and a tombstone."""
    bad = {f"bad{i}": b"\xc1 no record" for i in range(5)}
    await ledger.send(250)
    await ledger.send(0, **bad)
    await ledger.bench.produce_raw({"tombstone": None})
    await ledger.send(250)
    with service_process(ledger.config(), ledger.folder) as service:
        while len(ledger.letters) < len(bad):
            await ledger.look()
        await ledger.until(1)
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) == 0, service.log()
        await ledger.look()
    ledger.row("1 % poison", may_repeat=0, unreadable=len(bad))


async def duplicate_ids(ledger: Ledger) -> None:
    """A producer that sends everything twice: each record has an outcome, and nothing stalls."""
    await ledger.send(200)
    await ledger.bench.produce({one: {"input": "text"} for one in ledger.sent})
    with service_process(ledger.config(), ledger.folder) as service:
        await ledger.until(1)
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) == 0, service.log()
        await ledger.look()
    assert set(ledger.answered.values()) <= {1, 2}
    for request_id in ledger.answered:  # two records of one id may have two answers
        ledger.answered[request_id] = 1
    ledger.row("duplicate ids", may_repeat=0)


async def topic_made_again(ledger: Ledger) -> None:
    """The request topic is deleted and made again while a member runs: offsets begin at 0."""
    await ledger.send(100)
    with service_process(ledger.config(), ledger.folder):
        await ledger.until(1)
        admin = AIOKafkaAdminClient(bootstrap_servers=ledger.bench.address)
        await admin.start()
        try:
            await admin.delete_topics([ledger.bench.topic])
            # Whoever asks for it next makes it anew, this test or the member: it need not be seen missing.
            made = NewTopic(ledger.bench.topic, 2, 1)
            while (await admin.create_topics([made])).topic_errors[0][1] not in (0, 36):
                await asyncio.sleep(0.1)
        finally:
            await admin.close()
        began = time.monotonic()
        await ledger.send(50)
        await ledger.until(1)
        ledger.recovered_s = time.monotonic() - began
    ledger.row("topic made again", may_repeat=IN_FLIGHT)


SCENARIOS: dict[str, Callable[[Ledger], Awaitable[None]]] = {
    one.__name__: one
    for one in (rebalance_storm, zombie, one_percent_poison, duplicate_ids, topic_made_again)
}


async def run(name: str, address: str, folder: Path, delivery: str) -> None:
    """One round of one scenario, on topics of its own."""
    folder.mkdir(parents=True)
    bench = Bench(address)
    bench.more = TIMING
    await bench.create(2)
    ledger = Ledger(bench, delivery, folder)
    async with ledger.reading(2):
        await SCENARIOS[name](ledger)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_every_id_has_an_outcome(kafka_server: ServerInfo, tmp_path: Path, name: str) -> None:
    """E05, E06, E13: nothing lost, nothing stuck; twice at most what was in flight, or never."""
    if not kafka_server.real_kafka:
        pytest.skip("transactions and deletable topics need KAFKA_HOME (Apache Kafka)")
    for number in range(ROUNDS):
        async with asyncio.TaskGroup() as both:
            for delivery in MODES:
                folder = tmp_path / delivery / str(number)
                both.create_task(run(name, kafka_server.address, folder, delivery))


async def test_a_broker_that_is_gone_for_a_while(tmp_path: Path) -> None:
    """E11: SIGKILL of the broker with work in hand, and its return: nothing lost."""
    server = new_apache()
    await server.start()
    try:
        ledgers = []
        with contextlib.ExitStack() as running:
            for delivery in MODES:
                bench = Bench(server.address)
                bench.more = TIMING
                await bench.create(2)
                ledger = Ledger(bench, delivery, tmp_path)
                await ledger.send(300)
                slow = ledger.config(forward_s=0.05)
                running.enter_context(service_process(slow, tmp_path, delivery))
                async with ledger.reading(2):
                    await ledger.until(0.1)
                ledgers.append(ledger)
            server.kill()
            await asyncio.sleep(2)
            began = time.monotonic()
            await server.restart()
            for ledger in ledgers:
                ledger.answered.clear()
                async with ledger.reading(2):
                    await ledger.until(1)
                    ledger.recovered_s = time.monotonic() - began
                    await ledger.look()
                ledger.row("broker gone", may_repeat=IN_FLIGHT)
    finally:
        server.close()

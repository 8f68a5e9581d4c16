"""The fault laboratory: real service processes, a real broker, and every id reconciled at the end.

Each scenario runs in both delivery modes and prints one row: sent, answered, dead-lettered, lost, answered
twice, seconds to recover. Committed offsets are watched all the while: they never go back. `make chaos
ROUNDS=100` runs rounds of them in a row, in their long forms, and writes the rows to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from pipeline.local.kafka import ApacheKafka
from tests.support.kafka_bench import Bench, collect_some_ids
from tests.support.late_acks import LateAcks, behind_a_proxy
from tests.support.processes import ServiceProcess, service_process
from tests.support.servers import ServerInfo, new_apache

ROUNDS = int(os.environ.get("EMBEDSTREAM_CHAOS_ROUNDS", "1"))
pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(300 * ROUNDS)]
REPORT = os.environ.get("EMBEDSTREAM_CHAOS_REPORT")
LONG = REPORT is not None
"""`make chaos`: 20 guests instead of three, a minute without a broker instead of ten seconds, death at each
point instead of every third."""
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
        self.source = ""
        """Where the service reads, if not as the bench does."""
        self.committed: dict[int, int] = {}
        """By partition, as last seen."""
        self.trace: list[tuple[float, dict[int, int]]] = []
        """(seconds, committed), whenever it changed."""
        self.is_one_log = True
        """False once the topic is made again: another log begins at 0."""
        self.began_at = time.monotonic()
        self._replies: AIOKafkaConsumer | None = None
        self._dead: AIOKafkaConsumer | None = None

    @asynccontextmanager
    async def reading(self, partitions: int) -> AsyncIterator[None]:
        bench = self.bench
        async with (
            bench.reading(bench.replies, partitions) as self._replies,
            bench.reading(bench.dead_letters, partitions) as self._dead,
            asyncio.TaskGroup() as group,
        ):
            watching = group.create_task(self._watch_commits(partitions))
            try:
                yield
            finally:
                watching.cancel()

    async def _watch_commits(self, partitions: int) -> None:
        """Committed offsets never go back."""
        places = [TopicPartition(self.bench.topic, number) for number in range(partitions)]
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bench.address)
        await admin.start()
        try:
            while True:
                with contextlib.suppress(KafkaError, OSError):
                    found = await admin.list_consumer_group_offsets(self.bench.group, None, places)
                    self._note({place.partition: at.offset for place, at in found.items()})
                await asyncio.sleep(0.1)
        finally:
            await admin.close()

    def _note(self, found: dict[int, int]) -> None:
        now = {partition: offset for partition, offset in found.items() if offset >= 0}
        for partition, offset in now.items():
            before = self.committed.get(partition, 0)
            assert offset >= before or not self.is_one_log, (
                f"committed {offset} after {before} of partition {partition}"
            )
        if not now.items() <= self.committed.items():
            self.committed |= now
            self.trace.append((round(time.monotonic() - self.began_at, 1), dict(self.committed)))

    def config(self, forward_s: float = 0.005) -> dict[str, Any]:
        route = {"delivery": self.delivery, "source": self.source or self.bench.source}
        return self.bench.config(route, forward_s=forward_s)

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
                report.write(json.dumps(found | {"committed": self.trace[:40]}) + "\n")
        assert lost == 0
        assert self.answered.keys() <= self.sent and self.letters.keys() <= self.sent
        assert len(self.letters) == unreadable
        assert twice <= (0 if self.delivery == "exactly_once" else may_repeat)


async def rebalance_storm(ledger: Ledger) -> None:
    """Members come and go while requests are answered; every third by SIGKILL, others by SIGTERM."""
    slow = ledger.config(forward_s=0.1)
    guests = 20 if LONG else 3
    with service_process(slow, ledger.folder, "stays"):
        for number in range(guests):
            await ledger.send(200)
            with service_process(slow, ledger.folder, f"guest{number}") as guest:
                await ledger.send(400)
                while "kafka_assigned" not in guest.log():
                    await ledger.look()
                if number % 3 == 1:
                    guest.kill()
                else:
                    guest.signal(signal.SIGTERM)
                    assert await asyncio.to_thread(guest.wait) == 0, guest.log()
        await ledger.until(1)
        await ledger.look()
    ledger.row("rebalance storm", may_repeat=guests * IN_FLIGHT)


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
        ledger.is_one_log = False
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


SINK = "pipeline.transports.kafka.sink:KafkaSink"
POINTS = (
    ("pipeline.transports.kafka.source:KafkaSource._hand_out", "after", 1),
    ("actors.decoder:WireDecoder.decode", "after", 5),
    ("actors.in_flight:InFlightTable.add", "after", 5),
    ("actors.tokenizer:Tokenizer._entries", "after", 1),
    ("actors.coalescer:Coalescer.next_batch", "after", 1),
    ("tests.support.fakes:FakeRunner.forward", "after", 1),
    ("actors.egress:Egress.complete", "after", 5),
    (f"{SINK}.publish_all", "before", 1),
    (f"{SINK}.publish_all", "after", 1),
    ("pipeline.transports.delivery:HeldDelivery.settle", "after", 5),
    ("pipeline.transports.kafka.offsets:commit_as_member", "before", 2),
    ("pipeline.transports.kafka.offsets:commit_as_member", "after", 2),
)
"""Of the life of a request (docs/life-of-a-request.md): which call of what kills the process."""
IN_TRANSACTIONS = {
    (f"{SINK}.publish_all", when, 1): (f"{SINK}.publish", when, 5) for when in ("before", "after")
}
"""Results that leave in transactions do not leave in lists."""
POINTS_OF_TRANSACTIONS = (
    ("aiokafka:AIOKafkaProducer.begin_transaction", "after", 1),
    ("aiokafka:AIOKafkaProducer.send_offsets_to_transaction", "after", 1),
    ("aiokafka:AIOKafkaProducer.commit_transaction", "after", 1),
)


async def killed_at_each_point(ledger: Ledger) -> None:
    """One process after the other dies at the next point; the last one answers what is left."""
    points = POINTS
    if ledger.delivery == "exactly_once":
        points = tuple(IN_TRANSACTIONS.get(one, one) for one in POINTS) + POINTS_OF_TRANSACTIONS
    points = points if LONG else points[1::3]
    for number, point in enumerate(points):
        await ledger.send(30)
        config = ledger.config() | {"kill_at": point}
        service = ServiceProcess(config, ledger.folder, f"life{number}")
        try:
            assert await asyncio.to_thread(service.wait, 60.0) == -signal.SIGKILL, service.log()
        finally:
            service.close()
        await ledger.look()
    began = time.monotonic()
    with service_process(ledger.config(), ledger.folder, "last"):
        await ledger.until(1)
        ledger.recovered_s = time.monotonic() - began
        await ledger.look()
    ledger.row("killed at each point", may_repeat=30 * len(points))


SCENARIOS: dict[str, Callable[[Ledger], Awaitable[None]]] = {
    one.__name__: one
    for one in (
        rebalance_storm,
        zombie,
        one_percent_poison,
        duplicate_ids,
        topic_made_again,
        killed_at_each_point,
    )
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
            await asyncio.sleep(60 if LONG else 10)  # the outage itself
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


@pytest.fixture(scope="module")
def late_kafka() -> Iterator[tuple[ApacheKafka, LateAcks]]:
    with behind_a_proxy() as pair:
        yield pair


@asynccontextmanager
async def serving(ledger: Ledger) -> AsyncIterator[ServiceProcess]:
    """A service process; this loop runs the proxy that it starts through."""
    service = ServiceProcess(ledger.config(), ledger.folder)
    try:
        await asyncio.to_thread(service.wait_ready)
        yield service
    finally:
        await asyncio.to_thread(service.close)


async def slow_sink(ledger: Ledger, acks: LateAcks) -> None:
    """Each write takes longer than the poll interval: nobody is put out of the group for it."""
    await ledger.send(60)
    acks.delay_s = 3.0
    async with serving(ledger) as service:
        await ledger.until(1)
        acks.delay_s = 0.0
        assert service.log().count("kafka_assigned") <= 1, "a rebalance happened"
        await ledger.look()
    assert acks.n_late
    ledger.row("slow sink", may_repeat=0)


async def producer_time_outs(ledger: Ledger, acks: LateAcks) -> None:
    """Acknowledgements come after the service has given up on them, then in time again."""
    await ledger.send(100)
    async with serving(ledger) as service:
        acks.delay_s = 2.5
        await ledger.send(100)
        text = "publish_retried" if ledger.delivery == "at_least_once" else "transaction_aborted"
        while text not in service.log():
            await ledger.look()
        acks.delay_s = 0.0
        began = time.monotonic()
        await ledger.until(1)
        ledger.recovered_s = time.monotonic() - began
        await ledger.look()
    assert acks.n_late
    ledger.row("producer time-outs", may_repeat=IN_FLIGHT)


async def transaction_time_out(ledger: Ledger, acks: LateAcks) -> None:
    """Stopped in the middle of a transaction for longer than the broker keeps one open, and shorter
    than the session: whoever goes on is the same member, with a transaction that was aborted."""
    await ledger.send(100)
    acks.delay_s = 0.7
    async with serving(ledger) as service:
        await ledger.until(0.1)
        for _ in range(3):
            n_late = acks.n_late
            await ledger.send(50)
            while acks.n_late == n_late:
                await ledger.look()
            service.signal(signal.SIGSTOP)
            await asyncio.sleep(4)  # twice transaction_timeout_ms
            service.signal(signal.SIGCONT)
            await ledger.until(0.9)
        acks.delay_s = 0.0
        began = time.monotonic()
        await ledger.until(1)
        ledger.recovered_s = time.monotonic() - began
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) == 0, service.log()
        if ledger.delivery == "exactly_once":
            assert "kafka_transaction_aborted" in service.log(), "no transaction was open"
        await ledger.look()
    ledger.row("transaction time-out", may_repeat=IN_FLIGHT)


LATE: dict[str, tuple[Callable[[Ledger, LateAcks], Awaitable[None]], str]] = {
    "slow_sink": (slow_sink, "&max_poll_interval_ms=2000&drain_budget_s=1"),
    "producer_time_outs": (producer_time_outs, "&request_timeout_ms=1500"),
    "transaction_time_out": (transaction_time_out, ""),
}


@pytest.mark.parametrize("delivery", MODES)
@pytest.mark.parametrize("name", LATE)
async def test_every_id_has_an_outcome_though_acknowledgements_are_late(
    late_kafka: tuple[ApacheKafka, LateAcks], tmp_path: Path, name: str, delivery: str
) -> None:
    """E03, E06, E11: late acknowledgements, from each place where they hurt: nothing is lost."""
    scenario, more = LATE[name]
    server, acks = late_kafka
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(server.address)
        await bench.create(2)
        through = Bench(acks.address)
        for what in ("topic", "replies", "dead_letters", "group"):
            setattr(through, what, getattr(bench, what))
        through.more = "&transaction_interval_ms=50" + more
        if name == "slow_sink":
            through.more += "&transaction_timeout_ms=30000"
        else:
            through.more += "&transaction_timeout_ms=2000"
        ledger = Ledger(bench, delivery, folder)
        ledger.source = through.source
        if name == "transaction_time_out":
            ledger.source = through.source.replace(
                "session_timeout_ms=2000", "session_timeout_ms=20000"
            )
        acks.delay_s, acks.n_late = 0.0, 0
        async with acks.running(), ledger.reading(2):
            await scenario(ledger, acks)

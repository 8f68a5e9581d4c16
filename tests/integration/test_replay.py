"""`embedstream replay`: a part of a topic through a route once more, on a real broker and model."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from pipeline.cli.commands import main
from schemas.codec import decode_reply
from schemas.results import Reply
from tests.support.documents import status_of
from tests.support.kafka_bench import Bench
from tests.support.models import write_model
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(180)]
PARTITIONS = 3
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


class Replayed:
    """A topic, a settings file with the route that reads it, and what `replay` answers."""

    def __init__(self, bench: Bench, config: Path, model: Path) -> None:
        self.bench = bench
        self.config = config
        config.write_text(
            f'[models.tiny]\npath = "{model}"\n[[routes]]\nname = "k"\nsource = "{bench.source}"\n'
        )

    def run(self, *arguments: str) -> int:
        return main(["replay", "-c", str(self.config), "--topic", self.bench.topic, *arguments])

    def produce(self, records: list[tuple[int, int | None, str]]) -> None:
        """(partition, timestamp, id), in this order."""

        async def work() -> None:
            async with AIOKafkaProducer(
                bootstrap_servers=self.bench.address, linger_ms=5
            ) as producer:
                await asyncio.gather(
                    *[
                        await producer.send(
                            self.bench.topic,
                            msgpack.packb({"id": name, "input": [f"text {name}"]}),
                            key=name.encode(),
                            partition=partition,
                            timestamp_ms=when_ms,
                        )
                        for partition, when_ms, name in records
                    ]
                )

        asyncio.run(work())

    def answered(self) -> Counter[str]:
        """Ids of all replies so far, each of them a result."""

        async def work() -> Counter[str]:
            found: Counter[str] = Counter()
            async with self.bench.reading(self.bench.replies, PARTITIONS) as consumer:
                ends = await consumer.end_offsets(consumer.assignment())
                while any([await consumer.position(p) < end for p, end in ends.items()]):
                    for records in (await consumer.getmany(timeout_ms=200)).values():
                        for record in records:
                            reply = decode_reply(record.value, dict(record.headers))
                            assert isinstance(reply, Reply) or reply.id == "bad"
                            found[record.key.decode()] += 1
            return found

        return asyncio.run(work())

    def committed(self) -> list[int | None]:
        async def work() -> list[int | None]:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self.bench.address, group_id=self.bench.group
            )
            places = [TopicPartition(self.bench.topic, number) for number in range(PARTITIONS)]
            async with consumer:
                consumer.assign(places)
                return [await consumer.committed(place) for place in places]

        return asyncio.run(work())


@pytest.fixture
def replayed(kafka_server: ServerInfo, tmp_path: Path, model: Path) -> Iterator[Replayed]:
    if not kafka_server.real_kafka:
        pytest.skip("the packaged broker tells wrong ends of its partitions")
    bench = Bench(kafka_server.address)
    asyncio.run(bench.create(PARTITIONS))
    yield Replayed(bench, tmp_path / "service.toml", model)


def test_a_topic_from_its_start(replayed: Replayed, capsys: pytest.CaptureFixture[str]) -> None:
    """Every record has its outcome, each partition its line; no group is joined, nothing committed."""
    replayed.produce([(i % 2, None, f"r{i}") for i in range(40)])
    asyncio.run(replayed.bench.produce_raw({"bad": b"\xc1 no record"}))
    assert replayed.run("--from", "start") == 0
    told = capsys.readouterr().err
    assert all(count == 1 for count in replayed.answered().values())
    assert set(replayed.answered()) >= {f"r{i}" for i in range(40)}
    assert "41 records with an outcome: 1 invalid_request, 40 ok; dead letters: 1" in told
    for number in range(PARTITIONS):
        assert f"{replayed.bench.topic}-{number}: " in told
    assert "not done" not in told
    assert replayed.committed() == [None] * PARTITIONS


def test_offsets_of_a_partition(replayed: Replayed, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is sent, the last is not; what retention took is told, not replaced."""
    replayed.produce([(1, None, f"r{i}") for i in range(10)])
    assert replayed.run("--partition", "1", "--from", "5", "--to", "8") == 0
    assert set(replayed.answered()) == {"r5", "r6", "r7"}
    assert f"{replayed.bench.topic}-1: 3 records of offsets 5 to 8" in capsys.readouterr().err
    assert replayed.run("--partition", "1", "--from", "8", "--to", "99") == 0
    assert "2 records of offsets 8 to 10" in capsys.readouterr().err
    assert replayed.run("--partition", "1", "--from", "11") == 1
    assert "lies behind the end of partition 1, 10" in capsys.readouterr().err
    assert replayed.run("--partition", "7", "--from", "start") == 1
    assert "has partitions 0 to 2, and no 7" in capsys.readouterr().err


def test_what_the_log_no_longer_holds_is_told(
    replayed: Replayed, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed.produce([(0, None, f"r{i}") for i in range(6)])

    async def delete() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=replayed.bench.address)
        await admin.start()
        await admin.delete_records({TopicPartition(replayed.bench.topic, 0): RecordsToDelete(4)})
        await admin.close()

    asyncio.run(delete())
    assert replayed.run("--partition", "0", "--from", "1") == 0
    assert set(replayed.answered()) == {"r4", "r5"}
    assert "3 offsets before them are gone from the log" in capsys.readouterr().err


def test_a_broker_that_tells_wrong_ends_is_refused(
    packaged_kafka_server: ServerInfo,
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A replay would stop before the last records of a batch, and say that all is done."""
    bench = Bench(packaged_kafka_server.address)
    asyncio.run(bench.create(PARTITIONS))
    replayed = Replayed(bench, tmp_path / "service.toml", model)
    replayed.produce([(1, None, f"r{i}") for i in range(10)])
    assert replayed.run("--from", "start") == 1
    assert "replay needs an Apache Kafka" in capsys.readouterr().err
    assert replayed.answered() == {}


def test_times(replayed: Replayed) -> None:
    """From a time on, up to another: over all partitions, by the records' own times."""
    at_ms = 1_700_000_000_000
    replayed.produce([(i % PARTITIONS, at_ms + 1000 * i, f"r{i}") for i in range(30)])
    assert replayed.run("--from", "2023-11-14T22:13:30Z", "--to", "2023-11-14T23:13:35+01:00") == 0
    assert set(replayed.answered()) == {f"r{i}" for i in range(10, 15)}


def test_aborted_records_at_the_end_do_not_hold_it_up(
    replayed: Replayed,
) -> None:
    """K02: neither records of an aborted transaction nor control records are waited for."""
    replayed.produce([(0, None, "r0")])

    async def abort() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=replayed.bench.address, transactional_id=replayed.bench.topic
        )
        async with producer:
            await producer.begin_transaction()
            await producer.send_and_wait(replayed.bench.topic, b"aborted", partition=0)
            await producer.abort_transaction()

    asyncio.run(abort())
    assert replayed.run("--from", "start") == 0
    assert replayed.answered() == {"r0": 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_one_that_was_cut_short_goes_on_where_it_says(
    replayed: Replayed, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM amid the work: the documented status, and commands that do the rest."""
    ids = {f"r{i}" for i in range(6000)}
    replayed.produce([(int(name[1:]) % PARTITIONS, None, name) for name in sorted(ids)])
    command = [sys.executable, "-m", "pipeline", "replay", "-c", str(replayed.config)]
    process = subprocess.Popen(
        [*command, "--topic", replayed.bench.topic, "--from", "start", "--set", "publish.max_concurrent=1"],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    while not replayed.answered():
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, told
    rest = re.findall(r"go on with (.*)", told)
    assert rest, told
    before = replayed.answered()
    for arguments in rest:
        assert main(["replay", "-c", str(replayed.config), *shlex.split(arguments)]) == 0
    after = replayed.answered()
    assert after.keys() == ids
    # What is sent twice had its outcome behind one that had none.
    assert sum(after.values()) - len(ids) <= len(before)


def test_documents_into_the_collection_of_the_route(replayed: Replayed, tmp_path: Path) -> None:
    """A collection is filled from the topic while the group of the route stays where it is."""
    url = f"lance://{tmp_path}/index#docs"
    replayed.config.write_text(
        replayed.config.read_text()
        + f'destination = "{url}"\ndocument = {{ id = "key", text = "{{text}}" }}\n'
    )
    documents = {f"d{i}": json.dumps({"text": f"document {i}"}).encode() for i in range(9)}
    asyncio.run(replayed.bench.produce_raw(documents))
    for _ in range(2):
        assert replayed.run("--from", "start") == 0
        assert asyncio.run(status_of(url)).n_documents == 9
    assert replayed.committed() == [None] * PARTITIONS


REFUSED = {
    "offset without partition": ("--from 5", "name one --partition"),
    "no point": ("--from yesterday", "neither start, end, an offset nor a time"),
    "time without zone": ("--from 2026-01-01T00:00:00", "with its zone"),
    "backwards": ("--partition 0 --from 5 --to 5", "not below"),
    "another topic": ("--from start --topic x", "no Kafka route reads x"),
    "no route": ("--from start --route x", "is called x"),
    "dead letters": ("--from start --topic DEAD --route k", "answers would become requests"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    replayed: Replayed, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = REFUSED[case]
    assert replayed.run(*arguments.replace("DEAD", replayed.bench.dead_letters).split()) == 2
    assert words in capsys.readouterr().err


def test_a_topic_that_is_not_there(replayed: Replayed, capsys: pytest.CaptureFixture[str]) -> None:
    assert replayed.run("--from", "start", "--topic", "no.such.topic", "--route", "k") == 1
    assert "topic no.such.topic does not exist" in capsys.readouterr().err

"""`embedstream dead-letters` over a real topic, a real stream and a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from actors.dead_letters import cut_to_fit, dead_letter_headers
from actors.ports import NoMetrics
from pipeline.cli.commands import main
from pipeline.transports.files.options import FileOptions
from pipeline.transports.files.sink import FileSink
from pipeline.transports.kafka.sink import KafkaSink
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis.sink import RedisSink
from schemas.errors import Internal, UndecodableRecord
from tests.conformance.kafka_harness import KafkaHarness
from tests.support.fakes import FakeDelivery
from tests.support.servers import ServerInfo, unique

pytestmark = pytest.mark.timeout(60)

BODY = b"\x82\xa2id\xa1x\xff\x00"
HEADERS = {"content-type": b"application/msgpack", "mine": b"\xff\x01"}


@dataclass
class Place:
    """Where letters lie. `arrived`: what came to the origin: key, body, headers."""

    url: str
    origin: dict[str, Any]
    publish: Callable[[str, bytes, dict[str, bytes]], Awaitable[None]]
    arrived: Callable[[int], Awaitable[list[tuple[str, bytes, dict[str, bytes]]]]]
    to: list[str]
    forgets: bool = True


async def _fill(place: Place) -> None:
    """Two that failed, one with a key of its own; one unreadable; one of which only a part is there."""
    failed = Internal("gave up after 5 attempts")
    for number, key in enumerate(("customer-7", None)):
        origin = {**place.origin, "offset": number}
        one = FakeDelivery(BODY, HEADERS, key=key, attempt=5, origin=origin)
        await place.publish(f"r{number}", BODY, dead_letter_headers(one, failed, "failed"))
    bad = FakeDelivery(b"[1,2", {}, origin=place.origin)
    letter = dead_letter_headers(bad, UndecodableRecord("neither map nor object"), "unprocessable")
    await place.publish("bad", b"[1,2", letter)
    large = FakeDelivery(b"z" * 5000, {}, origin=place.origin)
    body, headers = cut_to_fit(large, dead_letter_headers(large, failed, "failed"), 2000)
    await place.publish("large", body, headers)


def run(*arguments: str) -> int:
    return main(["dead-letters", *arguments])


def listed(place: Place, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run("list", place.url, "--json", *more) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check_all(place: Place, capsys: pytest.CaptureFixture[str], capfdbinary: Any = None) -> None:
    """The four commands, in the order in which an operator uses them."""
    asyncio.run(_fill(place))
    found = {letter["id"]: letter for letter in listed(place, capsys)}
    assert set(found) == {"r0", "r1", "bad", "large"}
    assert found["r0"]["reason"] == "gave up after 5 attempts" and found["r0"]["attempts"] == "5"
    assert [one["id"] for one in listed(place, capsys, "--kind", "unprocessable")] == ["bad"]

    assert run("list", place.url) == 0
    assert "4 dead letters" in capsys.readouterr().err
    assert run("show", place.url, found["r0"]["position"]) == 0
    shown = capsys.readouterr().out
    assert "gave up after 5 attempts" in shown and "customer-7" in shown and "offset" in shown
    assert "header mine" in shown and "\\xff" not in shown
    assert run("show", place.url, "nowhere") == 1

    assert run("replay", place.url, found["r0"]["position"], *place.to) == 0
    again = asyncio.run(place.arrived(1))
    assert again[0][1] == BODY and not [name for name in again[0][2] if "embedstream" in name]

    # The cut one is told; the unreadable one is not asked for; what was sent again is not, once more.
    assert run("replay", place.url, "--all", *place.to) == 1
    assert "holds the beginning of its record only" in capsys.readouterr().err
    arrived = asyncio.run(place.arrived(2 if place.forgets else 3))
    assert [body for _, body, _ in arrived] == [BODY] * len(arrived)
    if place.forgets:
        assert [key for key, _, _ in arrived] == ["customer-7", "r1"]
        assert run("replay", place.url, "--all", *place.to) == 1
        assert len(asyncio.run(place.arrived(2))) == 2

    assert run("purge", place.url) == 2, "no terminal and no --yes: nothing is thrown away"
    assert run("purge", place.url, "--yes") == 0
    assert listed(place, capsys) == []


@pytest.mark.kafka
@pytest.mark.real_kafka
def test_of_a_topic(kafka_server: ServerInfo, capsys: pytest.CaptureFixture[str]) -> None:
    if not kafka_server.real_kafka:
        pytest.skip("the packaged broker deletes no records")
    harness = KafkaHarness(kafka_server, partitions=1)
    url = f"kafka://{kafka_server.address}/{harness.dead_letters}"

    async def publish(key: str, body: bytes, headers: dict[str, bytes]) -> None:
        await harness.create_topic(harness.topic, 1)
        sink = KafkaSink(harness.options(partitions=1))
        await sink.open()
        await sink.publish(harness.dead_letters, key, body, headers)
        await sink.aclose()

    async def arrived(count: int) -> list[tuple[str, bytes, dict[str, bytes]]]:
        records = await harness.reply_records(harness.topic, count)
        for record in records:
            assert dict(record.headers) == HEADERS
        return [(r.key.decode(), r.value, dict(r.headers)) for r in records]

    origin = {"transport": "kafka", "topic": harness.topic, "partition": 0}
    check_all(Place(url, origin, publish, arrived, []), capsys)
    assert run("list", f"kafka://{kafka_server.address}/{unique('nowhere')}") == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.redis
def test_of_a_stream(redis_server: ServerInfo, capsys: pytest.CaptureFixture[str]) -> None:
    host, _, port = redis_server.address.rpartition(":")
    stream, letters = unique("requests"), unique("letters")
    options = RedisOptions(host=host, port=int(port), stream=stream, dead_letter_stream=letters)

    async def publish(key: str, body: bytes, headers: dict[str, bytes]) -> None:
        client: Any = Redis(host=host, port=int(port))
        await client.xgroup_create(stream, unique("g"), mkstream=True)
        await client.aclose()
        sink = RedisSink(options, metrics=NoMetrics())
        await sink.open()
        await sink.publish(sink.dead_letter_destination, key, body, headers)
        await sink.aclose()

    async def arrived(count: int) -> list[tuple[str, bytes, dict[str, bytes]]]:
        client: Any = Redis(host=host, port=int(port))
        entries = await client.xrange(stream)
        await client.aclose()
        found = []
        for _, fields in entries:
            data = fields.pop(b"data")
            key = fields.pop(b"request-id").decode()
            headers = {name.decode(): value for name, value in fields.items()}
            assert headers == HEADERS
            found.append(({"r0": "customer-7"}.get(key, key), data, headers))
        return found

    origin = {"transport": "redis", "stream": stream, "id": "1-1"}
    check_all(
        Place(f"redis://{redis_server.address}/stream:{letters}", origin, publish, arrived, []),
        capsys,
    )


def test_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are no UTF-8 come out as they went in."""
    letters, again = tmp_path / "dead.jsonl", tmp_path / "again.jsonl"
    options = FileOptions(path="-", replies=str(tmp_path / "out.jsonl"), dead_letters=str(letters))

    async def publish(key: str, body: bytes, headers: dict[str, bytes]) -> None:
        sink = FileSink(options)
        await sink.open()
        await sink.publish(sink.dead_letter_destination, key, body, headers)
        await sink.aclose()

    async def arrived(count: int) -> list[tuple[str, bytes, dict[str, bytes]]]:
        return [("", line, {}) for line in again.read_bytes().splitlines()]

    place = Place(
        f"file://{letters}", {"transport": "file"}, publish, arrived, ["--to", str(again)], False
    )
    check_all(place, capsys)
    letters.write_text("no letter\n")
    assert [one["kind"] for one in listed(place, capsys)] == [""]
    assert run("replay", place.url, "1", "--to", str(again)) == 1
    assert "is no dead letter" in capsys.readouterr().err
    assert run("replay", place.url, "1") == 1
    assert run("replay", place.url) == 2
    assert run("list", f"file://{tmp_path}/none.jsonl") == 1
    assert run("list", "-") == 2 and run("list", "inproc://x") == 2

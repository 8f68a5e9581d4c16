"""Routes whose replies go to one place of another kind than their source."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import pytest

from pipeline.app import App
from pipeline.lifecycle import ExitStatus, StopSignal, beside
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports.registry import reach_destination
from pipeline.transports.signed import sign
from schemas.codec import decode_reply
from schemas.results import FailureReply, Reply
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.redis_harness import RedisHarness
from tests.support.fakes import FakeRunner
from tests.support.servers import ServerInfo

REQUESTS = [
    {"id": "a", "input": ["x", "y z"]},
    {"id": "b", "input": "x", "reply_to": "embedstream.mine"},
]


async def serve_file(tmp_path: Path, destination: str) -> Path:
    """Both requests and a broken line through a service, to its end; the file of dead letters."""
    source, dead = tmp_path / "in.jsonl", tmp_path / "dead.jsonl"
    lines = [json.dumps(request) for request in REQUESTS] + ["no json"]
    source.write_text("\n".join(lines))
    route = RouteSettings(
        name="r",
        source=f"file://{source}?dead_letters={dead}&replies={tmp_path / 'unused'}",
        destination=destination,
    )
    app = App(Settings(routes=(route,)), runner_factories={"fake": FakeRunner})
    async with asyncio.timeout(40):
        assert await app.run(StopSignal(10.0)) is ExitStatus.OK
    assert (tmp_path / "unused").read_bytes() == b""
    return dead


def check(bodies: list[bytes], dead: Path) -> None:
    """One vector reply, one refusal of a `reply_to`; the broken line with the source's dead letters."""
    replies = {reply.id: reply for reply in map(decode_reply, bodies)}
    assert isinstance(replies["a"], Reply) and len(replies["a"].items) == 2
    assert isinstance(replies["b"], FailureReply)
    assert replies["b"].error.code == "forbidden_destination"
    assert [json.loads(line)["body"] for line in dead.read_text().splitlines()] == ["no json"]


async def test_from_a_file_to_another_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert await reach_destination(f"file://{out}") == () and not out.exists()
    with pytest.raises(ConnectionError, match="cannot be written"):
        await reach_destination(f"file://{tmp_path}/nowhere/out.jsonl")
    dead = await serve_file(tmp_path, f"file://{out}")
    check(out.read_bytes().splitlines(), dead)


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["list", "stream"])
async def test_from_a_file_to_redis(tmp_path: Path, redis_server: ServerInfo, kind: str) -> None:
    harness = RedisHarness(redis_server)
    name = f"answers.{uuid.uuid4().hex}"  # need not start with a prefix: the operator chose it
    dead = await serve_file(tmp_path, f"redis://{redis_server.address}/{kind}:{name}")
    if kind == "list":
        bodies = await harness.redis.lrange(name, 0, -1)
    else:
        bodies = [fields[b"data"] for _, fields in await harness.redis.xrange(name)]
    assert 0 < await harness.redis.ttl(name) <= 300
    await harness.aclose()
    check(bodies, dead)


@pytest.mark.kafka
async def test_from_a_file_to_kafka(tmp_path: Path, kafka_server: ServerInfo) -> None:
    harness = KafkaHarness(kafka_server)
    topic = f"answers.{uuid.uuid4().hex}"
    notices = await reach_destination(f"kafka://{kafka_server.address}/{topic}")
    assert next(n for n in notices if topic in n).startswith("reply topic")
    dead = await serve_file(tmp_path, f"kafka://{kafka_server.address}/{topic}?partitions=1")
    async with asyncio.timeout(20):
        bodies = await harness.replies(topic, lambda found: len(found) >= 2)
    await harness.aclose()
    check(bodies, dead)


@pytest.mark.kafka
async def test_a_destination_that_is_signed_for_its_owner(
    tmp_path: Path, kafka_server: ServerInfo
) -> None:
    """Of two callers of one route, each has its replies where its own signature leads."""
    keys = tmp_path / "keys"
    keys.write_bytes(b"k" * 32)
    harness = KafkaHarness(kafka_server, partitions=1)
    mine, other = (harness.reply_destination() for _ in range(2))
    for topic in (harness.reply_topic, mine, other):
        await harness.create_topic(topic, 1)
    signed = sign(mine, b"k" * 32)
    asked = {"signed": signed, "bare": other, "stolen": signed.replace(mine, other)}
    for request_id, reply_to in asked.items():
        body = {"id": request_id, "input": "x", "reply_to": reply_to}
        await harness.produce(json.dumps(body).encode(), {"content-type": b"application/json"})
    source = (
        f"kafka://{kafka_server.address}/{harness.topic}?group={harness.group}"
        f"&reply_topic={harness.reply_topic}&dead_letter_topic={harness.dead_letters}"
        f"&reply_key_file={keys}"
    )
    app = App(
        Settings(routes=(RouteSettings(name="r", source=source),)),
        runner_factories={"fake": FakeRunner},
    )
    stop = StopSignal(10.0)
    async with beside(app.run(stop)):
        (answer,) = await harness.replies(mine, bool)
        refused = await harness.replies(harness.reply_topic, lambda found: len(found) == 2)
        stop.request("the test is over")
    assert decode_reply(answer).id == "signed"
    replies = {reply.id: reply for reply in map(decode_reply, refused)}
    assert set(replies) == {"bare", "stolen"}
    for reply in replies.values():
        assert isinstance(reply, FailureReply) and reply.error.code == "forbidden_destination"
        assert signed.rpartition("=")[2] not in reply.error.message
    await harness.aclose()

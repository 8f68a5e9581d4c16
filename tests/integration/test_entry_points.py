"""One policy, every door: the same records through in-process, files, Redis and Kafka.

A real (tiny, seeded) model answers, so truncation, limits and numbers are the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.oneoff import run_inproc
from pipeline.settings.load import HealthSettings, ModelSettings, RouteSettings, Settings
from schemas.codec import decode_reply
from schemas.results import FailureReply, Reply
from tests.support.models import write_model
from tests.support.models_outputs import write_m3, write_splade
from tests.support.servers import ServerInfo, unique

MAX_TOKENS = 24
LONG = "river mountain " * 40
SIZES = (0, -1, 1, 8, 31, 32, 33, 5000)  # 32 is native
OUTPUTS = ["dense", "sparse", "multivector"]

RECORDS: dict[str, dict[str, Any]] = {
    "plain": {"input": "hello world"},
    "one-in-a-list": {"input": ["hello world"]},
    "too-long": {"input": ["hello", LONG]},
    "cut-right": {"input": LONG, "truncate": "right"},
    "cut-left": {"input": [LONG], "truncate": "left"},
    "classify-cut": {"task": "classify", "input": LONG, "truncate": "right", "model": "labels"},
    "classify-long": {"task": "classify", "input": LONG, "model": "labels"},
    "rerank-cut": {"query": "river", "documents": [LONG, "red"], "truncate": "right"},
    "rerank-long": {"query": "river", "documents": [LONG, "red"]},
    "score-long": {"task": "score", "query": "river", "documents": ["red", LONG]},
    "ids": {"input": [[5, 6, 7], [8]]},
    "ids-out-of-range": {"input": [[5], [10**6]]},
    "empty": {"input": ["hello", "", " ", "\u200b"]},
    "surrogate": {"input": ["ok", "a\ud800b", "fine"]},
    **{
        f"dimensions-{model}-{n}": {"input": "river", "model": model, "dimensions": n}
        for model in ("embed", "fixed")
        for n in SIZES
    },
    "three-outputs": {"input": ["river", LONG], "model": "m3", "outputs": OUTPUTS},
    "three-outputs-int8": {"input": "river", "model": "m3", "outputs": OUTPUTS, "dtype": "int8"},
    "sparse-by-default": {"input": ["river", "a\ud800b"], "model": "splade"},
    "no-dense": {"input": "river", "model": "splade", "outputs": ["dense"]},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("models")
    embed = write_model(root / "embed", max_seq_length=MAX_TOKENS)
    rank = write_model(root / "rank", labels=1, max_position_embeddings=MAX_TOKENS, seed=1)
    labels = write_model(root / "labels", labels=3, max_position_embeddings=MAX_TOKENS, seed=2)
    return Settings(
        models={
            "embed": ModelSettings(
                path=str(embed), default_for=("embed",), matryoshka_dimensions=(8,)
            ),
            "fixed": ModelSettings(path=str(write_model(root / "fixed"))),
            "m3": ModelSettings(path=str(write_m3(root / "m3"))),
            "splade": ModelSettings(path=str(write_splade(root / "splade"))),
            "rank": ModelSettings(path=str(rank), default_for=("rerank", "score")),
            "labels": ModelSettings(path=str(labels), default_for=("classify",)),
        },
        health=HealthSettings(port=0),
    )


def plain(reply: Reply | FailureReply) -> Any:
    """What must be equal through every door: everything but id and timings."""
    if isinstance(reply, FailureReply):
        return ("failure", reply.error.to_wire())
    items = [
        (i.index, i.embedding, i.scores, i.relevance_score, i.tokens, i.truncated,
         None if i.error is None else json.dumps(i.error.to_wire()),
         None if i.sparse is None else (i.sparse.indices, i.sparse.values),
         i.multivector, i.scale, i.scales)
        for i in reply.items
    ]  # fmt: skip
    return (reply.task, reply.dimensions, reply.dtype, reply.usage.total_tokens, items)


def body_of(name: str, content_type: str) -> bytes:
    record = {"id": name, **RECORDS[name]}
    if content_type == "application/json":
        return json.dumps(record).encode()
    return msgpack.packb(record, unicode_errors="surrogatepass")


@pytest.fixture(scope="module")
def reference(settings: Settings) -> dict[str, Any]:
    """The in-process answers, msgpack."""

    async def ask_all() -> dict[str, Any]:
        answers = {}
        async with run_inproc(settings) as service:
            for name in RECORDS:
                (reply,) = await service.request(body_of(name, "application/msgpack"))
                answers[name] = plain(decode_reply(reply.body, reply.headers))
        return answers

    return asyncio.run(ask_all())


@asynccontextmanager
async def serving(settings: Settings, source: str) -> AsyncIterator[App]:
    route = RouteSettings(name="door", source=source)
    app = App(msgspec.structs.replace(settings, routes=(route,)))
    stop = StopSignal(10.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(stop))
        await app.ready.wait()
        try:
            yield app
        finally:
            stop.request("test over")


async def test_what_the_reference_says(reference: dict[str, Any]) -> None:
    """B01-B05, B07, B10, B11, B13, B19: the policy itself, once, before it is compared."""
    assert reference["plain"] == reference["one-in-a-list"]
    _, _, _, _, long_items = reference["too-long"]
    error = json.loads(long_items[1][6])
    assert error["code"] == "too_long" and error["limit"] == MAX_TOKENS
    assert error["given"] > MAX_TOKENS and error["items"] == [1] and "truncate" in error["message"]
    for name in ("cut-right", "cut-left", "classify-cut"):
        ((_, _, _, _, tokens, truncated, error_text, *_),) = reference[name][4]
        assert (tokens, truncated, error_text) == (MAX_TOKENS, True, None)
    codes = [None if i[6] is None else json.loads(i[6])["code"] for i in reference["empty"][4]]
    assert codes == [None, "empty_input", "empty_input", "empty_input"]
    ids = reference["ids-out-of-range"]
    assert ids[0] == "failure" or json.loads(ids[4][1][6])["code"] == "invalid_request"
    assert all(item[6] is None for item in reference["surrogate"][4])


async def test_dimensions_are_refused_or_computed_never_ignored(
    reference: dict[str, Any],
) -> None:
    """A08, A09: 0, negative, 1, native, native + 1 and 5000, on a Matryoshka model and another."""
    allowed = {"embed": (8, 32), "fixed": (32,)}
    for model, sizes in allowed.items():
        for n in SIZES:
            answer = reference[f"dimensions-{model}-{n}"]
            if n in sizes:
                _, dimensions, dtype, _, ((_, embedding, *_),) = answer
                vector = np.frombuffer(embedding, "<f4")
                assert dimensions == n == len(vector) and dtype == "float32"
                assert abs(float(np.linalg.norm(vector)) - 1) <= 1e-6
                full = np.frombuffer(reference[f"dimensions-{model}-32"][4][0][1], "<f4")
                prefix = full[:n] / np.linalg.norm(full[:n])
                assert np.abs(vector - prefix).max() <= 1e-6
                continue
            kind, error = answer
            assert kind == "failure" and error["code"] == "invalid_dimensions"
            assert error["given"] == n and error["limit"] == (1 if n < 1 else 32)
            assert n < 1 or ", ".join(map(str, sizes)) in error["message"]


async def test_what_the_reference_says_of_other_outputs(reference: dict[str, Any]) -> None:
    """A10, D01, D09: all outputs beside each other; int8 with a scale for every vector."""
    task, dimensions, dtype, _, (short, long) = reference["three-outputs"]
    assert (task, dimensions, dtype) == ("embed", 32, "float32")
    assert json.loads(long[6])["code"] == "too_long"
    indices, values = short[7]
    assert indices == sorted(indices) and len(values) == len(indices)
    assert [len(vector) for vector in short[8]] == [32 * 4] * (short[4] - 1)
    small = reference["three-outputs-int8"][4][0]
    assert small[7] == short[7], "sparse weights keep their precision whatever the dtype"
    assert len(small[10]) == len(small[8]) == len(short[8]) and small[9] is not None
    for full, data, scale in zip(short[8], small[8], small[10], strict=True):
        restored = np.frombuffer(data, np.int8) * scale
        assert np.abs(restored - np.frombuffer(full, "<f4")).max() <= 0.51 * scale
    _, dimensions, dtype, _, items = reference["sparse-by-default"]
    assert dimensions is None and dtype is None
    assert all(item[7] is not None and item[1] is None for item in items)
    assert reference["no-dense"][1]["code"] == "unsupported"


async def test_json_answers_as_msgpack_does(settings: Settings, reference: dict[str, Any]) -> None:
    """B08, D08: one policy for both encodings."""
    async with run_inproc(settings) as service:
        for name in RECORDS:
            (reply,) = await service.request(body_of(name, "application/json"))
            assert plain(decode_reply(reply.body, reply.headers)) == reference[name], name


@pytest.mark.redis
async def test_redis_answers_as_in_process_does(
    settings: Settings, reference: dict[str, Any], redis_server: ServerInfo
) -> None:
    """B08: one policy through the Redis stream."""
    import redis.asyncio as aioredis

    stream = unique("embedstream.in")
    client: Any = aioredis.Redis.from_url(f"redis://{redis_server.address}", protocol=2)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.aclose)
        await stack.enter_async_context(
            serving(settings, f"redis://{redis_server.address}/{stream}?group=g")
        )
        for name in RECORDS:
            body = body_of(name, "application/msgpack")
            await client.xadd(stream, {"data": body, "reply-to": f"list:{stream}.out"})
            _, element = await client.blpop([f"{stream}.out"], timeout=20)
            assert plain(decode_reply(element, {})) == reference[name], name


@pytest.mark.kafka
async def test_kafka_answers_as_in_process_does(
    settings: Settings, reference: dict[str, Any], kafka_server: ServerInfo
) -> None:
    """B08: one policy through the Kafka topic."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    topic, replies = unique("embedstream.in"), unique("embedstream.out")
    source = (
        f"kafka://{kafka_server.address}/{topic}?group={topic}&reply_topic={replies}&partitions=1"
        "&session_timeout_ms=2000&heartbeat_interval_ms=200&fetch_max_wait_ms=20"
    )
    async with serving(settings, source):
        async with AIOKafkaProducer(bootstrap_servers=kafka_server.address) as producer:
            for name in RECORDS:
                body = body_of(name, "application/msgpack")
                await producer.send_and_wait(topic, body, key=name.encode())
        consumer = AIOKafkaConsumer(
            replies, bootstrap_servers=kafka_server.address, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            answers: dict[str, Any] = {}
            while len(answers) < len(RECORDS):
                record = await consumer.getone()
                reply = decode_reply(record.value, dict(record.headers))
                answers[reply.id] = plain(reply)
        finally:
            await consumer.stop()
    assert answers == reference


async def test_files_answer_as_in_process_does(
    settings: Settings, reference: dict[str, Any], tmp_path: Path
) -> None:
    """B08: one policy through JSONL files; the service ends when the file does."""
    source, replies = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(body_of(name, "application/json") for name in RECORDS) + b"\n")
    route = RouteSettings(name="door", source=f"file://{source}?replies={replies}")
    app = App(msgspec.structs.replace(settings, routes=(route,)))
    status = await app.run(StopSignal(10.0))
    assert status == 0
    answers = {}
    for line in replies.read_bytes().splitlines():
        reply = decode_reply(line, {"content-type": b"application/json"})
        answers[reply.id] = plain(reply)
    assert answers == reference


async def test_a_text_of_exactly_the_limit_is_answered_and_one_more_is_not(
    settings: Settings,
) -> None:
    """B05, B06: limit - 1, limit and limit + 1 tokens, alone and in a batch; nothing hangs."""
    async with run_inproc(settings) as service:

        async def ask(texts: list[str]) -> Reply:
            (reply,) = await service.request(msgpack.packb({"id": "a", "input": texts}))
            decoded = decode_reply(reply.body, reply.headers)
            assert isinstance(decoded, Reply)
            return decoded

        texts = [
            " ".join(["river"] * (n - 2)) for n in (MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1)
        ]
        for batch in (texts, ["hello", *texts, "world"]):
            reply = await ask(batch)
            by_text = dict(zip(batch, reply.items, strict=True))
            assert by_text[texts[0]].tokens == MAX_TOKENS - 1 and by_text[texts[0]].error is None
            assert by_text[texts[1]].tokens == MAX_TOKENS and by_text[texts[1]].error is None
            error = by_text[texts[2]].error
            assert error is not None and (error.code, error.given) == ("too_long", MAX_TOKENS + 1)


async def test_a_refused_over_long_request_leaves_nothing_behind(settings: Settings) -> None:
    """B07: answered at once; nothing occupies the queue."""
    async with run_inproc(settings) as service:
        (reply,) = await service.request(msgpack.packb({"id": "a", "input": "river " * 33_000}))
        decoded = decode_reply(reply.body, reply.headers)
        assert isinstance(decoded, Reply) and decoded.items[0].error is not None
        statistics = service.app.statistics()
    assert statistics["in_flight"] == 0
    assert all(n == 0 for lanes in statistics["queued_tokens"].values() for n in lanes.values())


async def test_the_byte_limit_is_its_own_error_and_truncation_has_no_other_guard(
    settings: Settings,
) -> None:
    """B02, C08: 67,337 characters with truncation on are embedded; the byte limit has its own code."""
    async with run_inproc(settings) as service:
        text = ("river " * 11_223)[:67_337]
        (cut,) = await service.request(
            msgpack.packb({"id": "a", "input": text, "truncate": "right"})
        )
        (refused,) = await service.request(
            msgpack.packb({"id": "b", "input": "x" * (1024 * 1024 + 1), "truncate": "right"})
        )
    reply = decode_reply(cut.body, cut.headers)
    assert isinstance(reply, Reply) and reply.items[0].tokens == MAX_TOKENS
    failure = decode_reply(refused.body, refused.headers)
    assert isinstance(failure, FailureReply) and failure.error.code == "item_too_large"
    assert (failure.error.limit, failure.error.given) == (1024 * 1024, 1024 * 1024 + 1)


async def test_tokens_used_are_real_tokens(settings: Settings) -> None:
    """B20, B04, D05: no padding is ever counted; after truncation, special tokens included."""
    async with run_inproc(settings) as service:
        (reply,) = await service.request(
            msgpack.packb({"id": "a", "input": ["hello", LONG], "truncate": "right"})
        )
    decoded = decode_reply(reply.body, reply.headers)
    assert isinstance(decoded, Reply)
    assert [item.tokens for item in decoded.items] == [3, MAX_TOKENS]
    assert decoded.usage.total_tokens == 3 + MAX_TOKENS

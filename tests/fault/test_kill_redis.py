"""SIGKILL and SIGTERM of a real service process on a real Redis or Valkey server."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis.asyncio as aioredis

from schemas.codec import decode_reply
from schemas.results import FailureReply, Reply
from tests.support.fakes import fake_ids, fake_vector
from tests.support.processes import ServiceProcess, service_process
from tests.support.servers import ServerInfo, unique

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

CLAIM = "claim_idle_ms=800&claim_interval_ms=100&block_ms=200"


class Bench:
    """One request stream or list, one reply stream, one client."""

    def __init__(self, address: str, kind: str) -> None:
        self.address = address
        self.kind = kind
        self.client: Any = aioredis.Redis.from_url(f"redis://{address}", protocol=2)
        self.stream, self.replies = unique("embedstream.in"), unique("embedstream.out")

    def config(self, **more: Any) -> dict[str, Any]:
        source = f"redis://{self.address}/{self.stream}?group=g&{CLAIM}"
        if self.kind == "list":
            source = f"redis-list://{self.address}/{self.stream}?{CLAIM}"
        return {"routes": [{"name": "r", "source": source, "lane": "bulk"}], **more}

    async def send(self, records: dict[str, Any]) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for request_id, record in records.items():
            reply_to = f"stream:{self.replies}"
            body = msgpack.packb({"id": request_id, "reply_to": reply_to, **record})
            if self.kind == "list":
                pipeline.lpush(self.stream, body)
            else:
                pipeline.xadd(self.stream, {"data": body})
        await pipeline.execute()

    async def put(self, body: bytes) -> None:
        """One record as it is."""
        if self.kind == "list":
            await self.client.lpush(self.stream, body)
        else:
            await self.client.xadd(self.stream, {"data": body})

    async def n_held(self) -> int:
        """Records that a service has taken and not settled."""
        if self.kind == "list":
            keys = [key async for key in self.client.scan_iter(f"{{{self.stream}}}:processing:*")]
            return sum([await self.client.llen(key) for key in keys])
        return int((await self.client.xpending(self.stream, "g"))["pending"])

    async def n_waiting(self) -> int:
        """Records that stand in the stream or list."""
        if self.kind == "list":
            return int(await self.client.llen(self.stream))
        return int(await self.client.xlen(self.stream))

    async def collect(
        self, wanted: set[str], seen: Counter[str], kept: dict[str, Reply], after: bytes = b"0"
    ) -> bytes:
        """Read replies until every wanted id has one; returns the last entry id read."""
        while not wanted <= set(seen):
            after = await self.read(seen, kept, after)
        return after

    async def read(self, seen: Counter[str], kept: dict[str, Reply], after: bytes) -> bytes:
        for _, entries in await self.client.xread({self.replies: after}, count=500, block=300):
            for entry_id, fields in entries:
                after = entry_id
                reply = decode_reply(fields[b"data"], {"content-type": fields[b"content-type"]})
                assert isinstance(reply, Reply), reply
                seen[reply.id] += 1
                first = kept.setdefault(reply.id, reply)
                assert first.items == reply.items, "answered twice, differently"
        return after


@pytest.fixture
async def bench(redis_server: ServerInfo, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    one = Bench(redis_server.address, getattr(request, "param", "stream"))
    yield one
    await one.client.aclose()


both = pytest.mark.parametrize("bench", ["stream", "list"], indirect=True)


def requests(n: int) -> dict[str, Any]:
    return {f"r{i}": {"input": f"text number{i} of{i % 7}"} for i in range(n)}


@both
async def test_kill_nine_with_a_thousand_in_flight_loses_nothing(
    bench: Bench, redis_server: ServerInfo, tmp_path: Path
) -> None:
    """F04, F08, F15: SIGKILL in mid-work; a second process claims and answers; 0 lost."""
    records = requests(1000)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    config = bench.config(forward_s=0.02)
    with service_process(config, tmp_path, "first") as first:
        await bench.send(records)
        after = b"0"
        while len(seen) < 100:
            after = await bench.read(seen, kept, after)
        first.kill()
    answered_before = len(seen)
    with service_process(config, tmp_path, "second"):
        await bench.collect(set(records), seen, kept, after)
    assert answered_before < 1000
    for request_id, record in records.items():
        vector = np.frombuffer(kept[request_id].items[0].embedding or b"", "<f4")
        np.testing.assert_array_equal(vector, fake_vector(fake_ids(record["input"])))
    duplicates = sum(count - 1 for count in seen.values())
    print(f"redis {redis_server.kind}: lost 0, duplicates {duplicates}, before {answered_before}")


@both
async def test_sigterm_drains_and_leaves_an_empty_queue(bench: Bench, tmp_path: Path) -> None:
    """G01, F06: drained means answered, acknowledged and deleted."""
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    records = requests(300)
    with service_process(bench.config(forward_s=0.01), tmp_path, "first") as service:
        await bench.send(records)
        after = b"0"
        while len(seen) < 20:
            after = await bench.read(seen, kept, after)
        service.signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait) == 0, service.log()
    with service_process(bench.config(), tmp_path, "second"):
        await bench.collect(set(records), seen, kept, after)
        while await bench.n_waiting() or await bench.n_held():
            await asyncio.sleep(0.02)
    assert set(seen.values()) == {1}


async def test_rpc_replies_go_to_a_list_with_a_time_to_live(bench: Bench, tmp_path: Path) -> None:
    """F11, F12: the default reply list expires, for results and for failures alike."""
    with service_process(bench.config(), tmp_path):
        for request_id, record, kind in (
            ("good", {"input": "hello there"}, Reply),
            ("bad", {"input": "x", "nonsense": 1}, FailureReply),
        ):
            one = f"{bench.stream}.{request_id}"
            body = msgpack.packb({"id": one, **record})
            await bench.client.xadd(bench.stream, {"data": body})
            key = f"embedstream.reply.{one}"
            while not await bench.client.exists(key):
                await asyncio.sleep(0.005)
            assert 0 < await bench.client.ttl(key) <= 300
            _, element = await bench.client.blpop([key], timeout=10)
            assert isinstance(decode_reply(element, {}), kind)


async def test_a_request_must_not_write_to_arbitrary_keys(bench: Bench, tmp_path: Path) -> None:
    """reply_to outside the allow-list is refused, and so is the request stream itself."""
    with service_process(bench.config(), tmp_path):
        for n, target in enumerate(("list:session:admin", f"stream:{bench.stream}", "list:")):
            one = f"{bench.stream}.f{n}"
            body = msgpack.packb({"id": one, "input": "x", "reply_to": target})
            await bench.client.xadd(bench.stream, {"data": body})
            _, element = await bench.client.blpop([f"embedstream.reply.{one}"], timeout=10)
            reply = decode_reply(element, {})
            assert isinstance(reply, FailureReply)
            assert reply.error.code == "forbidden_destination"
    assert not await bench.client.exists("session:admin")


async def letters(bench: Bench) -> list[str]:
    """Request ids of the dead letters that came from this stream."""
    found = await bench.client.xrange("embedstream.dead-letters")
    return [
        fields[b"request-id"].decode()
        for _, fields in found
        if bench.stream.encode() in fields[b"embedstream-origin"]
    ]


@both
async def test_a_record_that_kills_the_process_is_given_up_and_its_neighbours_are_answered(
    bench: Bench, tmp_path: Path
) -> None:
    """K39: the poison ends in a dead letter after its attempts, each of the 60 beside it is answered."""
    records = requests(60)
    config = bench.config(poison="poison", forward_s=0.002, max_batch_tokens=256)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    poison = msgpack.packb({"id": "poison", "input": "poison"})
    await bench.put(poison)
    await bench.send(records)
    lives = 0
    while "poison" not in await letters(bench):
        lives += 1
        assert lives <= 8, "the poison is never given up"
        service = ServiceProcess(config, tmp_path, f"life{lives}")
        try:
            while service.process.poll() is None and "poison" not in await letters(bench):
                await asyncio.sleep(0.02)
        finally:
            service.close()
    with service_process(config, tmp_path, "last"):
        await bench.collect(set(records), seen, kept)
    assert set(await letters(bench)) == {"poison"}


@both
async def test_kills_from_outside_give_up_nobody(bench: Bench, tmp_path: Path) -> None:
    """K39: seven kill -9 in a row with 400 waiting; what was only handed out was never tried."""
    records = requests(400)
    config = bench.config(forward_s=0.05)
    await bench.send(records)
    for life in range(7):
        with service_process(config, tmp_path, f"life{life}") as service:
            while await bench.n_held() == 0:
                await asyncio.sleep(0.01)
            service.kill()
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    with service_process(bench.config(), tmp_path, "last"):
        await bench.collect(set(records), seen, kept)
    assert await letters(bench) == []

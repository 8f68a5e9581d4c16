"""The bare loops of `benchmarks.pipeline`: what a transport can do when nothing stands behind it.

Who calls it: `benchmarks.pipeline`.
What must stay true: consume, unpack, pack a reply of ready rows, publish and wait for the broker, commit;
nothing else, no validation, no deadline, no retry. The same client libraries, the same broker and the
same delivery guarantee (a reply is durable before its request is settled) as the service has.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgpack

BATCH = 256
ROW = b"\0" * (384 * 4)


def answer(body: bytes) -> tuple[str, bytes]:
    """Request id and a packed reply with one row of 384 floats per input."""
    request = msgpack.unpackb(body)
    items = [{"index": i, "embedding": ROW} for i in range(len(request["input"]))]
    return request["id"], msgpack.packb({"id": request["id"], "items": items})


async def bare_inproc(bodies: list[bytes]) -> float:
    """An asyncio queue and nothing more. Seconds."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    replies: list[bytes] = []
    for body in bodies:
        queue.put_nowait(body)
    queue.put_nowait(None)
    started = time.perf_counter()
    while (body := await queue.get()) is not None:
        replies.append(answer(body)[1])
    return time.perf_counter() - started


async def bare_redis(port: int, stream: str, group: str, replies: str, count: int) -> float:
    """XREADGROUP, then one pipeline of replies and one of XACK and XDEL. Seconds."""
    from redis.asyncio import Redis

    client: Any = Redis(port=port)
    started = time.perf_counter()
    done = 0
    while done < count:
        found = await client.xreadgroup(group, "bare", {stream: ">"}, count=BATCH, block=1000)
        entries = found[0][1] if found else []
        async with client.pipeline(transaction=False) as pipe:
            for _, fields in entries:
                request_id, reply = answer(fields[b"data"])
                pipe.xadd(replies, {"data": reply, "id": request_id}, maxlen=10_000)
            await pipe.execute()
        ids = [entry_id for entry_id, _ in entries]
        async with client.pipeline(transaction=False) as pipe:
            pipe.xack(stream, group, *ids)
            pipe.xdel(stream, *ids)
            await pipe.execute()
        done += len(entries)
    took = time.perf_counter() - started
    await client.aclose()
    return took


async def bare_kafka(bootstrap: str, topic: str, group: str, replies: str, count: int) -> float:
    """getmany, idempotent sends with acks=all, await all, commit. Seconds from the first record on."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=10,
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, linger_ms=2
    )
    await producer.start()
    await consumer.start()
    started, done = 0.0, 0
    try:
        while done < count:
            polled = await consumer.getmany(timeout_ms=1000, max_records=BATCH)
            records = [record for part in polled.values() for record in part]
            if not records:
                continue
            started = started or time.perf_counter()
            sent = []
            for record in records:
                request_id, reply = answer(record.value)
                sent.append(await producer.send(replies, reply, key=request_id.encode()))
            await asyncio.gather(*sent)
            await consumer.commit()
            done += len(records)
        return time.perf_counter() - started
    finally:
        await consumer.stop()
        await producer.stop()

"""aiokafka and sentence-transformers: a record at a time, or what one poll brought.

Commits by hand after the replies, as https://aiokafka.readthedocs.io/en/stable/consumer.html advises for at
least once; `encode` in a thread, because the event loop keeps the heartbeat (same page).
"""

from __future__ import annotations

import asyncio
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.workers import ADDRESS, GROUP, REPLIES, REQUESTS, load, reply_of, text_of


async def main(per_poll: bool) -> None:
    model = load()
    consumer = AIOKafkaConsumer(
        REQUESTS,
        bootstrap_servers=ADDRESS,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    producer = AIOKafkaProducer(bootstrap_servers=ADDRESS, acks="all")
    async with consumer, producer:
        if per_poll:
            while True:
                polled = await consumer.getmany(timeout_ms=1000)
                records = [text_of(r.value) for part in polled.values() for r in part]
                if not records:
                    continue
                vectors = await asyncio.to_thread(model.encode, [text for _, text in records])
                sent = [
                    await producer.send(REPLIES, reply_of(i, vector), key=i.encode())
                    for (i, _), vector in zip(records, vectors, strict=True)
                ]
                await asyncio.gather(*sent)
                await consumer.commit()
        async for record in consumer:
            request_id, text = text_of(record.value)
            vector = await asyncio.to_thread(model.encode, text)
            await producer.send_and_wait(
                REPLIES, reply_of(request_id, vector), key=request_id.encode()
            )
            await consumer.commit()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] == "poll"))

"""FastStream over Kafka: the subscriber of its first page, and a batch subscriber that acknowledges afterwards.

https://faststream.ag2.ai/latest/kafka/Subscriber/ (a record at a time, acknowledged first by default),
https://faststream.ag2.ai/latest/kafka/Subscriber/batch_subscriber/ and
https://faststream.ag2.ai/latest/kafka/ack/ (`AckPolicy.NACK_ON_ERROR`: commit after the handler).
"""

from __future__ import annotations

import asyncio
import logging
import sys

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker

from benchmarks.workers import ADDRESS, GROUP, REPLIES, REQUESTS, load, reply_of, text_of

broker = KafkaBroker(ADDRESS, log_level=logging.WARNING)
app = FastStream(broker)


def subscribe(batch: bool) -> None:
    model = load()
    if not batch:

        @broker.subscriber(REQUESTS, group_id=GROUP, auto_offset_reset="earliest")
        async def one(body: bytes) -> None:
            request_id, text = text_of(body)
            vector = await asyncio.to_thread(model.encode, text)
            await broker.publish(
                reply_of(request_id, vector), topic=REPLIES, key=request_id.encode()
            )

        return

    @broker.subscriber(
        REQUESTS,
        group_id=GROUP,
        auto_offset_reset="earliest",
        batch=True,
        ack_policy=AckPolicy.NACK_ON_ERROR,
    )
    async def many(bodies: list[bytes]) -> None:
        records = [text_of(body) for body in bodies]
        vectors = await asyncio.to_thread(model.encode, [text for _, text in records])
        for (request_id, _), vector in zip(records, vectors, strict=True):
            await broker.publish(
                reply_of(request_id, vector), topic=REPLIES, key=request_id.encode()
            )


if __name__ == "__main__":
    subscribe(sys.argv[1] == "batch")
    asyncio.run(app.run())

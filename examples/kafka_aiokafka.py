import asyncio
import uuid

import msgpack
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

BROKER, WAIT_S = "localhost:9092", 60
ME = f"{uuid.uuid4()}."  # ids that nobody else has


async def main() -> None:
    texts = {f"{ME}{i}": f"text {i}" for i in range(100)}
    consumer = AIOKafkaConsumer("embedstream.replies", bootstrap_servers=BROKER)
    producer = AIOKafkaProducer(bootstrap_servers=BROKER, compression_type="gzip")
    async with consumer, producer:
        await consumer.seek_to_end()
        for partition in consumer.assignment():
            await consumer.position(partition)  # the end as it is now, before anything is sent
        for request_id, text in texts.items():
            record = msgpack.packb({"id": request_id, "input": [text]})
            await producer.send("embedstream.requests", record, key=request_id.encode())
        await producer.flush()
        async with asyncio.timeout(WAIT_S):
            while texts:
                record = await consumer.getone()
                reply = msgpack.unpackb(record.value)
                text = texts.pop(reply["id"], None)
                if text is None:
                    continue  # somebody else's, or seen before
                if "error" in reply:
                    raise RuntimeError(f"{reply['error']['code']} for {text!r}")
                print(text, len(reply["data"][0]["embedding"]) // 4)  # bytes of float32


asyncio.run(main())

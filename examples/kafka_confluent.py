import time
import uuid

import msgpack
from confluent_kafka import Consumer, Producer, TopicPartition

BROKER, WAIT_S = "localhost:9092", 60
ME = f"{uuid.uuid4()}."  # ids that nobody else has

consumer = Consumer({"bootstrap.servers": BROKER, "group.id": ME, "enable.auto.commit": False})
topic = consumer.list_topics("embedstream.replies", timeout=10).topics["embedstream.replies"]
places = [TopicPartition(topic.topic, number) for number in topic.partitions]
for place in places:  # the end as it is now, before anything is sent
    place.offset = consumer.get_watermark_offsets(place, timeout=10)[1]
consumer.assign(places)

producer = Producer(
    {"bootstrap.servers": BROKER, "compression.type": "zstd", "transactional.id": ME}
)
producer.init_transactions(30)
producer.begin_transaction()
texts = {f"{ME}{i}": f"text {i}" for i in range(100)}
for request_id, text in texts.items():
    record = msgpack.packb({"id": request_id, "input": [text]})
    producer.produce("embedstream.requests", record, key=request_id)
producer.commit_transaction(30)  # nothing of it is answered before

end = time.monotonic() + WAIT_S
while texts and time.monotonic() < end:
    record = consumer.poll(1.0)
    if record is None:
        continue
    if record.error() is not None:
        raise RuntimeError(record.error().str())
    reply = msgpack.unpackb(record.value())
    text = texts.pop(reply["id"], None)
    if text is None:
        continue  # somebody else's, or seen before
    if "error" in reply:
        raise RuntimeError(f"{reply['error']['code']} for {text!r}")
    print(text, len(reply["data"][0]["embedding"]) // 4)  # bytes of float32
consumer.close()
if texts:
    raise TimeoutError(f"{len(texts)} without a reply")

import time
import uuid

import msgpack
import redis

WAIT_S = 10
# The socket's time-out is longer than the wait; redis-py 8 would otherwise give up after 5 s.
r = redis.Redis.from_url(
    "redis://localhost:6379", socket_timeout=WAIT_S + 5, socket_connect_timeout=5
)


def ask(request: dict) -> dict:
    """One request, its reply. Each waiting call holds a connection: for more than a few use the client."""
    request_id = str(uuid.uuid4())
    deadline_ms = int((time.time() + WAIT_S) * 1000)  # nothing is computed that nobody waits for
    record = msgpack.packb({"id": request_id, "deadline_ms": deadline_ms, **request})
    r.xadd("embedstream.requests", {"data": record})
    popped = r.blpop([f"embedstream.reply.{request_id}"], timeout=WAIT_S)
    if popped is None:
        raise TimeoutError("no reply")
    reply = msgpack.unpackb(popped[1])
    if reply["id"] != request_id or "error" in reply:
        raise RuntimeError(reply.get("error", {}).get("code", "somebody else's reply"))
    return reply


documents = [
    "A dead key on a keyboard changes the next letter.",
    "A deadlock is when two processes wait for each other and neither can go on.",
]
for result in ask({"query": "what is a deadlock?", "documents": documents})["results"]:
    print(f"{result['relevance_score']:.4f}  {documents[result['index']]}")

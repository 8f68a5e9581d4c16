import asyncio
import time
import uuid

import msgpack
import redis.asyncio as redis

WAIT_S = 10
# A waiting call holds a connection. This pool makes further calls wait for one instead of failing.
pool = redis.BlockingConnectionPool.from_url(
    "redis://localhost:6379",
    max_connections=64,
    timeout=WAIT_S,
    socket_timeout=WAIT_S + 5,  # longer than the wait for a reply
    socket_connect_timeout=5,
)
r = redis.Redis.from_pool(pool)


async def ask(request: dict) -> dict:
    """One request, its reply."""
    request_id = str(uuid.uuid4())
    deadline_ms = int((time.time() + WAIT_S) * 1000)
    record = msgpack.packb({"id": request_id, "deadline_ms": deadline_ms, **request})
    await r.xadd("embedstream.requests", {"data": record})
    popped = await r.blpop([f"embedstream.reply.{request_id}"], timeout=WAIT_S)
    if popped is None:
        raise TimeoutError("no reply")
    reply = msgpack.unpackb(popped[1])
    if reply["id"] != request_id or "error" in reply:
        raise RuntimeError(reply.get("error", {}).get("code", "somebody else's reply"))
    return reply


async def main() -> None:
    replies = await asyncio.gather(*(ask({"input": f"text {i}"}) for i in range(500)))
    print(sum(len(reply["data"]) for reply in replies))
    await r.aclose()


asyncio.run(main())

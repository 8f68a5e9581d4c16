"""Ask a running service that reads a Redis list.

Who calls it: the registry.
What must stay true: the address means to the client what it means to the source; requests are pushed to
the end that the source does not take from.
"""

from __future__ import annotations

from pipeline.transports.ask import Asker, connect
from pipeline.transports.redis.ask import server
from pipeline.transports.redis_list.options import RedisListOptions


async def open_asker(options: RedisListOptions, *, timeout_s: float) -> Asker:
    """Connected. Raises `ConnectionError`."""
    endpoint = server(options, key=options.key, take_from=options.take_from)
    return await connect(endpoint, timeout_s=timeout_s)

"""Ask a running service over Redis.

Who calls it: the registry; `redis_list/ask.py`.
What must stay true: the address means to the client what it means to the source.
"""

from __future__ import annotations

from typing import Any

from embedstream_client import RedisEndpoint
from pipeline.transports.ask import Asker, connect
from pipeline.transports.redis.options import RedisOptions, RedisQueueOptions


async def open_asker(options: RedisOptions, *, timeout_s: float) -> Asker:
    """Connected. Raises `ConnectionError`."""
    return await connect(server(options, stream=options.stream), timeout_s=timeout_s)


def server(options: RedisQueueOptions, **queue: Any) -> RedisEndpoint:
    """The client's endpoint of the same server. queue: where requests are put."""
    return RedisEndpoint(
        host=options.host,
        port=options.port,
        db=options.db,
        username=options.username,
        password=options.password,
        tls=options.tls,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_check_hostname=options.ssl_check_hostname,
        nodes=options.nodes,
        sentinel=options.sentinel,
        sentinel_username=options.sentinel_username,
        sentinel_password=options.sentinel_password,
        cluster=options.cluster,
        **queue,
    )

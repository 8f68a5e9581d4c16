"""Connections to Redis that ask where the server is whenever they are made anew.

Who calls it: `_redis`.
What must stay true: redis-py never retries by itself and never waits without a bound; behind sentinels the
master is asked for, of a cluster the node that has the key.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any

from ._urls import RedisEndpoint


def connect(
    endpoint: RedisEndpoint, key: str, *, connect_timeout_s: float, socket_timeout_s: float
) -> Any:
    """A client of one connection to the server that has `key`; connects on first use."""
    import redis.asyncio as redis

    async def find() -> tuple[str, int]:
        if endpoint.sentinel is not None:
            return await _master(endpoint, settings)
        return await _owner(endpoint, key, settings)

    def of(base: Any) -> Any:
        class Located(base):  # type: ignore[misc]
            async def _connect(self) -> None:
                if endpoint.sentinel is not None or endpoint.cluster:
                    self.host, self.port = await find()
                await super()._connect()

        return Located

    settings = _settings(endpoint, connect_timeout_s, socket_timeout_s)
    pool = redis.ConnectionPool(
        connection_class=of(redis.SSLConnection if endpoint.tls else redis.Connection),
        host=endpoint.host,
        port=endpoint.port,
        db=endpoint.db,
        username=endpoint.username,
        password=endpoint.password,
        max_connections=1,
        **settings,
    )
    return redis.Redis.from_pool(pool)


def _settings(
    endpoint: RedisEndpoint, connect_timeout_s: float, socket_timeout_s: float
) -> dict[str, Any]:
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    settings: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": socket_timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
    }
    if endpoint.tls:
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"):
            settings[name] = getattr(endpoint, name)
    return settings


async def _master(endpoint: RedisEndpoint, settings: dict[str, Any]) -> tuple[str, int]:
    """What a sentinel that answers calls the master."""
    from redis.asyncio.sentinel import Sentinel

    login = {"username": endpoint.sentinel_username, "password": endpoint.sentinel_password}
    named = {**settings, **login, "ssl": endpoint.tls, "decode_responses": False}
    make: Any = Sentinel
    sentinels = make(endpoint.servers(), sentinel_kwargs=named)
    try:
        host, port = await sentinels.discover_master(endpoint.sentinel)
    finally:
        for one in sentinels.sentinels:
            with contextlib.suppress(Exception):
                await one.aclose()
    return str(host), int(port)


async def _owner(endpoint: RedisEndpoint, key: str, settings: dict[str, Any]) -> tuple[str, int]:
    """The master of the slot that `key` lies in, by the first node that answers."""
    import redis.asyncio as redis
    from redis.crc import key_slot

    slot = key_slot(key.encode())
    trouble: Exception = OSError(errno.EHOSTUNREACH, "no node of the cluster has the slot now")
    login: dict[str, Any] = {"username": endpoint.username, "password": endpoint.password}
    for host, port in endpoint.servers():
        node: Any = redis.Redis(host=host, port=port, ssl=endpoint.tls, **login, **settings)
        node.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
        try:
            for first, last, master, *_ in await node.execute_command("CLUSTER SLOTS"):
                if first <= slot <= last:
                    return master[0].decode() or host, int(master[1])
        except Exception as error:  # noqa: BLE001  the next node may know
            trouble = error
        finally:
            with contextlib.suppress(Exception):
                await node.aclose()
    raise trouble

"""Reaching a Redis or Valkey server: connections, the checks at open, errors with a remedy.

Who calls it: `redis_streams.RedisSource`, `redis_sink.RedisSink`.
What must stay true: redis-py never retries by itself (the transport owns back-off and reports it);
every connection has a finite socket time-out longer than the longest blocking read; passwords never
appear in a message.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as ConnectionFailed

from pipeline.transports.redis.options import RedisOptions

log = structlog.get_logger(__name__)

MIN_VERSION = (6, 2)
"""XAUTOCLAIM, and XTRIM/XADD with `~`, came with Redis 6.2."""
_POOL_WAIT_S = 20.0
_RAW_REPLIES = ("XREADGROUP", "XAUTOCLAIM", "XCLAIM", "XPENDING", "XRANGE")
"""redis-py's own parsing of these differs between its versions; `redis_group` reads them."""


class _Cancellable:
    """Sends without `asyncio.wait_for`, which in Python 3.11 may swallow a cancellation.

    redis-py sends every command through it; a reader that was told to stop then went on to block.
    """

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        if isinstance(command, str):
            command = command.encode()
        chunks = [command] if isinstance(command, bytes) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                await self._send_packed_command(chunks)
        except BaseException as error:
            await self.disconnect(nowait=True)
            if isinstance(error, OSError):  # TimeoutError is one
                raise ConnectionFailed(f"writing to Redis: {type(error).__name__}") from error
            raise


class _PlainConnection(_Cancellable, Connection):
    """TCP."""


class _TlsConnection(_Cancellable, SSLConnection):
    """TLS over TCP."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was found at open: version as text, and one line per notice."""

    version: str
    notices: tuple[str, ...]


def make_client(options: RedisOptions, *, connections: int) -> Any:
    """A `redis.asyncio.Redis` over at most `connections` sockets; connects on first use."""
    settings: dict[str, Any] = {
        "host": options.host,
        "port": options.port,
        "db": options.db,
        "username": options.username,
        "password": options.password,
        "socket_timeout": options.socket_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # one reply shape on every server version
        "connection_class": _TlsConnection if options.tls else _PlainConnection,
    }
    if options.tls:
        settings["ssl_ca_certs"] = options.ssl_cafile
    pool: Any = BlockingConnectionPool(
        max_connections=connections, timeout=_POOL_WAIT_S, **settings
    )
    client: Any = Redis(connection_pool=pool)
    for command in _RAW_REPLIES:
        client.set_response_callback(command, _as_is)
    return client


def _as_is(reply: Any, **_: Any) -> Any:
    return reply


async def close_client(client: Any, bound_s: float) -> None:
    """Disconnect within `bound_s`."""
    try:
        async with asyncio.timeout(bound_s):
            await client.aclose()
            await client.connection_pool.disconnect()
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("redis_close_failed", error=type(error).__name__)


async def ping(client: Any, options: RedisOptions) -> None:
    """Whether the server answers us. Raises `ConnectionError`."""
    try:
        await client.execute_command("PING")
    except (RedisError, OSError, TimeoutError) as error:
        raise ConnectionError(
            f"Redis at {options.address} cannot be used ({type(error).__name__}: {error}): "
            "check that it runs, and the address, user and password"
        ) from None


async def survey(client: Any, options: RedisOptions) -> ServerFacts:
    """Version, eviction policy, stream and group. Raises `ConnectionError` with the remedy."""
    try:
        async with asyncio.timeout(options.connect_timeout_s + options.socket_timeout_s):
            await client.execute_command("PING")
            version = await _check_version(client, options)
            notices = await _eviction_notices(client)
            await create_group(client, options, options.start)
    except AuthenticationError as error:
        raise ConnectionError(
            f"Redis at {options.address} refuses the login ({error}): check user and password"
        ) from None
    except NoPermissionError as error:
        raise ConnectionError(
            f"Redis at {options.address}: {error}: grant this user the stream commands on {options.stream}"
        ) from None
    except ResponseError as error:
        raise ConnectionError(f"Redis at {options.address}: {_explain(error, options)}") from None
    except (RedisError, OSError, TimeoutError) as error:
        raise ConnectionError(
            f"Redis at {options.address} cannot be reached ({type(error).__name__} {error}): "
            "check that the server runs and that host and port are right"
        ) from None
    for notice in notices:
        log.warning("redis_notice", notice=notice, address=options.address)
    return ServerFacts(version, tuple(notices))


def _explain(error: ResponseError, options: RedisOptions) -> str:
    text = str(error)
    if text.startswith("WRONGTYPE"):
        return (
            f"key {options.stream} exists and is no stream: name another stream, or remove the key"
        )
    if "NOAUTH" in text or "WRONGPASS" in text:
        return f"{text}: check user and password"
    if "DB index" in text:
        return f"{text}: lower db ({options.db}), or raise `databases` of the server"
    return text


async def _check_version(client: Any, options: RedisOptions) -> str:
    try:
        info = await client.info("server")
    except NoPermissionError:
        known = await client.execute_command("COMMAND", "INFO", "XAUTOCLAIM")
        if not known or known[0] is None:
            raise ConnectionError(_too_old(options, "unknown")) from None
        return "unknown"
    version = str(info.get("redis_version", "0"))
    if version_of(version) < MIN_VERSION:
        raise ConnectionError(_too_old(options, version))
    return version


def version_of(text: str) -> tuple[int, int]:
    """(major, minor) of a version text; (0, 0) when there is none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _too_old(options: RedisOptions, version: str) -> str:
    wanted = ".".join(map(str, MIN_VERSION))
    return (
        f"Redis at {options.address} is version {version}, which has no XAUTOCLAIM: "
        f"upgrade it to {wanted} or newer, or use Valkey"
    )


async def _eviction_notices(client: Any) -> list[str]:
    try:
        memory = await client.info("memory")
    except NoPermissionError:
        return []
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if not int(memory.get("maxmemory", 0)) or policy == "noeviction":
        return []
    what = "requests and replies" if policy.startswith("allkeys") else "replies (they have a TTL)"
    return [
        f"maxmemory-policy is {policy}: at maxmemory the server may evict {what}; "
        "set maxmemory-policy noeviction"
    ]


async def create_group(client: Any, options: RedisOptions, start: str) -> bool:
    """True when the group was made, False when it was there already."""
    try:
        await client.execute_command(
            "XGROUP", "CREATE", options.stream, options.group, start, "MKSTREAM"
        )
    except ResponseError as error:
        if str(error).startswith("BUSYGROUP"):
            return False
        raise
    return True


def is_nogroup(error: RedisError) -> bool:
    """True when stream or group vanished (FLUSHALL, restart without data, XGROUP DESTROY)."""
    text = str(error)
    return "NOGROUP" in text or text.startswith("UNBLOCKED")

"""Connections to the server, the master behind sentinels, or the nodes of a cluster.

Who calls it: the checks at open, the Redis sources, their sink.
What must stay true: redis-py never retries by itself (the transport owns back-off and reports it);
every connection has a finite socket time-out longer than the longest blocking read; a connection that
is made anew asks anew where the server is, so that it follows a fail-over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

import structlog
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from pipeline.transports.redis.errors import WRONG_SERVER, code_of
from pipeline.transports.redis.options import RedisQueueOptions

log = structlog.get_logger(__name__)

_POOL_WAIT_S = 20.0
_NODE_CONNECTIONS = 8
"""Per node of a cluster; the sink sends over two at a time, and asks for the slots."""
_RAW_REPLIES = ("XREADGROUP", "XAUTOCLAIM", "XCLAIM", "XPENDING", "XRANGE")
"""redis-py's own parsing of these differs between its versions; `group` reads them."""

Locate: TypeAlias = Callable[[], Awaitable[tuple[str, int]]]
"""Host and port of the server that serves us now. Raises `RedisError`, `OSError`, `TimeoutError`."""


class _OfOurs:
    """Goes where `locate` says, packs in one go, and sends without `asyncio.wait_for`.

    In Python 3.11 that may swallow a cancellation. redis-py sends every command through it; a reader
    that was told to stop then went on to block.
    """

    def __init__(self, *, locate: Locate | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._locate = locate

    async def _connect(self: Any) -> None:
        if self._locate is not None:
            self.host, self.port = await self._locate()
        await super()._connect()  # type: ignore[misc]

    def pack_command(self, *args: Any) -> list[bytes]:
        """As redis-py's own, which joins the words one by one; hiredis' takes thirty times as long for long ones."""
        words = [*args[0].split(), *args[1:]]
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            if isinstance(word, bytes):
                data = word
            elif isinstance(word, str | int | float):
                data = str(word).encode()
            else:
                raise TypeError(f"a word of a command is text, bytes or a number, not {type(word)}")
            parts += (b"$%d\r\n" % len(data), data, b"\r\n")
        return [b"".join(parts)]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        """As redis-py's own."""
        return [b"".join([self.pack_command(*command)[0] for command in commands])]

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
                raise _failed_write(error) from error
            raise


async def call_all(client: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """What the server answers to each, an error in its place. Raises `RedisError`, `OSError`, `TimeoutError`.

    A pipeline of redis-py without a transaction; of `make_client` without that one's 60 calls on the way.
    """
    if isinstance(client, RedisCluster):
        async with client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(await pipe.execute(raise_on_error=False))
    pool = client.connection_pool
    connection = await pool.get_connection()
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        answers: list[Any] = []
        for _ in commands:
            try:
                answers.append(await connection.read_response())
            except ResponseError as error:
                answers.append(error)
        return answers
    finally:
        await pool.release(connection)


def _failed_write(error: OSError) -> RedisError:
    from redis.exceptions import ConnectionError as ConnectionFailed

    return ConnectionFailed(f"writing to Redis: {type(error).__name__}")


class _PlainConnection(_OfOurs, Connection):
    """TCP."""


class _TlsConnection(_OfOurs, SSLConnection):
    """TLS over TCP."""


def make_client(options: RedisQueueOptions, *, connections: int) -> Any:
    """A `redis.asyncio.Redis` over at most `connections` sockets; connects on first use.

    Of a cluster it reaches the node that has the requests, of a service behind sentinels the master.
    """
    pool: Any = BlockingConnectionPool(
        max_connections=connections,
        timeout=_POOL_WAIT_S,
        connection_class=_TlsConnection if options.tls else _PlainConnection,
        host=options.host,
        port=options.port,
        db=options.db,
        retry=Retry(NoBackoff(), 0),
        locate=_locator(options),
        **_login(options),
        **_sockets(options),
    )
    client: Any = Redis(connection_pool=pool)
    for command in _RAW_REPLIES:
        client.set_response_callback(command, _as_is)
    return client


def make_writer(options: RedisQueueOptions, *, connections: int) -> Any:
    """As `make_client`, but of a cluster it reaches every node: a `RedisCluster`."""
    if not options.cluster:
        return make_client(options, connections=connections)
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in options.servers()],
        require_full_coverage=False,
        max_connections=_NODE_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
        ssl=options.tls,
        **_login(options),
        **_sockets(options),
    )


def _as_is(reply: Any, **_: Any) -> Any:
    return reply


def _login(options: RedisQueueOptions) -> dict[str, Any]:
    return {"username": options.username, "password": options.password}


def _sockets(options: RedisQueueOptions) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "socket_timeout": options.socket_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "socket_keepalive": True,
        "protocol": 2,  # one reply shape on every server version
    }
    if options.tls:
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"):
            settings[name] = getattr(options, name)
    return settings


# --- where the server is ------------------------------------------------------------------------


def _locator(options: RedisQueueOptions) -> Locate | None:
    if options.sentinel is not None:
        return lambda: _master(options)
    if options.cluster:
        return lambda: _owner(options, options.requests)
    return None


async def _master(options: RedisQueueOptions) -> tuple[str, int]:
    """What a sentinel that answers calls the master."""
    bound_s = options.connect_timeout_s
    settings = _sockets(options) | {"socket_timeout": bound_s, "retry": Retry(NoBackoff(), 0)}
    settings |= {"username": options.sentinel_username, "password": options.sentinel_password}
    make: Any = Sentinel  # its constructor has no types
    sentinels = make(options.servers(), sentinel_kwargs={**settings, "ssl": options.tls})
    try:
        host, port = await sentinels.discover_master(str(options.sentinel))
    except MasterNotFoundError:
        text = f"no sentinel that answers has a master of the name {options.sentinel}"
        raise OSError(errno.EHOSTUNREACH, text) from None
    finally:
        await _close(sentinels)
    return str(host), int(port)


async def _owner(options: RedisQueueOptions, key: str) -> tuple[str, int]:
    """The master of the slot that `key` lies in, by the first node that answers."""
    slot, trouble = key_slot(key.encode()), None
    for host, port in options.servers():
        settings = _login(options) | _sockets(options) | {"ssl": options.tls}
        node: Any = Redis(host=host, port=port, retry=Retry(NoBackoff(), 0), **settings)
        node.set_response_callback("CLUSTER SLOTS", _as_is)
        try:
            ranges = await node.execute_command("CLUSTER SLOTS")
        except (RedisError, OSError, TimeoutError) as error:
            trouble = error
            continue
        finally:
            await _close(node)
        for first, last, master, *_ in ranges:
            if first <= slot <= last:
                return master[0].decode() or host, int(master[1])
    if trouble is not None:
        raise trouble
    raise OSError(errno.EHOSTUNREACH, "no node of the cluster has the slot of the requests now")


async def _close(client: Any) -> None:
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        await client.aclose()


# --- when it fails ------------------------------------------------------------------------------


async def close_client(client: Any, bound_s: float) -> None:
    """Disconnect within `bound_s`."""
    try:
        async with asyncio.timeout(bound_s):
            await client.aclose()
            if not isinstance(client, RedisCluster):
                await client.connection_pool.disconnect()
    except (RedisError, OSError, TimeoutError) as error:
        log.warning("redis_close_failed", error=type(error).__name__)


async def reconnect_if_wrong(client: Any, error: BaseException) -> None:
    """Drop the idle connections when the server behind them is not the one that serves us now.

    The next command connects anew: to whatever the name, the sentinels or the proxy lead to after a
    fail-over, with the login checked again. Of a cluster the slots are read again.
    """
    wrong = code_of(error) in WRONG_SERVER
    if not isinstance(client, RedisCluster):
        if wrong:
            await client.connection_pool.disconnect(inuse_connections=False)
    elif wrong or not code_of(error):
        await client.nodes_manager.initialize()

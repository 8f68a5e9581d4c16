"""The checks of a Redis or Valkey server at open, and errors with a remedy.

Who calls it: the Redis sources and their sink.
What must stay true: what a server lacks is named before anything is taken from it; looking leaves no
trace; passwords never appear in a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from pipeline.transports.redis.errors import WRONG_SERVER, code_of, describe
from pipeline.transports.redis.options import RedisOptions, RedisQueueOptions
from pipeline.transports.redis.rights import (
    Need,
    missing_rights,
    sink_commands,
    stream_commands,
)

log = structlog.get_logger(__name__)

MIN_VERSION = (6, 2)
"""XAUTOCLAIM, and XTRIM/XADD with `~`, came with Redis 6.2."""


class _Unusable(ConnectionError):
    """The server answers and cannot serve us; the message is ours."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was found at open: version as text, and one line per notice."""

    version: str
    notices: tuple[str, ...]


async def survey(client: Any, options: RedisOptions) -> ServerFacts:
    """As `inspect`, and the group made. Raises `ConnectionError` with the remedy."""
    facts = await inspect(client, options, stream_commands(options), tell=True)
    with explained(options):
        async with asyncio.timeout(options.socket_timeout_s):
            await create_group(client, options, options.start)
    return facts


async def inspect(
    client: Any, options: RedisQueueOptions, needs: list[Need], *, tell: bool
) -> ServerFacts:
    """Version, rights, eviction policy, and whether the key is what it should be; creates nothing.

    needs: what the source does there. tell: log the notices. Raises `ConnectionError` with the remedy.
    """
    with explained(options):
        async with asyncio.timeout(options.connect_timeout_s + options.socket_timeout_s):
            facts = await _inspect(client, options, needs)
            kind = (await client.execute_command("TYPE", options.requests)).decode()
    if kind not in ("none", options.key_type):
        raise ConnectionError(_other_type(options))
    for notice in facts.notices if tell else ():
        log.warning("redis_notice", notice=notice, address=options.address)
    return facts


@contextlib.contextmanager
def explained(options: RedisQueueOptions) -> Iterator[None]:
    """What fails inside is a `ConnectionError` with a remedy."""
    try:
        yield
    except _Unusable:
        raise
    except (RedisError, OSError, TimeoutError) as error:
        raise ConnectionError(_remedy(error, options)) from None


async def _inspect(client: Any, options: RedisQueueOptions, needs: list[Need]) -> ServerFacts:
    await client.execute_command("PING")
    version = await _check_version(client, options)
    try:
        missing = await missing_rights(client, [*needs, *sink_commands(options)])
    except RedisError as error:
        if code_of(error) != "NOPERM":
            raise
        missing = ["eval (replies are written by a script)"]
    if missing:
        raise _Unusable(
            f"Redis at {options.address}: this user may not run {'; '.join(missing)}: grant it what "
            "docs/delivery.md lists"
        )
    return ServerFacts(version, tuple(await _eviction_notices(client)))


def _remedy(error: Exception, options: RedisQueueOptions) -> str:
    where, code = f"Redis at {options.address}", code_of(error)
    if code in ("NOAUTH", "WRONGPASS"):
        return f"{where} refuses the login ({describe(error)}): check user and password"
    if code == "NOPERM":
        return f"{where}: {describe(error)}: grant this user the commands that docs/delivery.md lists, on {options.requests}"
    if code == "WRONGTYPE":
        return _other_type(options)
    if "DB index" in str(error):
        return f"{where} has no database {options.db}: lower db, or raise `databases` of the server"
    if "cluster support disabled" in str(error):
        return f"{where} is no cluster: take cluster=true out of the address"
    if code in WRONG_SERVER:
        return f"{where} takes no writes now ({code}): name the server that does, or wait until it does"
    if isinstance(error, ResponseError):
        return f"{where}: {describe(error)}"
    return (
        f"{where} cannot be reached: {describe(error)}: check that the server runs and that host and "
        "port are right"
    )


def _other_type(options: RedisQueueOptions) -> str:
    return (
        f"Redis at {options.address}: key {options.requests} exists and is no {options.key_type}: name "
        f"another {options.key_type}, or remove the key"
    )


async def _check_version(client: Any, options: RedisQueueOptions) -> str:
    try:
        info = await client.info("server")
    except NoPermissionError:
        return await _version_unknown(client, options)
    version = str(info.get("redis_version", "0"))
    if version_of(version) < MIN_VERSION:
        raise _Unusable(_too_old(options, version))
    if info.get("redis_mode") == "cluster" and not options.cluster:
        raise _Unusable(
            f"Redis at {options.address} is a node of a cluster: add cluster=true to the address, or "
            "name a server with cluster-enabled no"
        )
    return version


async def _version_unknown(client: Any, options: RedisQueueOptions) -> str:
    """Without the right to ask: a server that is too old does not know the command at all."""
    try:
        await client.execute_command("XAUTOCLAIM")  # too few arguments: does nothing
    except ResponseError as error:
        if "unknown command" in str(error):
            raise _Unusable(_too_old(options, "unknown")) from None
    return "unknown"


def version_of(text: str) -> tuple[int, int]:
    """(major, minor) of a version text; (0, 0) when there is none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _too_old(options: RedisQueueOptions, version: str) -> str:
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
        if code_of(error) == "BUSYGROUP":
            return False
        raise
    return True


def is_nogroup(error: RedisError) -> bool:
    """True when stream or group vanished (FLUSHALL, restart without data, XGROUP DESTROY)."""
    return code_of(error) in ("NOGROUP", "UNBLOCKED")

"""What `embedstream check` tries on a Redis or Valkey server: everything that `serve` needs.

Who calls it: the registry; `redis_list/reach.py` for lists.
What must stay true: no key, group or consumer is made or changed.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import NoPermissionError

from actors.ports import NoMetrics
from pipeline.transports.redis.client import explained, inspect
from pipeline.transports.redis.connect import close_client, make_client, make_writer
from pipeline.transports.redis.options import STREAM_PREFIX, RedisOptions, RedisQueueOptions
from pipeline.transports.redis.rights import Need, stream_commands
from pipeline.transports.redis.sink import open_sink


async def reach(options: RedisOptions, *, place: str | None = None) -> tuple[str, ...]:
    """As `registry.reach`. Raises `ConnectionError` as `try_server`."""
    nothing = ("XACK", options.stream, options.group, "0-1")
    return await try_server(options, stream_commands(options), nothing, place)


async def try_server(
    options: RedisQueueOptions, needs: list[Need], nothing: tuple[str, ...], place: str | None
) -> tuple[str, ...]:
    """Notices about a server that serves us.

    Args:
        needs: what the source does there. nothing: a write that changes nothing, which a replica or a
            server without its disk refuses.
        place: a list or stream that is only written; None: all that a source and the sink beside it use.

    Raises:
        ConnectionError: no server, no right, no writes, or a key of another type; one line.
    """
    notices: tuple[str, ...] = ()
    if place is None:
        client = make_client(options, connections=1)
        try:
            notices = (await inspect(client, options, needs, tell=False)).notices
            with explained(options):
                await client.execute_command(*nothing)
        finally:
            await close_client(client, options.close_timeout_s)
        place = STREAM_PREFIX + options.dead_letter_stream
    wanted, _, name = place.partition(":")
    writer = make_writer(options, connections=1)
    try:
        found = await _type_of(writer, options, name)
    finally:
        await close_client(writer, options.close_timeout_s)
    if found not in ("none", wanted):
        raise ConnectionError(
            f"Redis at {options.address}: key {name} exists and is no {wanted} but a {found}: name "
            "another, or remove the key"
        )
    sink = await open_sink(options, beside=None, metrics=NoMetrics())  # only looks
    await sink.aclose()
    return notices


async def _type_of(client: Any, options: RedisQueueOptions, name: str) -> str:
    with explained(options):
        try:
            found: str = (await client.execute_command("TYPE", name)).decode()
        except NoPermissionError:
            return "none"  # what the sink lacks, the sink says
    return found

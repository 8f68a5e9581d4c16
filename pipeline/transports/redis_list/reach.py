"""What `embedstream check` tries where requests are pushed to a list: everything that `serve` needs.

Who calls it: the registry.
What must stay true: as in `redis/reach.py`.
"""

from __future__ import annotations

from pipeline.transports.redis.reach import try_server
from pipeline.transports.redis_list.options import RedisListOptions
from pipeline.transports.redis_list.source import needs_of


async def reach(options: RedisListOptions, *, place: str | None = None) -> tuple[str, ...]:
    """As `registry.reach`. Raises `ConnectionError` as `try_server`."""
    nothing = ("LREM", options.processing("check"), "0", "x")
    return await try_server(options, needs_of(options), nothing, place)

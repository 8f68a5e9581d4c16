"""A plain redis-py client beside the transport: adds requests, reads replies and pending lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis

from pipeline.transports.redis.options import RedisOptions
from tests.support.servers import ServerInfo, unique


class RedisHarness:
    """Unique stream and group on a shared server. Close with `aclose`."""

    tombstones = False
    headers = True

    def __init__(self, server: ServerInfo) -> None:
        self.server = server
        self.host, _, port = server.address.rpartition(":")
        self.port = int(port)
        self.stream = unique("embedstream.requests")
        self.group = unique("group")
        self.dead_letters = unique("embedstream.dead-letters")
        self.redis: Any = Redis(host=self.host, port=self.port)
        self.bad_destinations = [
            f"stream:{self.stream}",
            f"list:{self.stream}",
            "embedstream.x",
            "list:other",
            "list:",
            "stream:embedstream.a\x00",
            "list:embedstream." + "x" * 250,
            f"list:{self.dead_letters}",
            "",
        ]

    def options(self, **overrides: Any) -> RedisOptions:
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "stream": self.stream,
            "group": self.group,
            "dead_letter_stream": self.dead_letters,
            "block_ms": 200,
            "release_backoff_ms": 5,
            "max_record_bytes": 300_000,
            **overrides,
        }
        return RedisOptions(**settings)

    async def produce(
        self, body: bytes | None, headers: Mapping[str, bytes] | None = None, key: str | None = None
    ) -> None:
        fields: dict[str, bytes] = dict(headers or {})
        if body is not None:
            fields["data"] = body
        await self.redis.xadd(self.stream, fields)

    def reply_destination(self) -> str:
        return "list:" + unique("embedstream.reply")

    async def replies(self, destination: str, done: Callable[[list[bytes]], bool]) -> list[bytes]:
        found: list[bytes] = await self.redis.lrange(destination.removeprefix("list:"), 0, -1)
        assert done(found), "a publish that returned is readable at once"
        return found

    async def unsettled(self) -> int:
        length: int = await self.redis.xlen(self.stream)
        return length

    async def aclose(self) -> None:
        await self.redis.aclose()

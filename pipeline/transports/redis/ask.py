"""Ask a running service over Redis.

Who calls it: the registry.
What must stay true: as in `pipeline.transports.ask`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from redis.exceptions import RedisError

from pipeline.transports.ask import MAX_CONCURRENT, Parts, ask_headers, reply_record
from pipeline.transports.redis.client import close_client, make_client, ping
from pipeline.transports.redis.options import DATA_FIELD, LIST_PREFIX, REPLY_LIST, RedisOptions
from schemas.errors import ContentType
from schemas.results import FailureReply, Reply

_BLOCK_S = 1.0  # one BLPOP; far below any socket time-out


async def open_asker(options: RedisOptions, *, timeout_s: float) -> RedisAsker:
    """Connected. Raises `ConnectionError`."""
    options = msgspec.structs.replace(
        options,
        socket_timeout_s=max(options.socket_timeout_s, 2 * _BLOCK_S),
        connect_timeout_s=min(options.connect_timeout_s, timeout_s),
    )
    asker = RedisAsker(options, make_client(options, connections=MAX_CONCURRENT + 1))
    try:
        await ping(asker.client, options)
    except BaseException:
        await asker.aclose()
        raise
    return asker


class RedisAsker:
    """XADD to the request stream, BLPOP on a reply list of its own per question."""

    def __init__(self, options: RedisOptions, client: Any) -> None:
        self._options = options
        self.client = client
        self.unknown_replies = 0

    async def run(self) -> None:
        """Nothing to do: every question reads its own list."""

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        key = f"{REPLY_LIST}{request_id}"
        headers = ask_headers(request_id, content_type, LIST_PREFIX + key, timeout_s)
        parts = Parts()
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.xadd(self._options.stream, {DATA_FIELD: body, **headers})
                while True:
                    popped = await self.client.blpop([key], timeout=_BLOCK_S)
                    if popped is None:
                        continue
                    record = reply_record(popped[1])
                    if record is None or record.id != request_id:
                        self.unknown_replies += 1
                    elif (whole := parts.add(record)) is not None:
                        return whole
        except TimeoutError:
            raise TimeoutError(
                f"no reply within {timeout_s:g} s from stream {self._options.stream} at "
                f"{self._options.address}: {await self._why_silent()}"
            ) from None
        except RedisError as error:
            raise ConnectionError(
                f"Redis at {self._options.address} failed ({type(error).__name__}): "
                "check that it still runs, and ask again"
            ) from None

    async def _why_silent(self) -> str:
        """What a person should look at: nobody listens, or somebody is busy."""
        with contextlib.suppress(TimeoutError, RedisError):
            async with asyncio.timeout(2.0):
                groups = await self.client.xinfo_groups(self._options.stream)
            if not any(group["consumers"] for group in groups):
                return "no service reads that stream; start one with `embedstream serve`"
        return "ask again with a longer --timeout, or look at the service's log"

    async def aclose(self) -> None:
        """Disconnect, in bounded time."""
        await close_client(self.client, self._options.close_timeout_s)

"""Ask a running service over its own broker, through the light client.

Who calls it: `kafka/ask.py` and `redis/ask.py`, which the registry opens for `--via`.
What must stay true: records go out and come back as they are, so that the caller's own codec has the
last word; failures to reach the broker are `ConnectionError`s of one line that end in the remedy.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from schemas.codec import decode_reply, join_parts
from schemas.errors import ContentType
from schemas.results import FailureReply, Reply

if TYPE_CHECKING:
    from embedstream_client import AsyncClient, KafkaEndpoint, RedisEndpoint


class Asker:
    """One client of a service. Closed by `aclose`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        """Send one record and wait for its reply, parts joined.

        The record's own id must be `request_id`, and no other question in flight may have it.

        Raises:
            TimeoutError: no complete reply in time.
            ConnectionError: the broker refuses us.
        """
        bodies = await self._client.ask(
            body, request_id=request_id, content_type=content_type, timeout=timeout_s
        )
        replies = [decode_reply(record) for record in bodies]
        if isinstance(replies[0], FailureReply):
            return replies[0]
        return join_parts([reply for reply in replies if isinstance(reply, Reply)])

    async def aclose(self) -> None:
        """Disconnect, in bounded time."""
        await self._client.aclose()


async def connect(endpoint: RedisEndpoint | KafkaEndpoint, *, timeout_s: float) -> Asker:
    """An asker of the service behind `endpoint`. Raises `ConnectionError`."""
    from embedstream_client import AsyncClient

    client = AsyncClient(endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            await client.ping()
    except TimeoutError:
        await client.aclose()
        raise ConnectionError(
            f"{endpoint.address} gave no answer within {timeout_s:g} s: check that it runs"
        ) from None
    except BaseException:
        await client.aclose()
        raise
    return Asker(client)

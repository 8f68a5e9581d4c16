"""Many items as few requests: cutting, keeping the order, bounding what is in flight.

Who calls it: `embed_many` of both clients, and the adapters through it.
What must stay true: memory is bounded by `in_flight` batches whatever the length of the input; the
order of the input is kept; no task outlives the generator that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import msgspec

from .errors import EmbedstreamError
from .results import Embedding, Embeddings

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

BATCH_ITEMS = 64
IN_FLIGHT = 8
_BATCH_BYTES = 512 * 1024
"""A batch closes at this size: half of the largest record that Kafka takes by default."""


def size_bytes(item: object) -> int:
    """About how many bytes an item takes in a record."""
    if isinstance(item, str):
        return 3 * len(item)
    if isinstance(item, bytes):
        return len(item)
    if isinstance(item, Mapping):
        return sum(map(size_bytes, item.values()))
    return 5 * len(item) if hasattr(item, "__len__") else 8


class Cutter:
    """Collects items until a batch is full."""

    def __init__(self, batch_items: int) -> None:
        if batch_items < 1:
            raise ValueError("batch_items must be 1 or more")
        self._batch_items = batch_items
        self._held: list[Any] = []
        self._bytes = 0

    def add(self, item: Any) -> list[Any] | None:
        """The batch that this item completed or did not fit into."""
        size = size_bytes(item)
        full = None
        if self._held and self._bytes + size > _BATCH_BYTES:
            full = self.rest()
        self._held.append(item)
        self._bytes += size
        if full is None and len(self._held) >= self._batch_items:
            return self.rest()
        return full

    def rest(self) -> list[Any]:
        held, self._held, self._bytes = self._held, [], 0
        return held


def cut(items: Iterable[ItemT], batch_items: int) -> Iterator[list[ItemT]]:
    cutter = Cutter(batch_items)
    for item in items:
        if (full := cutter.add(item)) is not None:
            yield full
    if rest := cutter.rest():
        yield rest


async def batches(
    items: Iterable[ItemT] | AsyncIterable[ItemT], batch_items: int
) -> AsyncIterator[list[ItemT]]:
    if isinstance(items, AsyncIterable):
        cutter = Cutter(batch_items)
        async for item in items:
            if (full := cutter.add(item)) is not None:
                yield full
        if rest := cutter.rest():
            yield rest
        return
    for batch in cut(items, batch_items):
        yield batch


async def in_order(
    parts: AsyncIterator[ItemT],
    work: Callable[[ItemT], Coroutine[Any, Any, ResultT]],
    in_flight: int,
) -> AsyncIterator[ResultT]:
    """`work` of every part, in the order of the parts, at most `in_flight` at once."""
    if in_flight < 1:
        raise ValueError("in_flight must be 1 or more")
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(in_flight)
    started: asyncio.Queue[asyncio.Task[ResultT] | None] = asyncio.Queue()  # bounded by room
    running: set[asyncio.Task[ResultT]] = set()

    async def produce() -> None:
        try:
            async for part in parts:
                await room.acquire()
                task = loop.create_task(work(part))
                running.add(task)
                started.put_nowait(task)
        finally:
            started.put_nowait(None)

    producer = loop.create_task(produce(), name="embedstream-client-embed-many")
    try:
        while (task := await started.get()) is not None:
            result = await task
            running.discard(task)
            room.release()
            yield result
        await producer
    finally:
        left: list[asyncio.Task[Any]] = [producer, *running]
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def embed_each(
    embed: Callable[[list[Any]], Awaitable[Embeddings]], batch: list[Any]
) -> list[Embedding]:
    """One embedding per item of the batch. When the request was refused because of some items, those
    fail and the others are asked for again."""
    left = list(range(len(batch)))
    found: dict[int, Embedding] = {}
    while left:
        embedded, refused = await _embed_or_refused(embed, [batch[i] for i in left])
        if refused is None:
            found.update(zip(left, embedded, strict=True))
            break
        guilty = {left[i] for i in refused.items if 0 <= i < len(left)}
        if not guilty:
            raise refused
        found.update({i: Embedding.failed(i, refused) for i in guilty})
        left = [i for i in left if i not in guilty]
    return [found[i] for i in range(len(batch))]


async def _embed_or_refused(
    embed: Callable[[list[Any]], Awaitable[Embeddings]], items: list[Any]
) -> tuple[Sequence[Embedding], EmbedstreamError | None]:
    try:
        return await embed(items), None
    except EmbedstreamError as error:
        return (), error


def at(embedding: Embedding, index: int) -> Embedding:
    """The same outcome under its index in the whole input."""
    return Embedding(msgspec.structs.replace(embedding.item, index=index), embedding.dtype)

"""What the adapters share: one blocking client for their blocking and their async methods.

Who calls it: `langchain`, `llama_index`, `haystack`, `sentence_transformers`.
What must stay true: async methods never block their event loop, and may be called from any number of
loops: the client's own thread does the work; a cancelled call is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ._async import TIMEOUT_S, AsyncClient
from ._sync import Client
from .results import Ranking

ResultT = TypeVar("ResultT")
DEFAULT_URL = "redis://localhost:6379"


def client_of(url: str, client: Client | None, timeout: float) -> Client:
    """The given client, or one of its own for `url`."""
    return Client.from_url(url, timeout=timeout) if client is None else client


def given(**options: Any) -> dict[str, Any]:
    """Options that were set."""
    return {name: value for name, value in options.items() if value is not None}


def numbers(vector: Any) -> list[float]:
    """A vector as plain floats, with numpy or without."""
    return vector.tolist() if hasattr(vector, "tolist") else list(vector)


async def wait(
    client: Client, work: Callable[[AsyncClient], Coroutine[Any, Any, ResultT]]
) -> ResultT:
    """The result of `work`, done in the client's thread."""
    return await asyncio.wrap_future(client.submit(work))


def embed_one(
    text: str, options: Mapping[str, Any]
) -> Callable[[AsyncClient], Coroutine[Any, Any, list[float]]]:
    """Work: the vector of one text."""

    async def work(client: AsyncClient) -> list[float]:
        return numbers((await client.embed(text, **options)).vector)

    return work


def embed_all(
    texts: Sequence[str], options: Mapping[str, Any]
) -> Callable[[AsyncClient], Coroutine[Any, Any, list[list[float]]]]:
    """Work: vectors of any number of texts. Raises the error of the first that failed."""

    async def work(client: AsyncClient) -> list[list[float]]:
        many = client.embed_many(texts, **options)
        return [numbers(embedding.vector) async for embedding in many]

    return work


def rank(
    query: str, texts: Sequence[str], options: Mapping[str, Any]
) -> Callable[[AsyncClient], Coroutine[Any, Any, Ranking]]:
    """Work: the ranking of the texts."""

    async def work(client: AsyncClient) -> Ranking:
        return await client.rerank(query, texts, **options)

    return work


__all__ = [
    "DEFAULT_URL",
    "TIMEOUT_S",
    "client_of",
    "embed_all",
    "embed_one",
    "given",
    "numbers",
    "rank",
    "wait",
]

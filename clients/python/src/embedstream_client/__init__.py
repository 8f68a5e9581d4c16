"""Ask an embedstream service for vectors, rankings, scores and labels, over Redis or Kafka.

    from embedstream_client import AsyncClient

    client = AsyncClient.from_url("redis://localhost:6379")
    ranking = await client.rerank("what is a deadlock?", documents)

`Client` is the same for code without asyncio. Nothing of the service is needed, and no torch; broker
clients are extras: `embedstream-client[redis]`, `embedstream-client[kafka]`.
"""

from __future__ import annotations

from ._async import AsyncClient
from ._sync import Client
from ._urls import KafkaEndpoint, RedisEndpoint, parse_url
from .errors import EmbedstreamError, NoReply, Unreachable
from .results import (
    Classification,
    Classifications,
    Embedding,
    Embeddings,
    Ranked,
    Ranking,
    Score,
    Scores,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Classification",
    "Classifications",
    "Client",
    "Embedding",
    "Embeddings",
    "EmbedstreamError",
    "KafkaEndpoint",
    "NoReply",
    "Ranked",
    "Ranking",
    "RedisEndpoint",
    "Score",
    "Scores",
    "Unreachable",
    "__version__",
    "parse_url",
]

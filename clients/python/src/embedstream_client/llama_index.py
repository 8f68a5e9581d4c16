"""LlamaIndex: an embedding and a reranker (`embedstream-client[llama-index]`).

from embedstream_client.llama_index import EmbedstreamEmbedding, EmbedstreamRerank

Settings.embed_model = EmbedstreamEmbedding(url="redis://localhost:6379")
engine = index.as_query_engine(node_postprocessors=[EmbedstreamRerank(top_n=3)])
"""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from . import _adapter
from ._sync import Client
from ._wire.requests import Truncate
from .results import Ranking

__all__ = ["EmbedstreamEmbedding", "EmbedstreamRerank"]


class EmbedstreamEmbedding(BaseEmbedding):
    """Embeddings of a service.

    `model_name` is the service's name of a model, empty for its choice; `query_prompt_name` and
    `text_prompt_name` are prompts of the model folder.
    """

    url: str = Field(default=_adapter.DEFAULT_URL, repr=False, exclude=True)  # may hold a password
    client: Any = Field(default=None, repr=False, exclude=True)
    model_name: str = ""
    dimensions: int | None = None
    truncate: Truncate | None = None
    query_prompt_name: str | None = None
    text_prompt_name: str | None = None
    timeout: float = _adapter.TIMEOUT_S
    _client: Client = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._client = _adapter.client_of(self.url, self.client, self.timeout)

    @classmethod
    def class_name(cls) -> str:
        return "EmbedstreamEmbedding"

    def _options(self, prompt_name: str | None) -> dict[str, Any]:
        return _adapter.given(
            model=self.model_name or None,
            dimensions=self.dimensions,
            truncate=self.truncate,
            prompt_name=prompt_name,
        )

    def _get_query_embedding(self, query: str) -> list[float]:
        work = _adapter.embed_one(query, self._options(self.query_prompt_name))
        return self._client.submit(work).result()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        work = _adapter.embed_one(query, self._options(self.query_prompt_name))
        return await _adapter.wait(self._client, work)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aget_text_embeddings([text]))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        work = _adapter.embed_all(texts, self._options(self.text_prompt_name))
        return self._client.submit(work).result()

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        work = _adapter.embed_all(texts, self._options(self.text_prompt_name))
        return await _adapter.wait(self._client, work)


class EmbedstreamRerank(BaseNodePostprocessor):
    """Keeps the nodes that answer the query best, best first, with the reranker's scores."""

    url: str = Field(default=_adapter.DEFAULT_URL, repr=False, exclude=True)  # may hold a password
    client: Any = Field(default=None, repr=False, exclude=True)
    model: str | None = None
    top_n: int | None = 3
    instruction: str | None = None
    truncate: Truncate | None = None
    timeout: float = _adapter.TIMEOUT_S
    _client: Client = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._client = _adapter.client_of(self.url, self.client, self.timeout)

    @classmethod
    def class_name(cls) -> str:
        return "EmbedstreamRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("a reranker needs the query: pass query_bundle or query_str")
        if not nodes:
            return []
        return _chosen(nodes, self._client.submit(self._work(nodes, query_bundle)).result())

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("a reranker needs the query: pass query_bundle or query_str")
        if not nodes:
            return []
        return _chosen(nodes, await _adapter.wait(self._client, self._work(nodes, query_bundle)))

    def _work(self, nodes: list[NodeWithScore], query: QueryBundle) -> Any:
        options = _adapter.given(
            model=self.model,
            top_n=self.top_n,
            instruction=self.instruction,
            truncate=self.truncate,
        )
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        return _adapter.rank(query.query_str, texts, options)


def _chosen(nodes: list[NodeWithScore], ranking: Ranking) -> list[NodeWithScore]:
    return [NodeWithScore(node=nodes[ranked.index].node, score=ranked.score) for ranked in ranking]

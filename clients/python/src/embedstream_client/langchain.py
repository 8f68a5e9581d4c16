"""LangChain: `Embeddings` and a document compressor (`embedstream-client[langchain]`).

from embedstream_client.langchain import EmbedstreamEmbeddings, EmbedstreamReranker

store = InMemoryVectorStore(EmbedstreamEmbeddings("redis://localhost:6379"))
best = EmbedstreamReranker(url="redis://localhost:6379", top_n=3).compress_documents(found, query)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from pydantic import ConfigDict, Field, PrivateAttr

from . import _adapter
from ._sync import Client
from ._wire.requests import Truncate
from .results import Ranking

__all__ = ["EmbedstreamEmbeddings", "EmbedstreamReranker"]


class EmbedstreamEmbeddings(Embeddings):
    """Embeddings of a service.

    Args:
        url: where the service's broker is; `client` may be given instead.
        model, dimensions, truncate: as in the wire contract; None is the service's choice.
        query_prompt_name, document_prompt_name: prompts of the model folder, where it has them.
        timeout: seconds that one request may take.
    """

    def __init__(
        self,
        url: str = _adapter.DEFAULT_URL,
        *,
        client: Client | None = None,
        model: str | None = None,
        dimensions: int | None = None,
        truncate: Truncate | None = None,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        timeout: float = _adapter.TIMEOUT_S,
    ) -> None:
        self.client = _adapter.client_of(url, client, timeout)
        common = _adapter.given(model=model, dimensions=dimensions, truncate=truncate)
        self._query = common | _adapter.given(prompt_name=query_prompt_name)
        self._document = common | _adapter.given(prompt_name=document_prompt_name)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text, in their order, however many there are."""
        return self.client.submit(_adapter.embed_all(texts, self._document)).result()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        return self.client.submit(_adapter.embed_one(text, self._query)).result()

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As `embed_documents`."""
        return await _adapter.wait(self.client, _adapter.embed_all(texts, self._document))

    async def aembed_query(self, text: str) -> list[float]:
        """As `embed_query`."""
        return await _adapter.wait(self.client, _adapter.embed_one(text, self._query))


class EmbedstreamReranker(BaseDocumentCompressor):
    """Keeps the documents that answer the query best, best first, each with its `relevance_score` in
    the metadata."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    url: str = Field(default=_adapter.DEFAULT_URL, repr=False, exclude=True)  # may hold a password
    client: Client | None = Field(default=None, repr=False, exclude=True)
    model: str | None = None
    top_n: int | None = 3
    instruction: str | None = None
    truncate: Truncate | None = None
    timeout: float = _adapter.TIMEOUT_S
    _client: Client = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        self._client = _adapter.client_of(self.url, self.client, self.timeout)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The best documents, copies that carry their score."""
        if not documents:
            return []
        return _chosen(documents, self._client.submit(self._work(documents, query)).result())

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """As `compress_documents`."""
        if not documents:
            return []
        return _chosen(documents, await _adapter.wait(self._client, self._work(documents, query)))

    def _work(self, documents: Sequence[Document], query: str) -> Any:
        options = _adapter.given(
            model=self.model,
            top_n=self.top_n,
            instruction=self.instruction,
            truncate=self.truncate,
        )
        return _adapter.rank(query, [document.page_content for document in documents], options)


def _chosen(documents: Sequence[Document], ranking: Ranking) -> list[Document]:
    return [
        documents[ranked.index].model_copy(
            update={
                "metadata": {**documents[ranked.index].metadata, "relevance_score": ranked.score}
            }
        )
        for ranked in ranking
    ]

"""Haystack: embedders for texts and documents, and a ranker (`embedstream-client[haystack]`).

    from embedstream_client.haystack import EmbedstreamDocumentEmbedder, EmbedstreamRanker

    pipeline.add_component("ranker", EmbedstreamRanker(Secret.from_env_var("EMBEDSTREAM_URL")))

Components are written to YAML: an address with a password is given as a `Secret`, so that the file
names the variable and not the password.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import urlsplit

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.utils import Secret, deserialize_secrets_inplace

from . import _adapter
from ._sync import Client
from ._wire.requests import Truncate
from .results import Ranking

__all__ = ["EmbedstreamDocumentEmbedder", "EmbedstreamRanker", "EmbedstreamTextEmbedder"]


class _Component:
    """Address, client and (de)serialisation, which all three share."""

    _parameters: tuple[str, ...] = ()

    def _connect(self, url: str | Secret, client: Client | None, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        address = url.resolve_value() if isinstance(url, Secret) else url
        self._client = _adapter.client_of(address or _adapter.DEFAULT_URL, client, timeout)

    def to_dict(self) -> dict[str, Any]:
        """For pipelines that are saved. Raises `ValueError` for a password in plain text."""
        if isinstance(self.url, str) and urlsplit(self.url).password is not None:
            raise ValueError("the address holds a password: give it as Secret.from_env_var(...)")
        url = self.url.to_dict() if isinstance(self.url, Secret) else self.url
        own = {name: getattr(self, name) for name in self._parameters}
        return default_to_dict(self, url=url, timeout=self.timeout, **own)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The inverse of `to_dict`."""
        if isinstance(data["init_parameters"].get("url"), dict):
            deserialize_secrets_inplace(data["init_parameters"], keys=["url"])
        return default_from_dict(cls, data)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


@component
class EmbedstreamTextEmbedder(_Component):
    """The vector of a text, such as a query."""

    _parameters = ("model", "dimensions", "truncate", "prompt_name")

    def __init__(
        self,
        url: str | Secret = _adapter.DEFAULT_URL,
        model: str | None = None,
        dimensions: int | None = None,
        truncate: Truncate | None = None,
        prompt_name: str | None = None,
        timeout: float = _adapter.TIMEOUT_S,
        client: Client | None = None,
    ) -> None:
        self._connect(url, client, timeout)
        self.model, self.dimensions = model, dimensions
        self.truncate, self.prompt_name = truncate, prompt_name

    def _work(self, text: str) -> Any:
        if not isinstance(text, str):
            raise TypeError("expected a text; for documents use EmbedstreamDocumentEmbedder")
        options = {name: getattr(self, name) for name in self._parameters}
        return _adapter.embed_one(text, _adapter.given(**options))

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """`embedding` of the text."""
        return {"embedding": self._client.submit(self._work(text)).result()}

    @component.output_types(embedding=list[float])
    async def run_async(self, text: str) -> dict[str, Any]:
        """As `run`."""
        return {"embedding": await _adapter.wait(self._client, self._work(text))}


@component
class EmbedstreamDocumentEmbedder(_Component):
    """Documents with their vectors; `meta_fields_to_embed` are put before the content."""

    _parameters = (
        "model",
        "dimensions",
        "truncate",
        "prompt_name",
        "meta_fields_to_embed",
        "embedding_separator",
    )

    def __init__(
        self,
        url: str | Secret = _adapter.DEFAULT_URL,
        model: str | None = None,
        dimensions: int | None = None,
        truncate: Truncate | None = None,
        prompt_name: str | None = None,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        timeout: float = _adapter.TIMEOUT_S,
        client: Client | None = None,
    ) -> None:
        self._connect(url, client, timeout)
        self.model, self.dimensions = model, dimensions
        self.truncate, self.prompt_name = truncate, prompt_name
        self.meta_fields_to_embed = meta_fields_to_embed or []
        self.embedding_separator = embedding_separator

    def _work(self, documents: list[Document]) -> Any:
        if not isinstance(documents, list) or any(not isinstance(d, Document) for d in documents):
            raise TypeError("expected a list of documents; for a text use EmbedstreamTextEmbedder")
        texts = []
        for document in documents:
            fields = [document.meta.get(name) for name in self.meta_fields_to_embed]
            before = [str(value) for value in fields if value is not None]
            texts.append(self.embedding_separator.join([*before, document.content or ""]))
        options = {name: getattr(self, name) for name in self._parameters[:4]}
        return _adapter.embed_all(texts, _adapter.given(**options))

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Copies of the documents, with `embedding` set."""
        return _with_vectors(documents, self._client.submit(self._work(documents)).result())

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """As `run`."""
        return _with_vectors(documents, await _adapter.wait(self._client, self._work(documents)))


@component
class EmbedstreamRanker(_Component):
    """Documents by how well they answer the query, best first, with `score` set."""

    _parameters = ("model", "top_k", "instruction", "truncate")

    def __init__(
        self,
        url: str | Secret = _adapter.DEFAULT_URL,
        model: str | None = None,
        top_k: int | None = 10,
        instruction: str | None = None,
        truncate: Truncate | None = None,
        timeout: float = _adapter.TIMEOUT_S,
        client: Client | None = None,
    ) -> None:
        self._connect(url, client, timeout)
        self.model, self.top_k = model, top_k
        self.instruction, self.truncate = instruction, truncate

    def _work(self, query: str, documents: list[Document], top_k: int | None) -> Any:
        options = _adapter.given(
            model=self.model,
            top_n=self.top_k if top_k is None else top_k,
            instruction=self.instruction,
            truncate=self.truncate,
        )
        return _adapter.rank(query, [document.content or "" for document in documents], options)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        """Copies of the best documents."""
        if not documents:
            return {"documents": []}
        work = self._work(query, documents, top_k)
        return _ranked(documents, self._client.submit(work).result())

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        """As `run`."""
        if not documents:
            return {"documents": []}
        return _ranked(
            documents, await _adapter.wait(self._client, self._work(query, documents, top_k))
        )


def _with_vectors(documents: list[Document], vectors: list[list[float]]) -> dict[str, Any]:
    pairs = zip(documents, vectors, strict=True)  # embed_many keeps the order and checks the count
    return {"documents": [dataclasses.replace(d, embedding=vector) for d, vector in pairs]}


def _ranked(documents: list[Document], ranking: Ranking) -> dict[str, Any]:
    return {"documents": [dataclasses.replace(documents[r.index], score=r.score) for r in ranking]}

"""Stand-ins for sentence-transformers: `encode`, `predict` and `rank` answered by a service. Needs numpy.

    from embedstream_client.sentence_transformers import RemoteCrossEncoder, RemoteSentenceTransformer

    model = RemoteSentenceTransformer("redis://localhost:6379")      # was: SentenceTransformer(name)
    vectors = model.encode(["a text", "another"])

Texts beyond the model's limit are cut, as sentence-transformers does. What a service cannot honour is
refused, not ignored; `device` and `batch_size` are the service's business, so any value does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from . import _adapter, _batches
from ._async import AsyncClient
from ._sync import Client
from .results import Scores

__all__ = ["RemoteCrossEncoder", "RemoteSentenceTransformer"]

_DTYPES = {"float32": "float32", "binary": "binary", "ubinary": "binary"}


class _Remote:
    def __init__(
        self,
        url: str = _adapter.DEFAULT_URL,
        *,
        client: Client | None = None,
        model: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.client = _adapter.client_of(url, client, timeout)
        self.model = model

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class RemoteSentenceTransformer(_Remote):
    """`SentenceTransformer.encode` over a service.

    `query_prompt_name` and `document_prompt_name` are what `encode_query` and `encode_document` use.
    """

    def __init__(
        self,
        url: str = _adapter.DEFAULT_URL,
        *,
        client: Client | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
    ) -> None:
        super().__init__(url, client=client, model=model, timeout=timeout)
        self._query_prompt_name = query_prompt_name
        self._document_prompt_name = document_prompt_name

    def encode(
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = _batches.BATCH_ITEMS,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """[d] for one text, [n, d] for a list; tensors when they are asked for.

        Raises `ValueError` for what a service cannot do: token embeddings, int8 and uint8 (which need
        calibration), process pools.
        """
        if output_value != "sentence_embedding":
            raise ValueError("a service gives sentence embeddings; see `outputs` of Client.embed")
        if precision not in _DTYPES:
            raise ValueError(
                f"precision {precision!r} needs calibration: ask for dtype='int8' with Client"
            )
        if pool is not None:
            raise ValueError("the service batches by itself: leave pool out")
        single = isinstance(inputs, str)
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        options = _adapter.given(
            model=self.model,
            prompt_name=None if prompt is not None else prompt_name,
            prompt=prompt,
            truncate="right",
            dtype="float32" if truncate_dim is not None else _DTYPES[precision],
            normalize=True if normalize_embeddings else None,
        )
        found = [
            np.asarray(embedding.vector)
            for embedding in self.client.embed_many(
                texts,
                batch_items=max(1, batch_size),
                progress=_bar(len(texts)) if show_progress_bar else None,
                **options,
            )
        ]
        if not found:
            return _tensor([]) if convert_to_tensor else np.array([])
        matrix = np.stack(found)
        if truncate_dim is not None:
            matrix = _cut(matrix, truncate_dim, normalize_embeddings, precision)
        if precision == "binary":
            matrix = (matrix.astype(np.int16) - 128).astype(np.int8)
        return _as_asked(matrix, single, convert_to_numpy, convert_to_tensor)

    def encode_query(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the query prompt."""
        return self.encode(inputs, **{"prompt_name": self._query_prompt_name, **options})

    def encode_document(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the document prompt."""
        return self.encode(inputs, **{"prompt_name": self._document_prompt_name, **options})

    def get_sentence_embedding_dimension(self) -> int:
        """Size of the vectors; asks the service."""
        return len(self.encode("a"))


class RemoteCrossEncoder(_Remote):
    """`CrossEncoder.predict` and `rank` over a service."""

    def predict(
        self,
        inputs: Sequence[Sequence[str]] | Sequence[str],
        prompt_name: None = None,
        prompt: str | None = None,
        batch_size: int = _batches.BATCH_ITEMS,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Any], Any] | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """One score per (query, document) pair; a scalar for one pair.

        `activation_fn` gets a tensor of raw scores, as with a local model. Raises `ValueError` for what
        a service cannot do.
        """
        if apply_softmax or prompt_name is not None or pool is not None:
            raise ValueError("apply_softmax, prompt_name and pool cannot be had from a service")
        single = len(inputs) == 2 and all(isinstance(one, str) for one in inputs)
        pairs: list[Any] = [inputs] if single else list(inputs)
        options = _adapter.given(
            model=self.model,
            instruction=prompt,
            truncate="right",
            raw_scores=True if activation_fn is not None else None,
        )
        groups = _by_query(pairs, max(1, batch_size))
        progress = _bar(len(pairs)) if show_progress_bar else None
        scores = np.asarray(
            self.client.submit(_score_groups(groups, options, progress)).result(), np.float32
        )
        if activation_fn is not None:
            scores = activation_fn(_tensor(scores)).numpy()
        return _as_asked(scores, single, convert_to_numpy, convert_to_tensor)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Documents best first: `corpus_id`, `score`, and `text` when asked for."""
        scores = self.predict([(query, document) for document in documents], **options)
        order = np.argsort(-np.asarray(scores), kind="stable")[:top_k]
        return [
            {"corpus_id": int(i), "score": scores[i]}
            | ({"text": documents[i]} if return_documents else {})
            for i in order
        ]


def _by_query(pairs: list[Any], batch_size: int) -> list[tuple[str, list[str]]]:
    """Neighbours with the same query go into one request."""
    groups: list[tuple[str, list[str]]] = []
    for query, document in pairs:
        if not groups or groups[-1][0] != query or len(groups[-1][1]) >= batch_size:
            groups.append((query, []))
        groups[-1][1].append(document)
    return groups


def _score_groups(
    groups: list[tuple[str, list[str]]],
    options: dict[str, Any],
    progress: Callable[[int], object] | None,
) -> Any:
    async def each() -> AsyncIterator[tuple[str, list[str]]]:
        for group in groups:
            yield group

    async def work(client: AsyncClient) -> list[float]:
        async def score(group: tuple[str, list[str]]) -> Scores:
            return await client.score(group[0], group[1], **options)

        found: list[float] = []
        async for scores in _batches.in_order(each(), score, _batches.IN_FLIGHT):
            found += scores.scores
            if progress is not None:
                progress(len(found))
        return found

    return work


def _cut(matrix: Any, size: int, normalize: bool, precision: str) -> Any:
    """The first components, as sentence-transformers cuts them: no new norm unless asked for."""
    matrix = matrix[:, :size]
    if normalize:
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        matrix = matrix / np.maximum(norms, 1e-12)
    return matrix if precision == "float32" else np.packbits(matrix > 0, axis=1)


def _as_asked(values: Any, single: bool, numpy: bool, tensor: bool) -> Any:
    if single:
        values = values[0]
    if tensor:
        return _tensor(values)
    if numpy:
        return values
    return _tensor(values) if single else list(_tensor(values))


def _tensor(values: Any) -> Any:
    import torch

    return torch.as_tensor(np.asarray(values))


def _bar(total: int) -> Callable[[int], object]:
    from tqdm.auto import tqdm

    bar = tqdm(total=total, desc="embedstream")

    def progress(done: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return progress

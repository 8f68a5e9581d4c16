"""Queries of models with one vector per token: filled up with mask tokens, and put beside documents to score.

Who calls it: `gpu.encode.text`; `gpu.answer.maxsim` computes the scores.
What must stay true: a query is tokenized as `prompt_name: "query"` would tokenize it, a document as
"document", so that a score is what the vectors of the same model give; a query is never cut here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu.batch import EncodedItem, EncodedRequest, ItemOptions
from gpu.folder.outputs import DOCUMENT_PROMPT, QUERY_PROMPT, Expansion
from gpu.folder.spec import ModelSpec
from schemas.errors import EmbedstreamError, EmptyInput, TooLong
from schemas.requests import EmbedRequest, RerankRequest, Text

QUERY = "query"
"""Key in `EncodedItem.extras`: the query, an `EncodedItem`, that this document is scored against."""


def expanded(item: EncodedItem, expansion: Expansion | None) -> EncodedItem:
    """The query filled up to the length that the model was trained with."""
    if expansion is None or item.n_tokens >= expansion.length:
        return item
    added = np.full(expansion.length - item.n_tokens, expansion.token, dtype=np.int32)
    return dataclasses.replace(
        item,
        input_ids=np.concatenate((item.input_ids, added)),
        attended=None if expansion.attend else item.n_tokens,
    )


def named(
    item: EncodedItem | EmbedstreamError, prompt_name: str | None
) -> EncodedItem | EmbedstreamError:
    """The item with the name of its prompt, for models that compute otherwise under another name."""
    if prompt_name is None or isinstance(item, EmbedstreamError):
        return item
    return dataclasses.replace(item, extras={**item.extras, "prompt_name": prompt_name})


def of_queries(spec: ModelSpec, prompt_name: str | None) -> tuple[int, Expansion | None]:
    """The limit of texts under that prompt, and what fills them up: queries of ColBERT have their own."""
    vectors = spec.multivector
    if vectors is None or prompt_name != QUERY_PROMPT:
        return spec.max_tokens, None
    return min(spec.max_tokens, vectors.query_length or spec.max_tokens), vectors.expansion


def both_sides(request: RerankRequest) -> tuple[EmbedRequest, EmbedRequest]:
    """The query and the documents, each as a request for vectors."""
    assert isinstance(request.query, str), "gpu.encode.supported refuses token ids here"
    query = EmbedRequest(id=request.id, input=(Text(request.query),), prompt_name=QUERY_PROMPT)
    documents = EmbedRequest(
        id=request.id,
        input=tuple(Text(document.text) for document in request.documents),
        prompt_name=DOCUMENT_PROMPT,
        truncate=request.truncate,
    )
    return query, documents


def beside(
    query: EncodedRequest | EmbedstreamError,
    documents: EncodedRequest | EmbedstreamError,
    options: ItemOptions,
) -> EncodedRequest | EmbedstreamError:
    """One item for each document, with the query beside it."""
    if isinstance(query, EmbedstreamError):
        return query
    if isinstance(documents, EmbedstreamError):
        return documents
    (asked,) = query.items
    if isinstance(asked, EmbedstreamError):
        return _of_query(asked)
    items: list[EncodedItem | EmbedstreamError] = []
    for index, item in enumerate(documents.items):
        if isinstance(item, EmbedstreamError):
            item.path = f"$.documents[{index}]"
            items.append(item)
        else:
            extras = {**item.extras, QUERY: asked}
            items.append(dataclasses.replace(item, options=options, extras=extras))
    return EncodedRequest(tuple(items))


def _of_query(error: EmbedstreamError) -> EmbedstreamError:
    if isinstance(error, TooLong):
        return TooLong(
            f"the query has {error.given} tokens, this model's queries take {error.limit}, and a query is "
            "never cut; shorten it",
            path="$.query",
            given=error.given,
            limit=error.limit,
        )
    if isinstance(error, EmptyInput):
        return EmptyInput("the query holds no token", path="$.query")
    return error

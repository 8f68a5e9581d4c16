"""A query and each document as one sequence, in the tokenizer's own form for two texts.

Who calls it: `gpu.encode.text`, for models that have no prompt for pairs. Pure.
What must stay true: only documents are ever cut; ids and segment ids are those of the tokenizer's own
post-processor.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu.batch import EncodedItem, EncodedRequest, Int32, ItemOptions
from gpu.encode.cut import cut_to, empty, known_ids, too_long
from gpu.encode.template import Template
from schemas.errors import EmbedstreamError, EmptyInput, TooLong
from schemas.requests import RerankRequest, Truncate


def as_given(
    request: RerankRequest, contents: Sequence[Int32 | EmbedstreamError], vocab_size: int
) -> list[Int32 | EmbedstreamError]:
    """The contents of the query and of each document, those that came as ids in place of the tokenized."""
    query = request.query
    given = [None if isinstance(query, str) else query.ids, *(d.ids for d in request.documents)]
    found: list[Int32 | EmbedstreamError] = []
    for place, (ids, content) in enumerate(zip(given, contents, strict=True)):
        index = place - 1 if place else None
        path = "$.query" if index is None else f"$.documents[{index}]"
        found.append(content if ids is None else known_ids(ids, vocab_size, path, index))
    return found


def joined(
    template: Template,
    query: Int32 | EmbedstreamError,
    documents: Sequence[Int32 | EmbedstreamError],
    *,
    limit: int,
    options: ItemOptions,
    truncate: Truncate,
    token_types: bool,
    allow_empty: bool,
) -> EncodedRequest | EmbedstreamError:
    """One item per document.

    query, documents: content ids without special tokens. limit: tokens of a whole pair. token_types: the
    model reads segment ids. allow_empty: a text without a token is scored, not refused.
    """
    if isinstance(query, EmbedstreamError):
        return query
    if len(query) == 0 and not allow_empty:
        return EmptyInput("the query holds no token", path="$.query")
    room = limit - template.n_pair - len(query)
    if room < 1:
        return TooLong(
            "the query leaves no room for a document, and a query is never cut; shorten it",
            path="$.query",
            given=len(query) + template.n_pair,
            limit=limit - 1,
        )
    head = template.pair_head(query)

    def pair(index: int, content: Int32 | EmbedstreamError) -> EncodedItem | EmbedstreamError:
        if isinstance(content, EmbedstreamError):
            return content
        if len(content) == 0 and not allow_empty:
            return empty(f"$.documents[{index}]", index)
        cut = cut_to(content, room, truncate)
        if cut is None:
            return too_long(index, len(content) + limit - room, limit)
        ids, types = template.pair(head, cut)
        return EncodedItem(
            ids,
            options,
            token_type_ids=types if token_types and types.any() else None,
            truncated=len(cut) < len(content),
        )

    return EncodedRequest(tuple(pair(index, content) for index, content in enumerate(documents)))

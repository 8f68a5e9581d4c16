"""The labels that a request names, as token ids.

Who calls it: `gpu.encode.text`, for every request of a model that is read at vocabulary tokens.
What must stay true: a label is one token of this tokenizer or an error that says how many it is, never
the first of several; two labels never stand for one token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gpu.batch import ItemOptions
from gpu.folder.prompts import tokens_of
from schemas.errors import InvalidRequest
from schemas.requests import AnyRequest, ScoreRequest


def with_labels(
    options: ItemOptions, request: AnyRequest, tokenizer: Any, vocab_size: int
) -> ItemOptions:
    """`options` with the ids of the request's labels. tokenizer: a `tokenizers.Tokenizer`.

    Raises `InvalidRequest`.
    """
    if not isinstance(request, ScoreRequest) or not request.labels:
        return options
    ids: dict[int, int] = {}
    labels: tuple[str | int, ...] = request.labels
    for place, label in enumerate(labels):
        path = f"$.labels[{place}]"
        found = tokens_of(label, tokenizer)
        if len(found) != 1:
            raise InvalidRequest(
                f"the label is {len(found)} tokens for this model, and a label is read at one; name "
                "another word, or the id of a token",
                path=path,
                limit=1,
                given=len(found),
            )
        if not 0 <= found[0] < vocab_size:
            raise InvalidRequest(
                f"the id is outside the model's vocabulary of {vocab_size}",
                path=path,
                limit=vocab_size - 1,
            )
        if found[0] in ids:
            raise InvalidRequest(f"the label is the same token as label {ids[found[0]]}", path=path)
        ids[found[0]] = place
    return dataclasses.replace(options, labels=tuple(ids))

"""Texts beyond the model's limit: what may be asked, and how a text is cut into chunks.

Who calls it: `gpu.encode.supported` and `gpu.encode.text`; `gpu.answer.chunks` averages what comes of it.
What must stay true: one item stays one item with its whole cost in tokens, so budgets hold; no chunk is
longer than the model's limit; each chunk keeps the special tokens and the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.batch import EncodedItem, Int32, ItemOptions
from gpu.encode.spans import first_with_spans
from gpu.folder.spec import ModelSpec
from gpu.folder.static import STATIC_TYPES
from schemas.errors import EmbedstreamError, TooLong, Unsupported
from schemas.requests import EmbedRequest, Output

CHUNKS = "chunks"
"""Key in `EncodedItem.extras`: tokens of each chunk, in order; their sum is the item's."""
MAX_CHUNKS, MAX_CHUNK_TOKENS = 64, 65536
"""Chunks of one text, and tokens of all of them: an executor thread works on them before it takes the
next batch, and a lease has to outlast that."""


def check_long(request: EmbedRequest, outputs: Sequence[Output], spec: ModelSpec) -> None:
    """Raises `Unsupported` when the model cannot do what `aggregate`, `chunk_tokens` or spans ask."""
    asked = [name for name in ("aggregate", "chunk_tokens") if getattr(request, name) is not None]
    if (at := first_with_spans(request)) is not None:
        asked.append(f"input[{at}].spans")
    if spec.model_type in STATIC_TYPES and asked:
        raise Unsupported(
            f"{asked[0]} is for models that read a text in context, this one does not",
            path=f"$.{asked[0]}",
        )
    if request.aggregate is not None and (tuple(outputs) != ("dense",) or spec.pooling is None):
        raise Unsupported(
            f"aggregate averages dense vectors, and {', '.join(outputs)} was asked for",
            path="$.aggregate",
        )
    late = [name for name in asked if name != "aggregate"]
    if late and spec.pooling != "mean":
        raise Unsupported(
            "late chunking pools spans of one forward, which only a model with mean pooling allows; "
            f"this one has {spec.pooling or 'no'} pooling",
            path=f"$.{late[0]}",
        )


def max_chunks(limit: int) -> int:
    """Chunks that one text may have in a model of that limit; at least 2."""
    return max(2, min(MAX_CHUNKS, MAX_CHUNK_TOKENS // limit))


def chunked(
    head: Int32,
    body: Int32,
    repeated: Int32,
    tail: Int32,
    *,
    limit: int,
    options: ItemOptions,
    index: int,
    pooled_from: int = 0,
) -> EncodedItem | EmbedstreamError:
    """One item of several chunks: each is head, repeated (from the second on), a piece of body, tail.

    head, tail: special tokens. body: the text's own tokens, a prompt before it included; repeated: the
    prompt's tokens, which the first chunk has in its body. pooled_from: see `EncodedItem`, per chunk.
    Returns `TooLong` when more than `max_chunks` would be needed, or a prompt fills a chunk.
    """
    room = limit - len(head) - len(tail)
    later = room - len(repeated)
    n_chunks = max_chunks(limit)
    most = room + (n_chunks - 1) * later
    if later < 1 or len(body) > most:
        return TooLong(
            f"item {index} has {len(body)} tokens; aggregate takes up to {max(most, 0)} "
            f"({n_chunks} chunks); split it",
            items=(index,),
            given=len(body),
            limit=max(most, 0),
        )
    pieces = [np.concatenate((head, body[:room], tail))]
    pieces += [
        np.concatenate((head, repeated, body[start : start + later], tail))
        for start in range(room, len(body), later)
    ]
    return EncodedItem(
        np.concatenate(pieces).astype(np.int32, copy=False),
        options,
        pooled_from=pooled_from,
        extras={CHUNKS: tuple(len(piece) for piece in pieces)},
    )

"""Cutting a text to the room that is left, and the words for one that may not be cut or is empty.

Who calls it: the encoders of this folder. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.batch import Int32
from schemas.errors import EmbedstreamError, EmptyInput, InvalidRequest, TooLong
from schemas.requests import Truncate


def cut_to(content: Int32, room: int, truncate: Truncate) -> Int32 | None:
    """The content ids that fit into `room`, or None when they do not and may not be cut."""
    if len(content) <= room:
        return content
    if truncate == "error":
        return None
    return content[:room] if truncate == "right" else content[len(content) - room :]


def known_ids(
    given: Sequence[int], vocab_size: int, path: str, index: int | None
) -> Int32 | EmbedstreamError:
    """Ids as a sender gave them, [n] int32; an error for none, or for one outside of the vocabulary."""
    items = () if index is None else (index,)
    if not given:
        return empty(path, index) if index is not None else EmptyInput("no token id", path=path)
    if min(given) < 0 or max(given) >= vocab_size:
        return InvalidRequest(
            f"token ids go from 0 to {vocab_size - 1} in this model",
            path=path,
            items=items,
            limit=vocab_size - 1,
        )
    return np.asarray(given, dtype=np.int32)


def too_long(index: int, given: int, limit: int, around: str = "") -> TooLong:
    """The error of item `index`, which has `given` tokens; `around`: with what they are counted."""
    tokens = f"{given} tokens {around}".rstrip()
    return TooLong(
        f"item {index} has {tokens}, the model takes {limit}; shorten it, or set "
        '`truncate` to "right" or "left"',
        items=(index,),
        given=given,
        limit=limit,
    )


def reraise_unless_fault(error: BaseException) -> None:
    """A panic of the Rust library is no `Exception`, but a fault of one text all the same."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def empty(path: str, index: int) -> EmptyInput:
    """The error of item `index` at `path`, of which no token is left."""
    return EmptyInput(
        f'item {index} holds no token; send text, or set `empty_input` to "embed" for this model',
        path=path,
        items=(index,),
    )

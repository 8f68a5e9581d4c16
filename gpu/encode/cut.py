"""Cutting a text to the room that is left, and the words for one that may not be cut or is empty.

Who calls it: the encoders of this folder. Pure.
"""

from __future__ import annotations

from gpu.batch import Int32
from schemas.errors import EmptyInput, TooLong
from schemas.requests import Truncate


def cut_to(content: Int32, room: int, truncate: Truncate) -> Int32 | None:
    """The content ids that fit into `room`, or None when they do not and may not be cut."""
    if len(content) <= room:
        return content
    if truncate == "error":
        return None
    return content[:room] if truncate == "right" else content[len(content) - room :]


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


def empty(path: str, index: int) -> EmptyInput:
    """The error of item `index` at `path`, of which no token is left."""
    return EmptyInput(
        f'item {index} holds no token; send text, or set `empty_input` to "embed" for this model',
        path=path,
        items=(index,),
    )

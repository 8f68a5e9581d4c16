"""Late chunking: a document as windows that a model reads whole, with the chunks' places in them. Pure.

Who calls it: the chunker, for routes with `chunk.late`.
What must stay true: each chunk lies whole in one window, in order; no window has more tokens than the
model takes; the first and the last window reach the ends of the document. Jina's published code cuts
windows of tokens that overlap, and takes what lies in an overlap from the window before; here windows
begin at words, so that each is a text like any other, and what overlaps is context alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TypeAlias

from schemas.requests import Span, Text

CONTEXT_SHARE = 8
"""A window after the first begins up to a part of this of its tokens before its own chunks."""


Placed: TypeAlias = tuple[Span, Span]
"""A chunk: its characters, and its tokens, both [from, to)."""


class Tokens:
    """A document's tokens.

    offsets: of their characters, in order. words: which word each belongs to.
    """

    def __init__(self, offsets: Sequence[Span], words: Sequence[int | None]) -> None:
        self.starts = [start for start, _ in offsets]
        self.ends = [end for _, end in offsets]
        self._words = words

    def __len__(self) -> int:
        return len(self.starts)

    def holding(self, span: Span) -> Span | None:
        """The tokens [from, to) that have characters of a span; None: there are none."""
        first, last = bisect_right(self.ends, span[0]), bisect_left(self.starts, span[1])
        while first < last and self.starts[first] == self.ends[first]:
            first += 1
        while first < last and self.starts[last - 1] == self.ends[last - 1]:
            last -= 1
        return (first, last) if first < last else None

    def begins_word(self, at: int) -> bool:
        """Can a text be cut before this token?"""
        words = self._words
        return at in (0, len(self)) or words[at] is None or words[at] != words[at - 1]


def windows(
    text: str, chunks: Sequence[Placed], tokens: Tokens, *, room: int, count: Callable[[str], int]
) -> list[Text]:
    """The windows of a text, each with the spans of the chunks that are its own.

    Args:
        chunks: by where they begin; each has `room` tokens at most.
        count: tokens of a text.
    """
    if len(tokens) <= room:
        return [Text(text, tuple(span for span, _ in chunks))] if chunks else []
    found: list[Text] = []
    at = 0
    while at < len(chunks):
        found.append(_window(text, chunks[at:], tokens, room, count))
        at += len(found[-1].spans)
    return found


def _window(
    text: str, chunks: Sequence[Placed], tokens: Tokens, room: int, count: Callable[[str], int]
) -> Text:
    """The window that begins with the first of these chunks, and as many behind it as it holds."""
    budget, (first, last) = room, chunks[0][1]
    while last - first <= budget:
        start = max(first - min(room // CONTEXT_SHARE, budget - (last - first)), 0)
        while start < first and not tokens.begins_word(start):
            start += 1
        end = min(start + budget, len(tokens))
        n_own = 1
        while n_own < len(chunks) and chunks[n_own][1][1] <= end:
            n_own += 1
        own = max(place[1] for _, place in chunks[:n_own])
        while end > own and not tokens.begins_word(end):
            end -= 1
        spans = [span for span, _ in chunks[:n_own]]
        begin = min(tokens.starts[start], spans[0][0])
        window = text[begin : max(tokens.ends[end - 1], *(b for _, b in spans))]
        excess = count(window) - room
        if excess <= 0:
            return Text(window, tuple((a - begin, b - begin) for a, b in spans))
        budget -= excess  # a piece of a text may be spelled in more tokens than inside of it
    a, b = chunks[0][0]
    return Text(text[a:b], ((0, b - a),))

"""Options of an indexing route: what a document is, how it is cut. Plain records.

Who calls it: the settings read them from a route's `document` and `chunk` tables; the commands
build them from flags.
What must stay true: what can be wrong by itself is refused here, with the name of the option.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ChunkBy = Literal["tokens", "sentences", "markdown"]
DocumentFormat = Literal["json", "debezium", "text"]


class DocumentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a record becomes a document."""

    id: str = "key"
    """``key``: the record's key; ``key.PATH``: a field of a JSON key; else a field of the document."""
    text: str = ""
    """Template over fields: ``{title}\\n\\n{body?}``; dotted paths, lists are joined by line, ``?``
    marks a field that may be absent. Needed unless `format` is ``text``."""
    metadata: tuple[str, ...] = ()
    """Fields kept beside the chunks, by dotted path; ``*``: all of the document's fields."""
    version: str | None = None
    """Field that numbers the versions of a document; None: the source's own offsets."""
    format: DocumentFormat = "json"
    """``json``; ``debezium``: change events with before, after and op; ``text``: the body as it is."""


class ChunkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a document's text is cut."""

    max_tokens: int | None = None
    """Tokens of a chunk, special tokens and prompt not counted; None: what the model takes."""
    overlap: int = 0
    """Tokens that a chunk repeats of the one before."""
    by: ChunkBy = "sentences"
    """Where cuts fall: at ``tokens``, ends of ``sentences``, or ``markdown`` headings first."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 8:
            raise ValueError(f"chunk.max_tokens is {self.max_tokens}: at least 8")
        if self.overlap < 0:
            raise ValueError(f"chunk.overlap is {self.overlap}: at least 0")
        if self.max_tokens is not None and self.overlap * 2 > self.max_tokens:
            raise ValueError(
                f"chunk.overlap is {self.overlap} and chunk.max_tokens {self.max_tokens}: "
                "at most half of a chunk may repeat"
            )

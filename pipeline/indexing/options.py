"""Options of an indexing route: what a document is, how it is cut. The only place that declares them.

Who calls it: `pipeline.settings.records` makes them the tables `document` and `chunk` of a route; the
commands build them from flags; mapping and chunker read them.
What must stay true: plain values; the sentence in `Meta` is the reference documentation.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from schemas.requests import Output


class DocumentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`[routes.document]`: how a record becomes a document, on a route into a collection."""

    id: Annotated[
        str,
        Meta(
            min_length=1,
            description="Where a document's id stands. `key`: the record's key; `key.PATH`: a field of "
            "a JSON key; else a field of the document, such as `product.id`.",
        ),
    ] = "key"
    text: Annotated[
        str,
        Meta(
            description="Template over fields, such as `{title}\\n\\n{body?}`: dotted paths, lists "
            "are joined by line, `?` marks a field that may be absent, braces are doubled to mean "
            "themselves. Needed, unless `format` is `text`.",
        ),
    ] = ""
    metadata: Annotated[
        tuple[str, ...],
        Meta(
            description="Fields kept beside each chunk, by dotted path; absent ones are left out. "
            "`*`: all fields of the document.",
        ),
    ] = ()
    version: Annotated[
        str | None,
        Meta(
            description="Field with the version of a document, a whole number: an older one never "
            "overwrites a newer one. When unset: offsets, which count within one partition.",
        ),
    ] = None
    format: Annotated[
        Literal["json", "debezium", "text"],
        Meta(
            description="`json`: a document. `debezium`: a change event with before, after and op. "
            "`text`: the body as it is, under the record's key.",
        ),
    ] = "json"
    prompt: Annotated[
        str | None,
        Meta(description="Text put before each chunk; when unset, what `prompt_name` says."),
    ] = None
    prompt_name: Annotated[
        str | None,
        Meta(description="The model's prompt for documents; when unset, the model's default."),
    ] = None
    output: Annotated[
        Output | None,
        Meta(
            description="Which vectors of the model the collection holds: one kind, and a store that has it "
            "(docs/indexing.md); when unset, the model's own: dense where it has a dense vector."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=65_536)] | None,
        Meta(
            description="Size of the vectors, where the model can be cut; when unset, the native."
        ),
    ] = None


class ChunkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`[routes.chunk]`: how a document's text is cut, on a route into a collection."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=8, le=1_048_576)] | None,
        Meta(
            description="Tokens of a chunk, special tokens and prompt not counted; when unset, what "
            "the model takes.",
        ),
    ] = None
    overlap: Annotated[
        int,
        Meta(
            ge=0,
            le=524_288,
            description="Tokens that a chunk repeats of the one before, at most half of one.",
        ),
    ] = 0
    late: Annotated[
        bool,
        Meta(
            description="Late chunking: a document goes through the model whole, or in windows as long as "
            "the model takes, and a chunk's vector is the mean of its tokens, which have seen their "
            "surroundings. For models with mean pooling; `max_tokens` has to be set."
        ),
    ] = False
    by: Annotated[
        Literal["sentences", "markdown", "tokens"],
        Meta(
            description="Where cuts fall: at ends of sentences, at markdown headings first, or "
            "after so many tokens.",
        ),
    ] = "sentences"

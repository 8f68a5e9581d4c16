"""Requests as the service sees them: decoded, validated, defaults filled in.

Who calls it: `schemas.codec.decode_request` builds them; ingress, tokenizer and egress read them.
What must stay true: plain values only (no torch, no numpy); frozen; every field of `shared wire
contract version 1` has its place here and nothing else has.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from .errors import ContentType

Task: TypeAlias = Literal["embed", "rerank", "classify", "score"]
Lane: TypeAlias = Literal["interactive", "bulk"]
Truncate: TypeAlias = Literal["error", "right", "left"]
Encoding: TypeAlias = Literal["bytes", "float", "base64"]
DType: TypeAlias = Literal["float32", "float16", "int8", "binary"]
Output: TypeAlias = Literal["dense", "sparse", "multivector"]
Aggregate: TypeAlias = Literal["mean"]
Role: TypeAlias = Literal["system", "user", "assistant"]

Labels: TypeAlias = tuple[str, ...] | tuple[int, ...]
"""Texts, or ids of tokens."""

TASKS: tuple[Task, ...] = ("embed", "rerank", "classify", "score")
LANES: tuple[Lane, ...] = ("interactive", "bulk")
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
MAX_MESSAGES = 256
"""Of one conversation."""
MAX_SPANS = 4096
"""Of one text: each has a vector of its own in the reply."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one record may hold. Every limit has its own error code."""

    max_record_bytes: int = 16 * 1024 * 1024
    """Bytes of the encoded record -> `record_too_large`."""
    max_items: int = 2048
    """Items of one request -> `too_many_items`."""
    max_item_bytes: int = 1024 * 1024
    """UTF-8 bytes of one text (or image bytes, or 8 x token ids) -> `item_too_large`."""
    max_depth: int = 16
    """Nesting depth of maps and lists -> `too_deep`."""
    max_id_bytes: int = 256
    """UTF-8 bytes of a request id -> `invalid_request`."""
    max_metadata_bytes: int = 16 * 1024
    """Bytes of the encoded `metadata` map -> `invalid_request`."""


Span: TypeAlias = tuple[int, int]
"""[from, to), in code points of a text."""


class Text(msgspec.Struct, frozen=True, gc=False):
    """One text. Never empty by construction: the tokenizer decides what empty means.

    spans: late chunking where the sender cuts: one vector for each of these, instead of one of the text.
    """

    text: str
    spans: tuple[Span, ...] = ()


class TokenIds(msgspec.Struct, frozen=True):
    """Ids used verbatim: no special tokens added, no prompt."""

    ids: tuple[int, ...]


class Image(msgspec.Struct, frozen=True):
    """Encoded image bytes as they came (PNG, JPEG, ...), with an optional text beside them."""

    data: bytes
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Role
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """Messages that a model reads as its chat template writes them."""

    messages: tuple[Message, ...]


Item: TypeAlias = Text | TokenIds | Image | Conversation


class Document(msgspec.Struct, frozen=True):
    """One candidate of a rerank or score request: a text, or the ids of its tokens and no text."""

    text: str = ""
    id: str | None = None
    ids: tuple[int, ...] | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every task shares.

    `content_type` is the encoding the record came in: the reply uses the same.
    `encoding` is how vectors are written in the reply.
    """

    id: str
    content_type: ContentType = "application/msgpack"
    model: str | None = None
    encoding: Encoding = "bytes"
    truncate: Truncate = "error"
    priority: Lane | None = None
    deadline_ms: int | None = None
    reply_to: str | None = None
    metadata: dict[str, Any] | None = None
    traceparent: str | None = None

    @property
    def task(self) -> Task:
        """The wire name of the task."""
        return _TASK_OF[type(self)]

    @property
    def n_items(self) -> int:
        """How many results the reply will hold."""
        raise TypeError(f"{type(self).__name__} is not a concrete request")


class EmbedRequest(Request, frozen=True, kw_only=True):
    """Texts, token ids or images -> vectors.

    `outputs` empty (left out on the wire) means the model's own: dense where it has a dense vector,
    else sparse, else multivector.
    `aggregate`: a text beyond the model's limit is cut into chunks whose vectors are averaged.
    `chunk_tokens`: late chunking; one vector per span of at most so many tokens, from one forward.
    """

    input: tuple[Item, ...]
    aggregate: Aggregate | None = None
    chunk_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    outputs: tuple[Output, ...] = ()
    dtype: DType = "float32"
    prompt_name: str | None = None
    prompt: str | None = None

    @property
    def n_items(self) -> int:
        return len(self.input)


class ClassifyRequest(Request, frozen=True, kw_only=True):
    """Texts, token ids or conversations -> one score per label. `raw_scores` asks for logits."""

    input: tuple[Item, ...]
    raw_scores: bool = False
    prompt_name: str | None = None
    prompt: str | None = None

    @property
    def n_items(self) -> int:
        return len(self.input)


class RerankRequest(Request, frozen=True, kw_only=True):
    """One query against documents -> scores, best first unless `sort` is false.

    Token ids are a text's own, without special tokens, which the service puts around the pair.
    """

    query: str | TokenIds
    documents: tuple[Document, ...]
    top_n: int | None = None
    return_documents: bool = False
    raw_scores: bool = False
    instruction: str | None = None
    sort: bool = True

    @property
    def n_items(self) -> int:
        return len(self.documents)


class ScoreRequest(RerankRequest, frozen=True, kw_only=True):
    """As rerank, but every score, in input order.

    `labels`: what a language model is read at instead of its own label tokens, all texts or all ids,
    each one token of its vocabulary; every document then has a score per label.
    """

    sort: bool = False
    labels: Labels = ()


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Withdraws the queued requests of that id, as far as this service instance holds them.

    On the wire: ``{"task": "cancel", "id": "..."}``. It has no reply of its own; the withdrawn
    request is answered `cancelled`. Work that already runs is finished and answered.
    """

    id: str


_TASK_OF: dict[type[Request], Task] = {
    EmbedRequest: "embed",
    ClassifyRequest: "classify",
    RerankRequest: "rerank",
    ScoreRequest: "score",
}
AnyRequest: TypeAlias = EmbedRequest | ClassifyRequest | RerankRequest | ScoreRequest

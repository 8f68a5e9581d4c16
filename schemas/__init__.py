"""The wire contract: records, their validation, and their bytes.

Who calls it: every other package, and the light client, which vendors this folder as it is.
What must stay true: relative imports only; msgspec, msgpack and the standard library only.
"""

from __future__ import annotations

from .codec import (
    decode_reply,
    decode_request,
    default_encoding,
    encode_reply,
    encode_request,
    join_parts,
    reply_headers,
    split_reply,
)
from .errors import ContentType, EmbedstreamError, UndecodableRecord
from .requests import (
    AnyRequest,
    CancelRequest,
    ClassifyRequest,
    Document,
    EmbedRequest,
    Image,
    Item,
    Limits,
    Request,
    RerankRequest,
    ScoreRequest,
    Text,
    TokenIds,
)
from .results import (
    FailureReply,
    ItemReply,
    ModelRef,
    Reply,
    Sparse,
    Timings,
    Usage,
)

__all__ = [
    "AnyRequest",
    "CancelRequest",
    "ClassifyRequest",
    "ContentType",
    "Document",
    "EmbedRequest",
    "EmbedstreamError",
    "FailureReply",
    "Image",
    "Item",
    "ItemReply",
    "Limits",
    "ModelRef",
    "Reply",
    "Request",
    "RerankRequest",
    "ScoreRequest",
    "Sparse",
    "Text",
    "Timings",
    "TokenIds",
    "UndecodableRecord",
    "Usage",
    "decode_reply",
    "decode_request",
    "default_encoding",
    "encode_reply",
    "encode_request",
    "join_parts",
    "reply_headers",
    "split_reply",
]

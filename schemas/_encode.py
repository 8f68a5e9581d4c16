"""Plain values -> bytes, in either encoding, by one set of rules.

Who calls it: `schemas.codec`.
What must stay true: the same values give the same bytes, always; nothing non-finite and no lone
surrogate is ever written; what cannot be written raises a typed error, not the packer's own.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ._record import repair
from .errors import ContentType, InvalidRequest, NonFinite
from .headers import JSON
from .requests import (
    AnyRequest,
    ClassifyRequest,
    Conversation,
    Document,
    DType,
    EmbedRequest,
    Encoding,
    Image,
    Item,
    Limits,
    RerankRequest,
    ScoreRequest,
    Text,
)
from .results import FailureReply, ItemReply, Reply, Sparse
from .validation import clean_metadata, default_encoding
from .vectors import check_vector, single_floats_msgpack, to_base64, to_wire

# What a request was allowed to carry is the route's to say; on the way out only the readers' stack
# counts.
_WRITABLE: Final = Limits(max_depth=200)
_MSGPACK: Final = msgspec.msgpack.Encoder()
_JSON: Final = msgspec.json.Encoder()


def dump(value: Any, content_type: ContentType) -> bytes:
    """Plain values as one record body. Callers have checked that floats are finite.

    Raises:
        InvalidRequest: an integer beyond 64 bits, or a type that is not plain.
    """
    encoder = _JSON if content_type == JSON else _MSGPACK
    try:
        try:
            return encoder.encode(value)
        except UnicodeEncodeError:
            return encoder.encode(_repaired(value))
    except (OverflowError, TypeError):
        raise InvalidRequest("a value is of a type or size that no record can carry") from None


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return repair(value)
    if isinstance(value, dict):
        return {_repaired(name): _repaired(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_repaired(entry) for entry in value]
    return value


def check_json_metadata(value: Any) -> None:
    """msgspec would write bytes as base64 text and so change their type without a word."""
    if isinstance(value, bytes):
        raise InvalidRequest("metadata holds bytes, which JSON cannot carry", path="$.metadata")
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, bytes | dict | list):
            check_json_metadata(entry)


# --------------------------------------------------------------------------------------- requests


def request_to_wire(request: AnyRequest) -> dict[str, Any]:
    """The record of a request: `id` and `task` always, other fields when they differ from the
    default."""
    wire: dict[str, Any] = {"id": request.id, "task": request.task}
    _put(wire, "model", request.model)
    if isinstance(request, EmbedRequest | ClassifyRequest):
        wire["input"] = [_item(item, request.content_type) for item in request.input]
        _put(wire, "prompt_name", request.prompt_name)
        _put(wire, "prompt", request.prompt)
    else:
        _put_rerank(wire, request)
    if isinstance(request, EmbedRequest):
        _put(wire, "dimensions", request.dimensions)
        _put(wire, "normalize", request.normalize)
        _put(wire, "aggregate", request.aggregate)
        _put(wire, "chunk_tokens", request.chunk_tokens)
        if request.outputs:
            wire["outputs"] = list(request.outputs)
        if request.dtype != "float32":
            wire["dtype"] = request.dtype
    elif request.raw_scores:
        wire["raw_scores"] = True
    if request.encoding != ("float" if request.content_type == JSON else "bytes"):
        wire["encoding"] = request.encoding
    if request.truncate != "error":
        wire["truncate"] = request.truncate
    _put(wire, "priority", request.priority)
    _put(wire, "deadline_ms", request.deadline_ms)
    _put(wire, "reply_to", request.reply_to)
    _put(wire, "metadata", request.metadata)
    return wire


def _put(wire: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        wire[name] = value


def _put_rerank(wire: dict[str, Any], request: RerankRequest) -> None:
    query = request.query
    wire["query"] = query if isinstance(query, str) else list(query.ids)
    wire["documents"] = [_document(document) for document in request.documents]
    _put(wire, "top_n", request.top_n)
    _put(wire, "instruction", request.instruction)
    if request.return_documents:
        wire["return_documents"] = True
    if request.sort is not (not isinstance(request, ScoreRequest)):
        wire["sort"] = request.sort
    if isinstance(request, ScoreRequest) and request.labels:
        wire["labels"] = list(request.labels)


def _document(document: Document) -> Any:
    if document.ids is not None:
        return list(document.ids)
    return document.text if document.id is None else {"id": document.id, "text": document.text}


def _item(item: Item, content_type: ContentType) -> Any:
    if isinstance(item, Text):
        spans = [list(span) for span in item.spans]
        return {"text": item.text, "spans": spans} if spans else item.text
    if isinstance(item, Image):
        data = item.data
        wire: dict[str, Any] = {
            "image": f"data:;base64,{to_base64(data)}" if content_type == JSON else data
        }
        _put(wire, "text", item.text)
        return wire
    if isinstance(item, Conversation):
        return {"messages": [{"role": m.role, "content": m.content} for m in item.messages]}
    return list(item.ids)


# ---------------------------------------------------------------------------------------- replies


def reply_to_wire(reply: Reply, content_type: ContentType, encoding: Encoding) -> dict[str, Any]:
    """The record of a reply, vectors written as `encoding` asks."""
    name = "data" if reply.task in ("embed", "classify") else "results"
    wire = envelope_to_wire(reply)
    dtype = reply.dtype or "float32"
    wire[name] = [
        _plain_to_wire(item, dtype)
        if encoding == "bytes" and _is_plain(item)
        else item_to_wire(item, reply, content_type, encoding)
        for item in reply.items
    ]
    return wire


def _is_plain(item: ItemReply) -> bool:
    """One vector and what is said of every item, as nearly always."""
    return (
        item.embedding is not None
        and item.tokens is not None
        and item.truncated is not None
        and item.error is None
        and item.scale is None
        and item.sparse is None
        and item.multivector is None
        and item.spans is None
        and item.scales is None
        and item.scores is None
        and item.relevance_score is None
        and item.id is None
        and item.document is None
    )


def _plain_to_wire(item: ItemReply, dtype: DType) -> dict[str, Any]:
    """What `item_to_wire` makes of a plain item whose vector is written as bytes, in a third of the time."""
    assert item.embedding is not None
    try:
        check_vector(item.embedding, dtype)
    except NonFinite:
        raise NonFinite(
            "a result is not finite and cannot be written", items=[item.index]
        ) from None
    return {
        "index": item.index,
        "embedding": item.embedding,
        "tokens": item.tokens,
        "truncated": item.truncated,
    }


def envelope_to_wire(reply: Reply) -> dict[str, Any]:
    """Everything of a reply but its items, whose place is kept by an empty list."""
    wire: dict[str, Any] = {
        "id": reply.id,
        "task": reply.task,
        "model": {
            "name": reply.model.name,
            "fingerprint": reply.model.fingerprint,
            "dtype": reply.model.dtype,
        },
        "object": "list",
        "data" if reply.task in ("embed", "classify") else "results": [],
        "n": reply.n,
    }
    _put(wire, "dimensions", reply.dimensions)
    _put(wire, "dtype", reply.dtype)
    _put(wire, "normalized", reply.normalized)
    _put(wire, "prompt", reply.prompt)
    wire["usage"] = {
        "prompt_tokens": reply.usage.prompt_tokens,
        "total_tokens": reply.usage.total_tokens,
    }
    _put(wire, "part", reply.part)
    _put(wire, "parts", reply.parts)
    if reply.timings is not None:
        wire["timings"] = {
            "queue_ms": finite(reply.timings.queue_ms),
            "forward_ms": finite(reply.timings.forward_ms),
            "total_ms": finite(reply.timings.total_ms),
        }
    _put(wire, "metadata", reply.metadata)
    return wire


def item_to_wire(
    item: ItemReply, reply: Reply, content_type: ContentType, encoding: Encoding
) -> dict[str, Any]:
    """One entry of `data` or `results`. Raises `NonFinite` that names the item's index."""
    wire: dict[str, Any] = {"index": item.index}
    if item.error is not None:
        wire["error"] = item.error.to_wire()
        _put(wire, "id", item.id)
        return wire
    try:
        if item.embedding is not None:
            wire["embedding"] = _vector(item.embedding, reply, content_type, encoding)
        if item.scale is not None:
            wire["scale"] = finite(item.scale)
        if item.sparse is not None:
            wire["sparse"] = _sparse(item.sparse)
        if item.multivector is not None:
            wire["multivector"] = [
                _vector(vector, reply, content_type, encoding) for vector in item.multivector
            ]
        if item.spans is not None:
            wire["spans"] = [list(span) for span in item.spans]
        if item.scales is not None:
            wire["scales"] = [finite(scale) for scale in item.scales]
        if item.scores is not None:
            wire["scores"] = {label: finite(score) for label, score in item.scores.items()}
        if item.relevance_score is not None:
            wire["relevance_score"] = finite(item.relevance_score)
    except NonFinite:
        raise NonFinite(
            "a result is not finite and cannot be written", items=[item.index]
        ) from None
    _put(wire, "id", item.id)
    _put(wire, "document", item.document)
    _put(wire, "tokens", item.tokens)
    _put(wire, "truncated", item.truncated)
    return wire


def _vector(data: bytes, reply: Reply, content_type: ContentType, encoding: Encoding) -> Any:
    dtype = reply.dtype or "float32"
    value = to_wire(data, dtype, encoding)
    if encoding == "float" and dtype == "float32" and content_type != JSON:
        return msgspec.Raw(single_floats_msgpack(data))
    return value


def _sparse(sparse: Sparse) -> dict[str, Any]:
    return {"indices": sparse.indices, "values": [finite(value) for value in sparse.values]}


def finite(value: float) -> float:
    """As a float. Raises `NonFinite`."""
    if value - value != 0:
        raise NonFinite("a number is not finite and cannot be written")
    return float(value)


def failure_to_wire(reply: FailureReply) -> dict[str, Any]:
    """The record of a request that failed as a whole."""
    wire: dict[str, Any] = {"id": reply.id, "error": reply.error.to_wire()}
    _put(wire, "metadata", reply.metadata)
    return wire


def encode_reply(
    reply: Reply | FailureReply,
    *,
    content_type: ContentType = "application/msgpack",
    encoding: Encoding | None = None,
) -> bytes:
    """The record of a reply.

    Args:
        content_type: the encoding of the request that is answered.
        encoding: how vectors are written; None is the default of `content_type`. A failure has no
            vectors, so any value does.

    Raises:
        NonFinite: a vector, score or timing is NaN or infinite; `items` holds the index.
        InvalidRequest: bytes in JSON, or metadata that no record can carry.
    """
    if isinstance(reply, FailureReply):
        wire = failure_to_wire(reply)
    else:
        wire = reply_to_wire(reply, content_type, checked_encoding(content_type, encoding))
    if reply.metadata is not None:
        wire["metadata"] = metadata_to_wire(reply.metadata, content_type)
    return dump(wire, content_type)


def checked_encoding(content_type: ContentType, encoding: Encoding | None) -> Encoding:
    """The encoding to write vectors in. Raises `InvalidRequest` for bytes in JSON."""
    if encoding is None:
        return default_encoding(content_type)
    if content_type == JSON and encoding == "bytes":
        raise InvalidRequest(
            "JSON cannot carry bytes: ask for base64 or float, or send msgpack", path="$.encoding"
        )
    return encoding


def metadata_to_wire(metadata: dict[str, Any], content_type: ContentType) -> dict[str, Any]:
    """Metadata as it may be written. Raises for what no record, or JSON alone, cannot carry."""
    cleaned = clean_metadata(metadata, _WRITABLE)
    if content_type == JSON:
        check_json_metadata(cleaned)
    return cleaned

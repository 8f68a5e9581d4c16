"""An ordinary embed request in msgpack, read in one go: texts, and fields that are as they should be.

Who calls it: `schemas.codec.decode_request`, before it opens a record field by field.
What must stay true: what comes out is what the long way makes of the same record; whatever it does not take
(other fields and items, a value to be refused, a repeated name, invalid text) is left to the long way, which
alone says what is wrong.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ._read_msgpack import read_metadata
from ._record import utf8_bytes
from .errors import EmbedstreamError
from .headers import JSON, MAX_DEADLINE_MS, MAX_REPLY_TO_BYTES, RecordHeaders
from .requests import DType, EmbedRequest, Encoding, Lane, Limits, Text, Truncate
from .validation import clean_metadata

MAX_BYTES: Final = 256 * 1024
"""A list is built before it is counted: here it cannot be long."""


_NO_METADATA: Final = msgspec.Raw(b"")


class _Ordinary(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The fields that are taken; None: not there."""

    id: str | None = None
    task: str | None = None
    input: str | list[str] | None = None
    model: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    encoding: Encoding | None = None
    dtype: DType | None = None
    truncate: Truncate | None = None
    priority: Lane | None = None
    deadline_ms: int | None = None
    reply_to: str | None = None
    prompt_name: str | None = None
    metadata: msgspec.Raw = _NO_METADATA  # raw bytes are no part of a union


_N_FIELDS: Final = len(_Ordinary.__struct_fields__)
_DECODER: Final = msgspec.msgpack.Decoder(_Ordinary)


def ordinary_request(
    body: bytes, headers: RecordHeaders, default_id: str, limits: Limits
) -> EmbedRequest | None:
    """The request, if the record is one; None: read it the long way."""
    if not body or body[0] & 0xF0 != 0x80 or headers.content_type == JSON:
        return None
    if len(body) > min(MAX_BYTES, limits.max_item_bytes):  # and so no text is too long
        return None
    try:
        found = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    n_missing = msgspec.structs.astuple(found).count(None) + (found.metadata is _NO_METADATA)
    if _N_FIELDS - n_missing != body[0] & 0x0F:  # a name is repeated, or a value is null
        return None
    if found.task is not None and found.task != "embed":
        return None
    texts = [found.input] if isinstance(found.input, str) else found.input
    if not texts or len(texts) > limits.max_items or not _are_possible(found):
        return None
    request_id = found.id
    if request_id is None:
        request_id = default_id if headers.request_id is None else headers.request_id
    if not request_id or utf8_bytes(request_id) > limits.max_id_bytes:
        return None
    metadata: dict[str, Any] | None = None
    if found.metadata is not _NO_METADATA:
        try:
            read = read_metadata(bytes(found.metadata), limits)
            if not isinstance(read, dict):
                return None
            metadata = clean_metadata(read, limits)
        except EmbedstreamError:
            return None
    deadline_ms, reply_to = headers.deadline_ms, headers.reply_to
    return EmbedRequest(
        id=request_id,
        input=tuple(map(Text, texts)),
        model=found.model,
        encoding=found.encoding or "bytes",
        truncate=found.truncate or "error",
        priority=found.priority,
        deadline_ms=found.deadline_ms if deadline_ms is None else deadline_ms,
        reply_to=found.reply_to if reply_to is None else reply_to,
        metadata=metadata,
        traceparent=headers.traceparent,
        dimensions=found.dimensions,
        normalize=found.normalize,
        dtype=found.dtype or "float32",
        prompt_name=found.prompt_name,
    )


def _are_possible(found: _Ordinary) -> bool:
    """What the types of the fields do not say, as `schemas._fields` has it."""
    return (
        found.model != ""
        and found.prompt_name != ""
        and (found.dimensions is None or 1 <= found.dimensions < 2**63)
        and (found.deadline_ms is None or 0 <= found.deadline_ms <= MAX_DEADLINE_MS)
        and (
            found.reply_to is None
            or (found.reply_to != "" and utf8_bytes(found.reply_to) <= MAX_REPLY_TO_BYTES)
        )
    )

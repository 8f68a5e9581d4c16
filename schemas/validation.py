"""Named fields -> a request: the meaning half of decoding, the same for both encodings.

Who calls it: `schemas.codec.decode_request`, with a record that `schemas._decode` opened.
What must stay true: every error names the path of the first wrong value and the remedy; no message
carries user text (names of unknown fields are shown, cut and printable); an option that cannot take
effect is refused, never ignored (but for OpenAI's `user`, which is no option); null means absent for every optional field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from ._fields import CHECKS
from ._items import read_documents, read_input, refuse
from ._record import (
    Record,
    raise_too_deep,
    repair,
    safe_name,
    unique_pairs,
    utf8_bytes,
)
from .errors import ContentType, InvalidRequest, Unsupported
from .headers import JSON, RecordHeaders
from .requests import (
    TASKS,
    AnyRequest,
    CancelRequest,
    ClassifyRequest,
    Conversation,
    Document,
    EmbedRequest,
    Encoding,
    Image,
    Limits,
    RerankRequest,
    ScoreRequest,
    Text,
)

SCHEMA_VERSION: Final = 1
CANCEL: Final = "cancel"

_COMMON: Final = frozenset({
    "id", "task", "model", "encoding", "encoding_format", "truncate", "priority", "deadline_ms",
    "reply_to", "metadata", "schema_version",
})  # fmt: skip
_RERANK: Final = frozenset({
    "query", "documents", "top_n", "return_documents", "raw_scores", "instruction", "sort",
})  # fmt: skip
FIELDS_OF_TASK: Final[dict[str, frozenset[str]]] = {
    "embed": _COMMON
    | {"input", "dimensions", "normalize", "outputs", "dtype", "prompt_name", "prompt"}
    | {"aggregate", "chunk_tokens", "user"},
    "classify": _COMMON | {"input", "raw_scores", "prompt_name", "prompt"},
    "rerank": _COMMON | _RERANK,
    "score": _COMMON | (_RERANK - {"top_n", "sort"}) | {"labels"},
}
ALL_FIELDS: Final = frozenset().union(*FIELDS_OF_TASK.values())


def default_encoding(content_type: ContentType) -> Encoding:
    """How vectors are written when a request does not say: bytes in msgpack, numbers in JSON."""
    return "float" if content_type == JSON else "bytes"


def build_request(
    record: Record, headers: RecordHeaders, *, default_id: str, limits: Limits
) -> AnyRequest | CancelRequest:
    """Validate every field of an opened record and fill in the defaults.

    Raises:
        EmbedstreamError: the typed error of the first rule that is broken.
    """
    if record.repeated:
        raise InvalidRequest("a field name is repeated inside one map", path="$")
    if "schema_version" in record.names:
        record.newer = _schema_version(record) > SCHEMA_VERSION
    task = _task(record)
    if task == CANCEL:
        return _cancel_request(record, headers, default_id, limits)
    known = _known_fields(record, task)
    values: dict[str, Any] = {}
    for name in known:
        check = CHECKS.get(name)
        if check is not None:
            value = record.value(name)
            if value is not None:
                values[name] = check(value, f"$.{name}", limits)
    values.pop("user", None)
    values["id"] = request_id(record, headers, default_id, limits)
    values["content_type"] = record.content_type
    values["encoding"] = _encoding(values, record.content_type)
    if "metadata" in known:
        values["metadata"] = request_metadata(record, limits)
    if headers.reply_to is not None:
        values["reply_to"] = headers.reply_to
    if headers.deadline_ms is not None:
        values["deadline_ms"] = headers.deadline_ms
    if headers.traceparent is not None:
        values["traceparent"] = headers.traceparent
    if "prompt" in values and "prompt_name" in values:
        raise InvalidRequest("prompt and prompt_name exclude each other", path="$.prompt_name")
    return _BUILDERS[task](record, values, limits)


def _cancel_request(
    record: Record, headers: RecordHeaders, default_id: str, limits: Limits
) -> CancelRequest:
    for name in record.names:
        if name not in ("task", "id", "schema_version") and not record.newer:
            raise InvalidRequest(
                "a cancel record holds only task, id and schema_version",
                path=f"$.{safe_name(name)}",
            )
    return CancelRequest(id=request_id(record, headers, default_id, limits))


def _known_fields(record: Record, task: str) -> list[str]:
    """The fields to read. Unknown ones pass only when the sender is newer."""
    names = list(record.names)
    allowed = FIELDS_OF_TASK[task]
    if allowed.issuperset(names):
        return names
    known = []
    for name in names:
        if name in allowed:
            known.append(name)
        elif name in ALL_FIELDS:
            if record.value(name) is not None:
                raise InvalidRequest(
                    f"the field {name} does not apply to the task {task}", path=f"$.{name}"
                )
        elif not record.newer:
            raise InvalidRequest("unknown field", path=f"$.{safe_name(name)}")
    return known


def _schema_version(record: Record) -> int:
    version = record.value("schema_version")
    if version is None:
        return SCHEMA_VERSION
    if type(version) is not int or version < 1:
        raise InvalidRequest(
            "schema_version must be a whole number from 1", path="$.schema_version"
        )
    return version


def _task(record: Record) -> str:
    names = record.names
    task = record.value("task") if "task" in names else None
    if task is None:
        return "rerank" if "query" in names and "documents" in names else "embed"
    if not isinstance(task, str) or (task not in TASKS and task != CANCEL):
        refuse("one of " + ", ".join((*TASKS, CANCEL)), "$.task")
    return task


def request_id(record: Record, headers: RecordHeaders, default_id: str, limits: Limits) -> str:
    """Body `id`, else the `request-id` header, else what the transport offers."""
    value = record.value("id") if "id" in record.names else None
    path = "$.id"
    if value is None:
        value, path = headers.request_id, "headers.request-id"
    if value is None:
        value, path = default_id, "key"
    if not isinstance(value, str):
        raise InvalidRequest("a request id must be a string", path=path)
    if not value:
        raise InvalidRequest("a request id must not be empty", path=path)
    n_bytes = utf8_bytes(value)
    if n_bytes > limits.max_id_bytes:
        raise InvalidRequest(
            f"a request id may have {limits.max_id_bytes} bytes"
            + ("; the record's key stands in for a missing id" if path == "key" else ""),
            path=path,
            limit=limits.max_id_bytes,
            given=n_bytes,
        )
    return value


def request_metadata(record: Record, limits: Limits) -> dict[str, Any] | None:
    """The free-form field, cleaned; None when it is absent."""
    if "metadata" not in record.names:
        return None
    value = record.metadata()
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("metadata must be a map", path="$.metadata")
    return clean_metadata(value, limits)


# --------------------------------------------------------------------------------------- metadata


def clean_metadata(metadata: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Metadata that may travel: plain types, finite, no deeper than allowed, valid text.

    The record is level 1 and metadata level 2. Lone surrogates become U+FFFD.

    Raises:
        InvalidRequest: another type, a non-finite float, an integer beyond 64 bits.
        TooDeep: more than `limits.max_depth` levels.
    """
    try:
        cleaned: dict[str, Any] = _clean(metadata, 2, limits)
    except RecursionError:  # max_depth itself is set beyond the interpreter's stack
        raise_too_deep(limits, "$.metadata")
    return cleaned


def _clean(value: Any, level: int, limits: Limits) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else repair(value)
    if kind is bool or kind is bytes or value is None:
        return value
    if kind is int:
        if not -(2**63) <= value < 2**64:
            raise InvalidRequest("a number in metadata exceeds 64 bits", path="$.metadata")
        return value
    if kind is float:
        if not math.isfinite(value):
            raise InvalidRequest("a number in metadata is not finite", path="$.metadata")
        return value
    if kind is not dict and kind is not list:
        raise InvalidRequest("metadata holds a value of another type", path="$.metadata")
    if level > limits.max_depth:
        raise_too_deep(limits, "$.metadata")
    if kind is list:
        return [_clean(entry, level + 1, limits) for entry in value]
    if not all(type(name) is str for name in value):
        raise InvalidRequest("a name in metadata is not a string", path="$.metadata")
    return unique_pairs([
        (repair(name), _clean(entry, level + 1, limits)) for name, entry in value.items()
    ])  # fmt: skip


def _encoding(values: dict[str, Any], content_type: ContentType) -> str:
    encoding = values.get("encoding")
    alias = values.pop("encoding_format", None)
    if encoding is not None and alias is not None and encoding != alias:
        raise InvalidRequest(
            "encoding and its alias encoding_format disagree", path="$.encoding_format"
        )
    chosen: str = encoding or alias or default_encoding(content_type)
    if chosen == "bytes" and content_type == JSON:
        raise InvalidRequest(
            "JSON cannot carry bytes: ask for base64 or float, or send msgpack",
            path="$.encoding" if encoding else "$.encoding_format",
        )
    return chosen


# ------------------------------------------------------------------------------------------ tasks


def _need(values: dict[str, Any], name: str, task: str) -> Any:
    if name not in values:
        raise InvalidRequest(f"the task {task} needs the field {name}", path=f"$.{name}")
    return values[name]


def _build_embed(record: Record, values: dict[str, Any], limits: Limits) -> AnyRequest:
    if "aggregate" in values and values.get("truncate", "error") != "error":
        raise InvalidRequest("aggregate cuts nothing off; leave out truncate", path="$.truncate")
    for name in ("aggregate", "outputs"):
        if "chunk_tokens" in values and name in values:
            raise InvalidRequest(f"chunk_tokens and {name} exclude each other", path=f"$.{name}")
    items = read_input(_need(values, "input", "embed"), record, limits)
    for i, item in enumerate(items):
        if isinstance(item, Conversation):
            raise Unsupported("embed takes no messages", path=f"$.input[{i}].messages")
        if isinstance(item, Text) and item.spans:
            _check_beside_spans(values, f"$.input[{i}].spans")
    values["input"] = items
    return EmbedRequest(**values)


def _check_beside_spans(values: dict[str, Any], path: str) -> None:
    for name in ("aggregate", "chunk_tokens", "outputs", "truncate"):
        if values.get(name, "error") != "error":
            raise InvalidRequest(f"spans and {name} exclude each other", path=path)


def _build_classify(record: Record, values: dict[str, Any], limits: Limits) -> AnyRequest:
    items = read_input(_need(values, "input", "classify"), record, limits)
    for i, item in enumerate(items):
        if isinstance(item, Image):
            raise Unsupported("classify takes no images", path=f"$.input[{i}].image")
        if isinstance(item, Text) and item.spans:
            raise Unsupported("classify takes no spans", path=f"$.input[{i}].spans")
    values["input"] = items
    return ClassifyRequest(**values)


def _build_rerank(record: Record, values: dict[str, Any], limits: Limits) -> AnyRequest:
    _need(values, "query", "rerank")
    documents = _need(values, "documents", "rerank")
    values["documents"] = _documents(documents, values, record, limits)
    return RerankRequest(**values)


def _documents(
    given: Any, values: dict[str, Any], record: Record, limits: Limits
) -> tuple[Document, ...]:
    documents = read_documents(given, record, limits)
    if values.get("return_documents") and any(d.ids is not None for d in documents):
        raise InvalidRequest("token ids have no text to return", path="$.return_documents")
    return documents


def _build_score(record: Record, values: dict[str, Any], limits: Limits) -> AnyRequest:
    _need(values, "query", "score")
    documents = _need(values, "documents", "score")
    values["documents"] = _documents(documents, values, record, limits)
    return ScoreRequest(**values)


_BUILDERS: Final[dict[str, Callable[[Record, dict[str, Any], Limits], AnyRequest]]] = {
    "embed": _build_embed,
    "classify": _build_classify,
    "rerank": _build_rerank,
    "score": _build_score,
}

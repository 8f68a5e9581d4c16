"""Arguments of a call -> a request of the wire contract.

Who calls it: `AsyncClient`.
What must stay true: what cannot be an item is refused here, with its path, before anything is sent;
values are judged by the service alone, so that there is one set of rules.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import msgspec

from ._wire.errors import InvalidRequest
from ._wire.headers import JSON
from ._wire.requests import (
    Aggregate,
    Conversation,
    Document,
    DType,
    Image,
    Item,
    Labels,
    Lane,
    Message,
    Output,
    Text,
    TokenIds,
    Truncate,
)

if TYPE_CHECKING:
    ItemInput: TypeAlias = str | Mapping[str, Any] | Sequence[int]
    EmbedInput: TypeAlias = ItemInput | Sequence[ItemInput]
    QueryInput: TypeAlias = str | Sequence[int]
    DocumentInput: TypeAlias = str | Mapping[str, Any] | Sequence[int]


class CommonOptions(TypedDict, total=False):
    """What every task takes."""

    model: str | None
    truncate: Truncate
    priority: Lane | None
    metadata: dict[str, Any] | None
    traceparent: str | None


class EmbedOptions(CommonOptions, total=False):
    """What `embed` takes; docs/wire-format.md says what each means."""

    dimensions: int | None
    normalize: bool | None
    dtype: DType
    outputs: Sequence[Output]
    aggregate: Aggregate | None
    chunk_tokens: int | None
    prompt_name: str | None
    prompt: str | None


class ClassifyOptions(CommonOptions, total=False):
    """What `classify` takes."""

    raw_scores: bool
    prompt_name: str | None
    prompt: str | None


class PairOptions(CommonOptions, total=False):
    """What `score` and `rerank` take."""

    raw_scores: bool
    instruction: str | None


class ScoreOptions(PairOptions, total=False):
    """What `score` takes."""

    labels: Sequence[str] | Sequence[int]


class RerankOptions(PairOptions, total=False):
    """What `rerank` takes."""

    top_n: int | None
    sort: bool


Task = Literal["embed", "rerank", "classify", "score"]


def items(given: EmbedInput) -> tuple[Item, ...]:
    """The items of `input`: one text, token ids or image, or a sequence of them.

    Raises `InvalidRequest` with the path of what is none.
    """
    if isinstance(given, str | Mapping):
        return (_item(given, "$.input"),)
    given = _sequence(given, "$.input", "a text, token ids or a list of them")
    if given and all(_is_int(one) for one in given):
        return (_item(given, "$.input"),)
    return tuple(_item(one, f"$.input[{i}]") for i, one in enumerate(given))


def documents(given: Sequence[DocumentInput]) -> tuple[Document, ...]:
    """The documents of a rerank or score request: texts, token ids, or maps with `text` and `id`."""
    if isinstance(given, str):
        raise InvalidRequest("documents must be a list of texts, not one text", path="$.documents")
    return tuple(
        _document(one, f"$.documents[{i}]") for i, one in enumerate(_sequence(given, "$.documents"))
    )


def query(given: QueryInput) -> str | TokenIds:
    """The query of a rerank or score request: a text or its token ids."""
    return given if isinstance(given, str) else _token_ids(given, "$.query", "a text or token ids")


def labels(given: Sequence[str] | Sequence[int]) -> Labels:
    """The labels of a score request: texts, or token ids."""
    named = _sequence(given, "$.labels")
    if not named:
        raise InvalidRequest("no label is named; leave labels out", path="$.labels")
    if all(_is_int(label) for label in named):
        return tuple(operator.index(label) for label in named)
    return tuple(text(label, f"$.labels[{i}]") for i, label in enumerate(named))


def text(given: object, path: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"expected a text, got {type(given).__name__}", path=path)
    return given


def _item(given: object, path: str) -> Item:
    if isinstance(given, str):
        return Text(given)
    if isinstance(given, Mapping):
        _check_fields(given, ("text", "image", "messages", "spans"), path)
        if given.get("messages") is not None:
            return _conversation(given, path)
        image, words = given.get("image"), given.get("text")
        if image is None:
            return Text(text(words, f"{path}.text"), _spans(given.get("spans"), f"{path}.spans"))
        if given.get("spans") is not None:
            raise InvalidRequest("spans are parts of a text", path=f"{path}.spans")
        if not isinstance(image, bytes):
            raise InvalidRequest("an image is the bytes of its file", path=f"{path}.image")
        return Image(image, None if words is None else text(words, f"{path}.text"))
    return _token_ids(given, path, "a text, token ids or an image")


def _spans(given: object, path: str) -> tuple[tuple[int, int], ...]:
    if given is None:
        return ()
    spans = [tuple(_sequence(one, path)) for one in _sequence(given, path)]
    if any(list(map(type, span)) != [int, int] for span in spans):
        raise InvalidRequest("spans are pairs of whole numbers", path=path)
    return tuple((start, end) for start, end in spans)


def _conversation(given: Mapping[str, Any], path: str) -> Conversation:
    if any(given.get(name) is not None for name in ("text", "image")):
        raise InvalidRequest("messages exclude text and image", path=path)
    path = f"{path}.messages"
    messages = []
    for i, one in enumerate(_sequence(given["messages"], path)):
        place = f"{path}[{i}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest("expected a map with role and content", path=place)
        _check_fields(one, ("role", "content"), place)
        role = text(one.get("role"), f"{place}.role")
        messages.append(Message(role, text(one.get("content"), f"{place}.content")))  # type: ignore[arg-type]
    return Conversation(tuple(messages))


def _check_fields(given: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    unknown = sorted(str(name)[:64] for name in given if name not in known)
    if unknown:
        raise InvalidRequest("unknown field", path=f"{path}.{unknown[0]}")


def _token_ids(given: object, path: str, expected: str) -> TokenIds:
    ids = _sequence(given, path, expected)
    if not all(_is_int(one) for one in ids):
        raise InvalidRequest(f"expected {expected}", path=path)
    return TokenIds(tuple(operator.index(one) for one in ids))


def _document(given: object, path: str) -> Document:
    if isinstance(given, Mapping):
        _check_fields(given, ("text", "id"), path)
        own = given.get("id")
        return Document(
            text(given.get("text"), f"{path}.text"),
            None if own is None else text(own, f"{path}.id"),
        )
    if isinstance(given, str):
        return Document(given)
    return Document(ids=_token_ids(given, path, "a text, a map or token ids").ids)


def _is_int(given: object) -> bool:
    if isinstance(given, bool | str | bytes):
        return False
    try:
        operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _sequence(given: object, path: str, expected: str = "a list") -> Sequence[Any]:
    """A list of anything that can be walked through, numpy arrays and generators included."""
    try:
        if not isinstance(given, bytes | bytearray | Mapping | str):
            return list(given)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        pass
    raise InvalidRequest(f"expected {expected}, got {type(given).__name__}", path=path)


def with_fields(record: bytes, content_type: str, fields: Mapping[str, str | int]) -> bytes:
    """`record` with these fields in the place of its own; all else keeps its bytes.

    Raises `InvalidRequest` for a record that is no map.
    """
    codec: Any = msgspec.json if content_type == JSON else msgspec.msgpack
    try:
        parts = codec.decode(record, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("no map of names and values", path="$") from None
    raw = {name: msgspec.Raw(codec.encode(value)) for name, value in fields.items()}
    return bytes(codec.encode({**parts, **raw}))

"""`input` and `documents`: the items of a request, in all the forms the contract takes.

Who calls it: `schemas.validation`.
What must stay true: order is kept and nothing is dropped; token ids are taken verbatim and a
boolean is no id; no URL is ever fetched; an item over the byte limit fails the whole request with
the indexes of all such items, because half an answer to a request that breaks a limit would hide
the other half.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from ._record import (
    BYTES_PER_TOKEN_ID,
    Record,
    raise_too_large,
    raise_too_many,
    safe_name,
    utf8_bytes,
)
from .errors import EmptyInput, InvalidRequest
from .requests import (
    MAX_MESSAGES,
    MAX_SPANS,
    ROLES,
    Conversation,
    Document,
    Image,
    Item,
    Limits,
    Message,
    Span,
    Text,
    TokenIds,
)
from .vectors import from_base64

MAX_TOKEN_ID: Final = 2**31 - 1  # int32 all the way down


def refuse(expected: str, path: str) -> NoReturn:
    """A value is not what its field takes."""
    raise InvalidRequest(f"expected {expected}", path=path)


def _check_count(entries: list[Any], path: str, limits: Limits) -> None:
    if not entries:
        raise EmptyInput(f"{path[2:]} is an empty list", path=path)
    if len(entries) > limits.max_items:
        raise_too_many(len(entries), path, limits)


def _check_sizes(sizes: list[int], path: str, limits: Limits) -> None:
    """Fail the request with the indexes of all items over the byte limit."""
    over = [i for i, n_bytes in enumerate(sizes) if n_bytes > limits.max_item_bytes]
    if over:
        raise_too_large(sizes[over[0]], f"{path}[{over[0]}]", limits, over)


def read_input(value: Any, record: Record, limits: Limits) -> tuple[Item, ...]:
    """`input` -> items: one string, one list of ids, or a list of strings, id lists and maps."""
    path = "$.input"
    if isinstance(value, str):
        value = [value]
    elif not isinstance(value, list):
        refuse("a string or a list of items", path)
    elif value and type(value[0]) is int:
        _check_id_counts([value], path, limits, flat=True)
        return (_token_ids(value, path),)
    _check_count(value, path, limits)
    small = record.n_bytes <= limits.max_item_bytes  # then no text can exceed the limit
    if set(map(type, value)) == {str}:
        if not small:
            _check_sizes([utf8_bytes(text) for text in value], path, limits)
        return tuple(map(Text, value))
    _check_id_counts(value, path, limits)
    items = tuple(_item(entry, f"{path}[{i}]", record) for i, entry in enumerate(value))
    _check_sizes([_item_bytes(item) for item in items], path, limits)
    return items


def _check_id_counts(entries: list[Any], path: str, limits: Limits, *, flat: bool = False) -> None:
    """Before ids are copied: refuse all lists that exceed the byte limit at once."""
    sizes = [BYTES_PER_TOKEN_ID * len(e) if isinstance(e, list) else 0 for e in entries]
    over = [i for i, n_bytes in enumerate(sizes) if n_bytes > limits.max_item_bytes]
    if over:
        raise_too_large(sizes[over[0]], path if flat else f"{path}[{over[0]}]", limits, over)


def _item(entry: Any, path: str, record: Record) -> Item:
    if isinstance(entry, str):
        return Text(entry)
    if isinstance(entry, list):
        return _token_ids(entry, path)
    if isinstance(entry, dict):
        return _input_map(entry, path, record)
    if type(entry) is int:
        raise InvalidRequest("token ids and other items do not mix in one list", path=path)
    refuse("a string, a list of token ids, or a map with text, image or messages", path)


def _item_bytes(item: Item) -> int:
    if isinstance(item, Text):
        return utf8_bytes(item.text)
    if isinstance(item, TokenIds):
        return BYTES_PER_TOKEN_ID * len(item.ids)
    if isinstance(item, Conversation):
        return sum(utf8_bytes(message.content) for message in item.messages)
    return len(item.data) + utf8_bytes(item.text or "")


def _token_ids(ids: list[Any], path: str) -> TokenIds:
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_TOKEN_ID):
        for i, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                refuse(f"a token id: a whole number from 0 to {MAX_TOKEN_ID}", f"{path}[{i}]")
    return TokenIds(tuple(ids))


def token_ids(ids: list[Any], path: str, limits: Limits) -> TokenIds:
    """One list of ids within the byte limit."""
    if BYTES_PER_TOKEN_ID * len(ids) > limits.max_item_bytes:
        raise_too_large(BYTES_PER_TOKEN_ID * len(ids), path, limits)
    return _token_ids(ids, path)


def _check_entry_fields(
    entry: dict[str, Any], allowed: tuple[str, ...], path: str, record: Record
) -> None:
    for name in entry:
        if name not in allowed and not record.newer:
            raise InvalidRequest("unknown field", path=f"{path}.{safe_name(name)}")


def _input_map(entry: dict[str, Any], path: str, record: Record) -> Item:
    _check_entry_fields(entry, ("text", "image", "messages", "spans"), path, record)
    text, image, spans = entry.get("text"), entry.get("image"), entry.get("spans")
    if spans is not None and (not isinstance(text, str) or set(entry) & {"image", "messages"}):
        raise InvalidRequest("spans are parts of a text that stands alone", path=f"{path}.spans")
    if entry.get("messages") is not None:
        if text is not None or image is not None:
            raise InvalidRequest("messages exclude text and image", path=path)
        return _conversation(entry["messages"], f"{path}.messages", record)
    if text is not None and not isinstance(text, str):
        refuse("a string", f"{path}.text")
    if image is None:
        if text is None:
            raise InvalidRequest("an item needs text, image or messages", path=path)
        return Text(text, () if spans is None else _spans(spans, len(text), f"{path}.spans"))
    return Image(_image_bytes(image, f"{path}.image"), text)


def _spans(value: Any, length: int, path: str) -> tuple[Span, ...]:
    if not isinstance(value, list) or not value:
        refuse("a non-empty list of [from, to)", path)
    if len(value) > MAX_SPANS:
        raise InvalidRequest(
            f"a text may have {MAX_SPANS} spans", path=path, limit=MAX_SPANS, given=len(value)
        )
    for i, one in enumerate(value):
        if not isinstance(one, list) or len(one) != 2 or set(map(type, one)) != {int}:
            refuse("[from, to), two whole numbers", f"{path}[{i}]")
        if not 0 <= one[0] < one[1] <= length:
            refuse(f"from < to, within the {length} characters of the text", f"{path}[{i}]")
    return tuple((start, end) for start, end in value)


def _conversation(value: Any, path: str, record: Record) -> Conversation:
    if not isinstance(value, list):
        refuse("a list of messages", path)
    if not value:
        raise EmptyInput("messages is an empty list", path=path)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(
            f"a conversation may have {MAX_MESSAGES} messages",
            path=path,
            limit=MAX_MESSAGES,
            given=len(value),
        )
    return Conversation(tuple(_message(v, f"{path}[{i}]", record) for i, v in enumerate(value)))


def _message(entry: Any, path: str, record: Record) -> Message:
    if not isinstance(entry, dict):
        refuse("a map with role and content", path)
    _check_entry_fields(entry, ("role", "content"), path, record)
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        refuse("one of " + ", ".join(ROLES), f"{path}.role")
    if not isinstance(content, str):
        refuse("a string", f"{path}.content")
    return Message(role, content)


def _image_bytes(value: Any, path: str) -> bytes:
    if isinstance(value, str):
        value = _data_uri(value, path)
    if not isinstance(value, bytes):
        refuse("image bytes, or a data: URI", path)
    if not value:
        raise InvalidRequest("the image is empty", path=path)
    return value


def _data_uri(uri: str, path: str) -> bytes:
    if uri[:5].lower() != "data:":
        raise InvalidRequest(
            "an image comes as bytes or as a data: URI; the service never fetches a URL", path=path
        )
    head, comma, payload = uri[5:].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data: URI must be base64", path=path)
    media_type = head[:-7].split(";")[0].strip().lower()
    if media_type and not media_type.startswith("image/"):
        raise InvalidRequest("the data: URI does not say that it is an image", path=path)
    try:
        return from_base64(payload)
    except InvalidRequest:
        raise InvalidRequest("the data: URI is not valid base64", path=path) from None


def read_documents(value: Any, record: Record, limits: Limits) -> tuple[Document, ...]:
    """`documents` -> candidates: strings, lists of token ids, or maps of `text` and `id`."""
    path = "$.documents"
    if not isinstance(value, list):
        refuse("a list of documents", path)
    _check_count(value, path, limits)
    small = record.n_bytes <= limits.max_item_bytes
    if set(map(type, value)) == {str}:
        documents = tuple(map(Document, value))
    else:
        _check_id_counts(value, path, limits)
        documents = tuple(_document(v, f"{path}[{i}]", record, limits) for i, v in enumerate(value))
    if not small:
        _check_sizes([utf8_bytes(document.text) for document in documents], path, limits)
    return documents


def _document(entry: Any, path: str, record: Record, limits: Limits) -> Document:
    if isinstance(entry, str):
        return Document(entry)
    if isinstance(entry, list):
        return Document(ids=_token_ids(entry, path).ids)
    if not isinstance(entry, dict):
        refuse("a string, a list of token ids, or a map with text and id", path)
    _check_entry_fields(entry, ("text", "id"), path, record)
    text, document_id = entry.get("text"), entry.get("id")
    if not isinstance(text, str):
        refuse("a string", f"{path}.text")
    if document_id is not None:
        if not isinstance(document_id, str) or not document_id:
            refuse("a non-empty string", f"{path}.id")
        if utf8_bytes(document_id) > limits.max_id_bytes:
            raise InvalidRequest(
                f"a document id may have {limits.max_id_bytes} bytes",
                path=f"{path}.id",
                limit=limits.max_id_bytes,
                given=utf8_bytes(document_id),
            )
    return Document(text, document_id)

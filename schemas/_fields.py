"""What each field of a request may hold by itself: one check per name.

Who calls it: `schemas.validation`, for every field of a record that its task knows.
What must stay true: a check returns the value as the service uses it, or raises with the field's path
and the remedy; it never looks at another field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from ._items import refuse, token_ids
from ._record import raise_too_large, utf8_bytes
from .errors import EmptyInput, InvalidDimensions, InvalidRequest
from .headers import MAX_DEADLINE_MS, MAX_REPLY_TO_BYTES
from .requests import Labels, Limits, TokenIds

MAX_LABELS: Final = 256
"""Of one request. Each is one number per document in the reply."""

Check: TypeAlias = Callable[[Any, str, Limits], Any]


def _as_is(value: Any, path: str, limits: Limits) -> Any:
    """Items are read once the task is known to need them."""
    return value


def _bool(value: Any, path: str, limits: Limits) -> bool:
    if value is not True and value is not False:
        refuse("true or false", path)
    return bool(value)


def _name(value: Any, path: str, limits: Limits) -> str:
    if not isinstance(value, str) or not value:
        refuse("a non-empty string", path)
    return value


def _long_text(value: Any, path: str, limits: Limits) -> str:
    if not isinstance(value, str):
        refuse("a string", path)
    if utf8_bytes(value) > limits.max_item_bytes:
        raise_too_large(utf8_bytes(value), path, limits)
    return value


def _query(value: Any, path: str, limits: Limits) -> str | TokenIds:
    if not isinstance(value, list):
        return _long_text(value, path, limits)
    if not value:
        raise EmptyInput("query is an empty list", path=path)
    return token_ids(value, path, limits)


def _reply_to(value: Any, path: str, limits: Limits) -> str:
    name = _name(value, path, limits)
    if utf8_bytes(name) > MAX_REPLY_TO_BYTES:
        raise InvalidRequest(
            f"reply_to is longer than {MAX_REPLY_TO_BYTES} bytes",
            path=path,
            limit=MAX_REPLY_TO_BYTES,
            given=utf8_bytes(name),
        )
    return name


def _one_of(*choices: str) -> Check:
    expected = "one of " + ", ".join(choices)

    def check(value: Any, path: str, limits: Limits) -> str:
        if not isinstance(value, str) or value not in choices:
            refuse(expected, path)
        return value

    return check


def _deadline_ms(value: Any, path: str, limits: Limits) -> int:
    if type(value) is not int or not 0 <= value <= MAX_DEADLINE_MS:
        refuse("whole milliseconds since 1970", path)
    return value


def _top_n(value: Any, path: str, limits: Limits) -> int:
    if type(value) is not int or not 1 <= value < 2**63:
        refuse("a whole number from 1; leave top_n out to get all", path)
    return value


def _chunk_tokens(value: Any, path: str, limits: Limits) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        refuse("a whole number of tokens from 1", path)
    return value


def _dimensions(value: Any, path: str, limits: Limits) -> int:
    if type(value) is not int or value >= 2**63:
        refuse("a whole number", path)
    if value < 1:
        raise InvalidDimensions("dimensions must be at least 1", path=path, limit=1, given=value)
    return value


def _outputs(value: Any, path: str, limits: Limits) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        refuse("a non-empty list of dense, sparse, multivector", path)
    for i, output in enumerate(value):
        if output not in ("dense", "sparse", "multivector"):
            refuse("one of dense, sparse, multivector", f"{path}[{i}]")
    if len(set(value)) != len(value):
        raise InvalidRequest("an output is named twice", path=path)
    return tuple(value)


def _labels(value: Any, path: str, limits: Limits) -> Labels:
    if not isinstance(value, list):
        refuse("a list of labels: texts, or token ids", path)
    if not 1 <= len(value) <= MAX_LABELS:
        raise InvalidRequest(
            f"1 to {MAX_LABELS} labels may be named", path=path, limit=MAX_LABELS, given=len(value)
        )
    if type(value[0]) is int:
        labels = token_ids(value, path, limits).ids
    else:
        for i, label in enumerate(value):
            if not isinstance(label, str) or not label:
                refuse("a non-empty string, like the labels before it", f"{path}[{i}]")
        labels = tuple(value)
    if len(set(labels)) != len(labels):
        raise InvalidRequest("a label is named twice", path=path)
    return labels


def _unread(value: Any, path: str, limits: Limits) -> None:
    """OpenAI's `user`: who asked, which an answer does not depend on."""
    if not isinstance(value, str):
        refuse("a string", path)


CHECKS: Final[dict[str, Check]] = {
    "model": _name,
    "input": _as_is,
    "query": _query,
    "documents": _as_is,
    "top_n": _top_n,
    "return_documents": _bool,
    "raw_scores": _bool,
    "instruction": _long_text,
    "sort": _bool,
    "labels": _labels,
    "dimensions": _dimensions,
    "aggregate": _one_of("mean"),
    "chunk_tokens": _chunk_tokens,
    "normalize": _bool,
    "outputs": _outputs,
    "encoding": _one_of("bytes", "float", "base64"),
    "encoding_format": _one_of("bytes", "float", "base64"),
    "dtype": _one_of("float32", "float16", "int8", "binary"),
    "prompt_name": _name,
    "prompt": _long_text,
    "user": _unread,
    "truncate": _one_of("error", "right", "left"),
    "priority": _one_of("interactive", "bulk"),
    "deadline_ms": _deadline_ms,
    "reply_to": _reply_to,
}

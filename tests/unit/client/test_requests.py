"""Arguments of a call that cannot be sent: refused before anything is sent, with what was expected there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from embedstream_client import _requests
from embedstream_client.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        (None, "$.input", "expected a text, token ids or a list of them, got NoneType"),
        (5, "$.input", "expected a text, token ids or a list of them, got int"),
        (b"bytes", "$.input", "expected a text, token ids or a list of them, got bytes"),
        (["a", None], "$.input[1]", "expected a text, token ids or an image, got NoneType"),
        ([["a", "b"]], "$.input[0]", "expected a text, token ids or an image"),
    ],
)
def test_what_is_no_item_is_told_what_it_should_be(given: Any, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _requests.items(given)
    assert (caught.value.path, caught.value.message) == (path, message)


@pytest.mark.parametrize(
    ("content_type", "codec"),
    [("application/json", msgspec.json), ("application/msgpack", msgspec.msgpack)],
)
def test_fields_are_put_into_a_record_and_all_else_stays(content_type: str, codec: Any) -> None:
    record = codec.encode({"id": "a", "reply_to": "list:x", "input": [1.5, "ž", None, {"k": []}]})
    found = _requests.with_fields(record, content_type, {"reply_to": "stream:y", "deadline_ms": 7})
    assert codec.decode(found) == {
        "id": "a", "reply_to": "stream:y", "deadline_ms": 7, "input": [1.5, "ž", None, {"k": []}],
    }  # fmt: skip
    for other in (b"", b"\xff\xfe", codec.encode([1]), record[:-1]):
        with pytest.raises(InvalidRequest, match="no map of names and values"):
            _requests.with_fields(other, content_type, {"a": 1})

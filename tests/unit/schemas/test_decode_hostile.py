"""Bytes that are no request: every one is a typed error, in bounded time and memory."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import tracemalloc

import pytest

from schemas.errors import (
    EmbedstreamError,
    InvalidRequest,
    ItemTooLarge,
    RecordTooLarge,
    TooDeep,
    TooManyItems,
    UndecodableRecord,
)
from schemas.requests import Limits, Text
from tests.support.wire import BOTH, decode, raw, refusal

both = pytest.mark.parametrize("content_type", BOTH)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff\x00", b"\x00\x00\x00\x00\x01{}", b"[1]", b" [1]", b"\x91\x01", b"null", b"1",
        b'"text"', b"\xc0", b"\xc1", b"\xa1a", b"{", b'{"input":', b'{"input":"a"', b"{}}",
        b'{"input":"a"} x', b"{'input':'a'}", b'{"input":"a",}', b'{"input":"\x01"}',
        b'{"input":"\xff"}', b'{"input":NaN}', b'{"input":[Infinity]}', b'{"n":-Infinity}',
        b'{"n":' + b"9" * 5000 + b"}", b"\x81", b"\x81\xa5input", b"\x81\xa5input\xa5hell",
        b"\x81\xa5input\xc1", b"\x81\xa5input\xa1a\x00", b"\x80\x80", b"\xde\x00\x01",
        b"\xdf\x00\x00\x00\x01", "{}".encode("utf-16"), b"   ",
        pickle.dumps({"input": "a"}), pickle.dumps({"input": "a"}, protocol=0),
    ],
)  # fmt: skip
def test_what_is_no_record(body):
    """E13, D08: malformed, truncated, trailing, pickled: never more than a typed error."""
    error = refusal(body, headers={"reply-to": b"embedstream.here", "request-id": b"r9"})
    assert type(error) is UndecodableRecord
    assert (error.reply_to, error.request_id) == ("embedstream.here", "r9")


def test_tombstone_and_empty_bytes_are_two_errors():
    """E14: None is a tombstone, b"" is an empty record."""
    none, empty = refusal(None), refusal(b"")
    assert type(none) is UndecodableRecord and "tombstone" in none.message
    assert type(empty) is UndecodableRecord and "empty" in empty.message


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b"[]", "list"), (b"\x90", "list"), (b"\xef\xbb\xbf[]", "neither"),
        (b"\x00\x00\x00\x00\x05abc", "schema-registry"), (b"\xff\xfe{\x00", "UTF-16"),
    ],
)  # fmt: skip
def test_message_guesses_what_the_bytes_are(body, hint):
    assert hint in refusal(body).message


def test_a_byte_order_mark_before_json_is_skipped():
    """K15"""
    for mark in (b"\xef\xbb\xbf", b"\xef\xbb\xbf \r\n"):
        assert decode(mark + b'{"input": "x"}').n_items == 1
    assert type(refusal(b"\xef\xbb\xbf\xff")) is UndecodableRecord


@both
def test_record_byte_limit_is_checked_first(content_type):
    """E12: the sizes are in the error, and nothing of the record is parsed."""
    body = raw({"input": "x" * 100}, content_type)
    error = refusal(body, limits=Limits(max_record_bytes=64), headers={"Reply-To": "embedstream.a"})
    assert type(error) is RecordTooLarge and (error.limit, error.given) == (64, len(body))
    assert error.reply_to == "embedstream.a" and error.content_type == content_type
    assert decode(body, limits=Limits(max_record_bytes=len(body))).n_items == 1


def _json_bomb(prefix: bytes, opening: bytes) -> bytes:
    return b"{" + prefix + opening * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa5input" + b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x81\xa8metadata" + b"\x91" * 100_000 + b"\xc0",
        b"\x82\xa5input\xa1a\xa8metadata" + b"\x81\xa1a" * 3_000 + b"\xc0",
        _json_bomb(b'"input":', b"["),
        _json_bomb(b'"metadata":', b'{"a":'),
        b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["mp-list", "mp-map", "mp-metadata-list", "mp-metadata-map", "js-list", "js-map", "closed"],
)
def test_nesting_bomb(body):
    assert type(refusal(body)) is TooDeep


def test_metadata_deeper_than_the_parser_but_within_its_bytes():
    """The structure check passes at 600 levels; the cap on levels must still hold."""
    metadata = b"\x81\xa1a" + b"\x91" * 600 + b"\xc0"
    error = refusal(b"\x82\xa5input\xa1a\xa8metadata" + metadata)
    assert type(error) is TooDeep and error.path == "$.metadata"


def test_nesting_bomb_from_a_deep_stack():
    """The interpreter's own stack is nearly used up when the record arrives."""

    def descend(levels: int) -> EmbedstreamError:
        if levels:
            return descend(levels - 1)
        return refusal(b'{"input":' + b"[" * 5_000)

    depth = sys.getrecursionlimit() // 2
    assert type(descend(depth)) is TooDeep


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05", b"\xdc\xff\xff",
        b"\xdd\x00\xff\xff\xff" * 500,
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", [b"\xa5input", b"\xa8metadata", b"\xa3new", b"\xa2id"])
def test_huge_declared_length_allocates_nothing(claim, field):
    body = b"\x81" + field + claim + b"\x00" * 100
    tracemalloc.start()
    try:
        error = refusal(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, InvalidRequest) and peak < 1 << 20


def test_huge_declared_map():
    assert type(refusal(b"\xdf\xff\xff\xff\xff" + b"\x00" * 50)) is InvalidRequest
    many = {f"f{i}": 0 for i in range(300)}
    for content_type in BOTH:
        error = refusal(many, content_type)
        assert (error.path, error.limit, error.given) == ("$", 256, 300)


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa5input\xdd" + struct.pack(">I", 500_000) + b"\x90" * 500_000,
        b"\x81\xa5input\x92\xa1a\xdd" + struct.pack(">I", 500_000) + b"\x90" * 500_000,
        b"\x81\xa5input\x91\xdf" + struct.pack(">I", 100_000)
        + b"".join(b"\xa5%05d\x90" % i for i in range(100_000)),
        b"\x81\xa3new\xdd" + struct.pack(">I", 500_000) + b"\x80" * 500_000,
        b"\x81\xa5input\xdd" + struct.pack(">I", 500_000) + b"\x01" * 500_000,
    ],
    ids=["lists", "lists-in-a-list", "many-names", "unknown", "ids"],
)  # fmt: skip
def test_msgpack_of_tiny_containers_is_not_built(body):
    """A container costs its sender one byte and the reader sixty: none is made before the limits."""
    tracemalloc.start()
    try:
        error = refusal(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, InvalidRequest | TooManyItems | ItemTooLarge)
    assert peak < 3 * len(body)


def test_json_of_tiny_containers_stays_within_a_multiple_of_the_record():
    body = b'{"input":[' + b"[]," * 300_000 + b"[]]}"
    tracemalloc.start()
    try:
        error = refusal(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(error) is TooManyItems and peak < 40 * len(body)


@pytest.mark.parametrize("ext", [b"\xd4\x05a", b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x01"])
@pytest.mark.parametrize("field", [b"\xa5input", b"\xa8metadata", b"\xa2id", b"\xa7outputs"])
def test_ext_types_and_timestamps_are_refused(ext, field):
    error = refusal(b"\x82\xa5model\xa1m" + field + ext)
    assert type(error) is InvalidRequest and error.path == "$." + field[1:].decode()


@pytest.mark.parametrize("where", ["metadata", "metadata-list", "input"])
def test_ext_types_inside_lists_and_maps(where):
    inner = b"\xd4\x05a"
    body = {
        "metadata": b"\x82\xa5input\xa1a\xa8metadata\x81\xa1a" + inner,
        "metadata-list": b"\x82\xa5input\xa1a\xa8metadata\x81\xa1a\x91\xc7\x00\x05",
        "input": b"\x81\xa5input\x91" + inner,
    }[where]
    assert type(refusal(body)) is InvalidRequest


@pytest.mark.parametrize("key", [b"\x01", b"\xc4\x01a", b"\xc0", b"\x90", b"\xcb" + b"\0" * 8])
def test_map_keys_must_be_strings(key):
    assert type(refusal(b"\x81" + key + b"\xa1a")) is InvalidRequest
    inside = refusal(b"\x82\xa5input\xa1a\xa8metadata\x81" + key + b"\xa1a")
    assert type(inside) is InvalidRequest and inside.path == "$.metadata"
    item = refusal(b"\x81\xa5input\x91\x81" + key + b"\xa1a")
    assert type(item) is InvalidRequest and item.path == "$.input[0]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"r","input":"a","input":"b"}',
        b'{"id":"r","input":[{"text":"a","text":"b"}]}',
        b'{"id":"r","input":"a","metadata":{"k":1,"k":2}}',
        b'{"id":"r","input":"a","metadata":{"k":{"j":1,"j":1}}}',
        b"\x83\xa2id\xa1r\xa5input\xa1a\xa5input\xa1b",
        b"\x82\xa2id\xa1r\xa5input\x91\x82\xa4text\xa1a\xa4text\xa1b",
        b"\x83\xa2id\xa1r\xa5input\xa1a\xa8metadata\x82\xa1k\x01\xa1k\x02",
    ],
)
def test_repeated_names_are_refused(body):
    error = refusal(body)
    assert type(error) is InvalidRequest and "repeated" in error.message
    assert error.request_id == "r"


def test_names_that_become_equal_by_repair_are_refused():
    names = ["\ud800", "\udfff"]
    body = raw({"input": "a", "metadata": dict.fromkeys(names, 1)})
    assert "repeated" in refusal(body).message


# ------------------------------------------------------------------------------------------ B13

REPAIRS = [
    ("a\ud800b", "a\ufffdb"),
    ("\udc00", "\ufffd"),
    ("x\ud800", "x\ufffd"),
    ("\ud83d\udc4d", "\U0001f44d"),
    ("\ud800\ud83d\udc4d", "\ufffd\U0001f44d"),
    ("\udc00\ud800", "\ufffd\ufffd"),
    ("\\ud800", "\\ud800"),
    ("\\\ud800", "\\\ufffd"),
    ("\u0000\U0010ffff\ufeff\u200b", "\u0000\U0010ffff\ufeff\u200b"),
]


@both
@pytest.mark.parametrize(("text", "expected"), REPAIRS)
def test_surrogates_have_one_rule(content_type, text, expected):
    """B13: item 1 of 3; its neighbours are untouched; pairs are joined, lone ones replaced."""
    request = decode({"input": ["zero", text, "two"]}, content_type)
    assert request.input == (Text("zero"), Text(expected), Text("two"))
    assert decode({"input": text}, content_type).input == (Text(expected),)
    assert decode({"input": [{"text": text}]}, content_type).input == (Text(expected),)


@both
@pytest.mark.parametrize(("text", "expected"), REPAIRS)
def test_surrogates_in_every_other_string(content_type, text, expected):
    """B13: the same rule for ids, queries, documents, prompts and metadata, names included."""
    fields = {
        "id": text, "query": text, "documents": [text, {"text": text, "id": text}],
        "instruction": text, "metadata": {"k" + text: [text]},
    }  # fmt: skip
    request = decode(fields, content_type)
    assert request.id == request.query == request.instruction == expected
    assert [d.text for d in request.documents] == [expected, expected]
    assert request.documents[1].id == expected
    assert request.metadata == {"k" + expected: [expected]}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (rb"\ud83d\udc4d", "\U0001f44d"), (rb"\uD83D\uDC4D", "\U0001f44d"),
        (rb"a\ud800b", "a\ufffdb"), (rb"\\ud800", r"\ud800"), (rb"\\\ud800", "\\\ufffd"),
        (rb"\ud800\ud800\udc00", "\ufffd\U00010000"), (rb"\udc00\u0041", "\ufffdA"),
        (rb"\"\ud800\"", '"\ufffd"'), (b"\xed\xa0\x80", "\ufffd"),
        (b"\xed\xa0\xbd\xed\xb1\x8d", "\U0001f44d"),
    ],
)  # fmt: skip
def test_surrogates_in_json_source(source, expected):
    """B13: by escape and by bytes."""
    assert decode(b'{"input":"' + source + b'"}').input == (Text(expected),)


@pytest.mark.parametrize("payload", [b"\xff", b"\xc3", b"\xc0\x80", b"\xf5\x80\x80\x80"])
def test_text_that_is_not_utf8_is_refused(payload):
    packed = bytes([0xA0 | len(payload)]) + payload
    assert refusal(b"\x81\xa5input" + packed).path == "$.input"
    assert refusal(b"\x81\xa5input\x92\xa1a" + packed).path == "$.input[1]"
    assert refusal(b"\x82\xa5input\xa1a\xa5model" + packed).path == "$.model"
    assert refusal(b"\x82\xa5input\xa1a\xa8metadata\x81\xa1a" + packed).path == "$.metadata"
    assert type(refusal(b"\x81" + packed + b"\xa1a")) is UndecodableRecord


# -------------------------------------------------------------------------- what is still readable


@both
def test_error_carries_what_could_be_read(content_type):
    fields = {"id": "r1", "reply_to": "embedstream.b", "metadata": {"k": 1}, "input": 5}
    error = refusal(fields, content_type)
    assert (error.request_id, error.reply_to, error.content_type, error.metadata) == (
        "r1", "embedstream.b", content_type, {"k": 1},
    )  # fmt: skip
    by_header = refusal(fields, content_type, headers={"reply-to": b"embedstream.h"})
    assert by_header.reply_to == "embedstream.h"


@both
def test_one_unreadable_part_does_not_hide_the_others(content_type):
    fields = {"id": 3, "reply_to": "embedstream.b", "metadata": "no map", "input": "a"}
    headers = {"request-id": b"r2", "deadline-ms": b"soon"}
    error = refusal(fields, content_type, headers=headers)
    assert (error.reply_to, error.metadata, error.request_id) == ("embedstream.b", None, "r2")
    assert refusal({"reply_to": 3}, content_type).reply_to is None
    assert refusal({"reply_to": "x" * 2000}, content_type).reply_to is None


@both
def test_messages_never_carry_user_text(content_type):
    """I05: the marker is in every value, and in no error."""
    marker = "zebra-marker"
    base = {"id": "r", "input": "a"}
    for field in (
        "task", "dimensions", "normalize", "outputs", "encoding", "dtype", "truncate", "priority",
        "deadline_ms", "metadata", "schema_version", "encoding_format", "top_n",
    ):  # fmt: skip
        error = refusal({**base, field: marker}, content_type)
        assert marker not in json.dumps(error.to_wire()), field
    for value in ([marker, 1], [{"image": marker}], {marker: marker}):
        error = refusal({"input": value}, content_type)
        assert marker not in json.dumps(error.to_wire())
    truncated = raw({"input": marker}, content_type)[:-1]
    assert marker not in json.dumps(refusal(truncated).to_wire())

"""The short way of an ordinary request: what it makes is what the long way makes, and it refuses nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import codec
from schemas._read_ordinary import MAX_BYTES, ordinary_request
from schemas.codec import decode_request
from schemas.errors import EmbedstreamError
from schemas.headers import MAX_REPLY_TO_BYTES, NO_HEADERS, parse_headers
from schemas.requests import Limits
from tests.support.wire_examples import golden_bytes

SMALL = Limits(
    max_items=4, max_item_bytes=120, max_record_bytes=4000, max_id_bytes=8, max_metadata_bytes=40,
    max_depth=5,
)  # fmt: skip


def outcome(body: bytes, headers: dict[str, bytes], limits: Limits) -> Any:
    """The request, or all that is told of why there is none."""
    try:
        return decode_request(body, headers, default_id="key", limits=limits)
    except EmbedstreamError as error:
        told = error.path, tuple(error.items), error.limit, error.given
        attached = error.request_id, error.reply_to, error.content_type, error.metadata
        return type(error), str(error), told, attached


def long_way(body: bytes, headers: dict[str, bytes], limits: Limits) -> Any:
    with patch.object(codec, "ordinary_request", return_value=None):
        return outcome(body, headers, limits)


def check(body: bytes, headers: dict[str, bytes] | None = None) -> None:
    for limits in (Limits(), SMALL):
        assert outcome(body, headers or {}, limits) == long_way(body, headers or {}, limits)


texts = st.text(max_size=20) | st.just("é" * 61) | st.just("x" * 121)
numbers = st.integers(-1, 3) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
plain = (
    st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=4)
    | st.sampled_from([msgpack.ExtType(5, b"x"), b"\xff", "", "embed", "cancel", "bytes", "int8"])
)  # fmt: skip
anything = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "id": st.text(max_size=12),
    "task": st.sampled_from(["embed", "embed", "classify", "rerank", "score", "cancel"]),
    "input": st.lists(texts, max_size=6) | texts,
    "model": st.text(max_size=3),
    "dimensions": numbers,
    "normalize": st.booleans(),
    "encoding": st.sampled_from(["bytes", "float", "base64", "hex"]),
    "encoding_format": st.sampled_from(["bytes", "float"]),
    "dtype": st.sampled_from(["float32", "float16", "int8", "binary", "float64"]),
    "truncate": st.sampled_from(["error", "right", "left", "middle"]),
    "priority": st.sampled_from(["interactive", "bulk", "low"]),
    "deadline_ms": numbers,
    "reply_to": st.text(max_size=8) | st.just("x" * (MAX_REPLY_TO_BYTES + 1)),
    "prompt_name": st.text(max_size=3),
    "prompt": st.text(max_size=3),
    "outputs": st.lists(st.sampled_from(["dense", "sparse"]), max_size=3),
    "metadata": st.dictionaries(st.text(max_size=4), anything, max_size=3),
    "schema_version": st.integers(0, 3),
    "user": st.text(max_size=3),
    "query": texts,
    "documents": st.lists(texts, max_size=3),
    "no field": plain,
}


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[Any, Any]]:
    """Names and values as they come: a few wrong, a few twice, a few null."""
    found: list[tuple[Any, Any]] = [("input", draw(likely["input"]))]
    for name in draw(st.lists(st.sampled_from(sorted(likely)), max_size=7)):
        odd = draw(st.integers(0, 9))
        found.append((name, draw(anything) if odd == 0 else draw(likely[name])))
    return draw(st.permutations(found))


def packed(found: list[tuple[Any, Any]]) -> bytes:
    packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")
    packer.pack_map_header(len(found))
    for name, value in found:
        packer.pack(name)
        packer.pack(value)
    return bytes(packer.bytes())


headers = st.dictionaries(
    st.sampled_from(["content-type", "reply-to", "request-id", "deadline-ms", "traceparent", "x"]),
    st.sampled_from(
        [b"", b"application/msgpack", b"application/json", b"17", b"embedstream.x", b"\xff"]
    ),
    max_size=3,
)
thorough = settings(deadline=None, max_examples=600)


@thorough
@given(found=pairs(), headers=headers)
def test_both_ways_agree_on_any_fields(
    found: list[tuple[Any, Any]], headers: dict[str, bytes]
) -> None:
    check(packed(found), headers)


@thorough
@given(found=pairs(), data=st.data())
def test_both_ways_agree_on_damaged_records(found: list[tuple[Any, Any]], data: st.DataObject) -> None:  # fmt: skip
    body = bytearray(packed(found))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "more", "insert"]))
        if kind == "flip":
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del body[max(1, at) :]
        elif kind == "more":
            body += bytes([data.draw(st.integers(0, 255))])
        else:
            body[at:at] = bytes([data.draw(st.integers(0, 255))])
    check(bytes(body))


@thorough
@given(body=st.binary(max_size=60), first=st.integers(0x80, 0x8F))
def test_both_ways_agree_on_random_bytes(body: bytes, first: int) -> None:
    check(bytes([first]) + body)


@pytest.mark.parametrize("name", sorted(golden_bytes()))
def test_both_ways_agree_on_every_golden_record(name: str) -> None:
    check(golden_bytes()[name])


ORDINARY = {
    "id": "r",
    "task": "embed",
    "input": ["a", "b"],
    "model": "m",
    "dimensions": 8,
    "normalize": True,
    "encoding": "base64",
    "dtype": "float16",
    "truncate": "left",
    "priority": "bulk",
    "deadline_ms": 17,
    "reply_to": "embedstream.x",
    "prompt_name": "query",
    "metadata": {"a": [1, None, b"x"]},
}


def short(body: bytes, limits: Limits = Limits()) -> Any:
    return ordinary_request(body, NO_HEADERS, "key", limits)


def test_an_ordinary_record_is_read_the_short_way() -> None:
    for n in range(1, len(ORDINARY) + 1):
        body = msgpack.packb(dict(list(ORDINARY.items())[:n]))
        assert (short(body) is not None) == (n >= 3)
        check(body)
    assert short(msgpack.packb({"input": "one text"})).id == "key"


def test_headers_beat_the_body_where_they_do_the_long_way() -> None:
    given_headers = {"reply-to": b"embedstream.y", "deadline-ms": b"99", "request-id": b"h"}
    found = parse_headers({**given_headers, "traceparent": b"00-x"})
    request = ordinary_request(msgpack.packb(ORDINARY), found, "key", Limits())
    assert request is not None
    assert (request.id, request.reply_to, request.deadline_ms) == ("r", "embedstream.y", 99)
    check(msgpack.packb(ORDINARY), given_headers)


@pytest.mark.parametrize(
    "change",
    [
        {"input": []}, {"input": None}, {"input": [1]}, {"input": [["a"]]}, {"input": ["a", 1]},
        {"id": ""}, {"id": None}, {"id": "x" * 257}, {"id": 1}, {"model": ""}, {"prompt_name": ""},
        {"task": "classify"}, {"task": None}, {"dimensions": 0}, {"dimensions": 2**63},
        {"dimensions": 8.0}, {"dimensions": True}, {"normalize": 1}, {"deadline_ms": -1},
        {"deadline_ms": 1.0}, {"reply_to": ""}, {"reply_to": "x" * (MAX_REPLY_TO_BYTES + 1)},
        {"encoding": "hex"}, {"encoding_format": "float"}, {"metadata": []}, {"metadata": None},
        {"metadata": {"a": float("nan")}}, {"metadata": {"a": "x" * 20_000}}, {"user": "u"},
        {"schema_version": 1}, {"outputs": ["dense"]}, {"unknown": 1}, {"input": ["x"] * 2049},
        {"input": "x" * MAX_BYTES},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_is_not_ordinary_is_left_to_the_long_way(change: dict[str, Any]) -> None:
    body = msgpack.packb({**ORDINARY, **change})
    assert short(body) is None
    check(body)


def test_a_name_that_is_repeated_is_left_to_the_long_way() -> None:
    body = packed([("id", "a"), ("input", "x"), ("id", "a")])
    assert short(body) is None
    check(body)

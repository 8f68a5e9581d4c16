"""Replies: what is written, what is refused, how large ones are cut, what a reader survives."""

from __future__ import annotations

import base64
import json
import math
import struct

import msgpack
import msgspec
import pytest

from schemas._encode import _is_plain, _plain_to_wire, item_to_wire
from schemas.codec import decode_reply, encode_reply, join_parts, split_reply
from schemas.errors import (
    BY_CODE,
    Internal,
    InvalidRequest,
    NonFinite,
    Overloaded,
    RecordTooLarge,
    TooDeep,
    TooLong,
    UndecodableRecord,
)
from schemas.results import (
    FailureReply,
    ItemReply,
    ModelRef,
    Reply,
    Sparse,
    Timings,
    Usage,
)
from tests.support.wire import BOTH
from tests.support.wire_examples import plain

both = pytest.mark.parametrize("content_type", BOTH)
MODEL = ModelRef("m", "f", "float32")
NOT_FINITE = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


def vector(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def reply_of(n: int, *, dimensions: int = 4, **kwargs) -> Reply:
    items = [
        ItemReply(index=i, embedding=vector(*[i + 0.5] * dimensions), tokens=3, truncated=False)
        for i in range(n)
    ]
    fields = {
        "id": "r", "task": "embed", "model": MODEL, "items": items, "n": n, "usage": Usage(3, 3),
        "dimensions": dimensions, "dtype": "float32", **kwargs,
    }  # fmt: skip
    return Reply(**fields)


def rerank_of(*items: ItemReply, **kwargs) -> Reply:
    return Reply(
        id="r", task="rerank", model=MODEL, items=list(items), n=len(items), usage=Usage(1, 1), **kwargs
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ encode


def test_vectors_in_each_encoding():
    """D01: bytes, numbers and base64 are the same little-endian float32."""
    reply = reply_of(1)
    data = reply.items[0].embedding
    packed = msgpack.unpackb(encode_reply(reply))
    assert packed["data"][0]["embedding"] == data
    floats = msgpack.unpackb(encode_reply(reply, encoding="float"))
    assert floats["data"][0]["embedding"] == [0.5] * 4
    text = json.loads(encode_reply(reply, content_type="application/json", encoding="base64"))
    assert base64.b64decode(text["data"][0]["embedding"]) == data
    numbers = json.loads(encode_reply(reply, content_type="application/json"))
    assert numbers["data"][0]["embedding"] == [0.5] * 4


def test_json_cannot_carry_bytes():
    with pytest.raises(InvalidRequest, match="base64"):
        encode_reply(reply_of(1), content_type="application/json", encoding="bytes")


@both
def test_index_count_usage_and_normalized_are_always_there(content_type):
    """D02, D05, D10: every item has its index, the reply its count, usage and state."""
    reply = msgspec.structs.replace(reply_of(3), normalized=True)
    body = encode_reply(reply, content_type=content_type)
    wire = json.loads(body) if content_type == "application/json" else msgpack.unpackb(body)
    assert [item["index"] for item in wire["data"]] == [0, 1, 2] and wire["n"] == 3
    assert wire["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [item["tokens"] for item in wire["data"]] == [3, 3, 3]
    assert wire["normalized"] is True


@both
@NOT_FINITE
@pytest.mark.parametrize(
    "where",
    ["embedding", "multivector", "sparse", "scores", "relevance", "scale", "scales"],
)
def test_non_finite_result_is_refused_and_named(content_type, bad, where):
    """A04: NaN in one result never reaches the encoder; the error names the item."""
    broken = {
        "embedding": ItemReply(index=7, embedding=vector(1.0, bad)),
        "multivector": ItemReply(index=7, multivector=[vector(1.0), vector(bad)]),
        "sparse": ItemReply(index=7, sparse=Sparse([1], [bad])),
        "scores": ItemReply(index=7, scores={"a": bad}),
        "relevance": ItemReply(index=7, relevance_score=bad),
        "scale": ItemReply(index=7, scale=bad),
        "scales": ItemReply(index=7, scales=[1.0, bad]),
    }[where]
    reply = msgspec.structs.replace(reply_of(2), items=[*reply_of(1).items, broken])
    with pytest.raises(NonFinite) as caught:
        encode_reply(reply, content_type=content_type)
    assert caught.value.items == (7,)


@both
@NOT_FINITE
def test_non_finite_metadata_and_timings_are_refused(content_type, bad):
    """A04: not even outside the results."""
    with pytest.raises(InvalidRequest) as caught:
        encode_reply(reply_of(1, metadata={"a": [bad]}), content_type=content_type)
    assert caught.value.path == "$.metadata"
    with pytest.raises(NonFinite):
        encode_reply(reply_of(1, timings=Timings(bad, 1.0, 1.0)), content_type=content_type)
    with pytest.raises(InvalidRequest):
        failure = FailureReply(id="r", error=Internal("x"), metadata={"a": bad})
        encode_reply(failure, content_type=content_type)


def test_bytes_in_metadata_do_not_turn_into_text():
    reply = reply_of(1, metadata={"a": [{"b": b"\x00"}]})
    assert decode_reply(encode_reply(reply)).metadata == reply.metadata
    with pytest.raises(InvalidRequest) as caught:
        encode_reply(reply, content_type="application/json")
    assert caught.value.path == "$.metadata"


@pytest.mark.parametrize("value", [{"a": object()}, {"a": (1,)}, {1: 2}, {"a": 2**64}, {"a": {1}}])
def test_metadata_of_other_types_is_refused(value):
    with pytest.raises(InvalidRequest):
        encode_reply(reply_of(1, metadata=value))


@both
def test_metadata_that_a_route_allowed_is_written_whatever_the_default_depth(content_type):
    metadata: dict = {}
    for _ in range(40):
        metadata = {"a": metadata}
    reply = reply_of(1, metadata=metadata)
    assert decode_reply(encode_reply(reply, content_type=content_type)).metadata == metadata
    for _ in range(3_000):
        metadata = {"a": metadata}
    with pytest.raises(TooDeep):
        encode_reply(reply_of(1, metadata=metadata), content_type=content_type)


@both
def test_lone_surrogates_are_never_written(content_type):
    """B13: the same rule on the way out."""
    body = encode_reply(
        rerank_of(ItemReply(index=0, relevance_score=1.0, document="a\ud800b", id="\udc00")),
        content_type=content_type,
    )
    item = decode_reply(body).items[0]
    assert (item.document, item.id) == ("a\ufffdb", "\ufffd")


def test_value_beyond_64_bits_is_a_typed_error():
    with pytest.raises(InvalidRequest):
        encode_reply(msgspec.structs.replace(reply_of(1), usage=Usage(2**70, 1)))


@both
def test_same_reply_same_bytes(content_type):
    reply = reply_of(5, metadata={"z": 1, "a": {"c": 2, "b": 3}})
    first = encode_reply(reply, content_type=content_type)
    assert first == encode_reply(decode_reply(first), content_type=content_type)


# ------------------------------------------------------------------------------------------- split


@both
@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("n", [1, 2, 17, 300])
@pytest.mark.parametrize("limit", [600, 1_000, 10_000])
def test_split_parts_fit_and_join_to_the_same_reply(content_type, encoding, n, limit):
    """E12: numbered parts, each within the limit, together the whole."""
    reply = reply_of(n, timings=Timings(0.123456789, 1.0, 2.0), metadata={"k": "v"})
    bodies = split_reply(reply, limit, content_type=content_type, encoding=encoding)
    assert all(len(body) <= limit for body in bodies)
    parts = [decode_reply(body) for body in bodies]
    if len(parts) > 1:
        assert [(p.part, p.parts, p.n) for p in parts] == [
            (i, len(parts), n) for i in range(len(parts))
        ]
        assert all(p.metadata == {"k": "v"} and p.usage == reply.usage for p in parts)
    else:
        assert (parts[0].part, parts[0].parts) == (None, None)
    assert join_parts(parts[::-1]) == reply


def test_large_reply_under_the_default_kafka_limit():
    """E12: 300 x 1,024 floats are 1.2 MB, the broker takes 1 MB."""
    bodies = split_reply(reply_of(300, dimensions=1024), 1_000_000)
    assert len(bodies) == 2 and max(map(len, bodies)) <= 1_000_000
    assert len(join_parts([decode_reply(b) for b in bodies]).items) == 300


@both
def test_reply_that_fits_is_not_split(content_type):
    reply = reply_of(3)
    bodies = split_reply(reply, 10_000, content_type=content_type)
    assert bodies == [encode_reply(reply, content_type=content_type)]


@both
def test_cut_does_not_depend_on_timings(content_type):
    """E12: a reply sent again after a crash is cut at the same places."""
    cuts = {
        tuple(
            tuple(item.index for item in decode_reply(body).items)
            for body in split_reply(reply_of(40, timings=timings), 900, content_type=content_type)
        )
        for timings in (Timings(0.0, 1.0, 2.0), Timings(1 / 3, 123456.789, 1e-17))
    }
    assert len(cuts) == 1


@both
def test_whether_a_reply_is_cut_does_not_depend_on_timings(content_type):
    """E12: nor at the very limit, where a few digits more would tip it."""
    narrow, wide = (
        reply_of(40, timings=t) for t in (Timings(0.0, 0.0, 0.0), Timings(*[1 / 3] * 3))
    )
    size = len(encode_reply(wide, content_type=content_type))
    outcomes = set()
    for limit in range(size - 70, size + 120):
        parts = [split_reply(r, limit, content_type=content_type) for r in (narrow, wide)]
        assert len(parts[0]) == len(parts[1])
        assert all(len(body) <= limit for bodies in parts for body in bodies)
        outcomes.add(len(parts[0]))
    assert outcomes == {1, 2}


@both
@pytest.mark.parametrize("n", [15, 16, 17, 60])
def test_parts_fit_at_every_limit(content_type, n):
    """E12: list headers and separators are counted, byte by byte."""
    reply = reply_of(n)
    for limit in range(1_000, 1_130):
        bodies = split_reply(reply, limit, content_type=content_type)
        assert all(len(body) <= limit for body in bodies)


@both
def test_item_larger_than_the_limit_becomes_its_own_error(content_type):
    """E12: with limit and given; its neighbours are answered."""
    small, big = reply_of(2).items, ItemReply(index=1, embedding=vector(*[0.5] * 2_000))
    reply = msgspec.structs.replace(reply_of(3), items=[small[0], big, small[1]])
    bodies = split_reply(reply, 2_000, content_type=content_type)
    assert all(len(body) <= 2_000 for body in bodies)
    items = [item for body in bodies for item in decode_reply(body).items]
    assert items[0].embedding == small[0].embedding and items[2].embedding == small[1].embedding
    error = items[1].error
    assert type(error) is RecordTooLarge and error.limit == 2_000
    assert error.given is not None and error.given > 8_000 and error.items == (1,)


def test_reply_whose_metadata_alone_exceeds_the_limit():
    with pytest.raises(RecordTooLarge) as caught:
        split_reply(reply_of(1, metadata={"a": "x" * 5_000}), 2_000)
    assert caught.value.limit == 2_000 and caught.value.given > 5_000
    with pytest.raises(RecordTooLarge):
        split_reply(reply_of(1, dimensions=500), len(encode_reply(reply_of(0))) + 40)


def test_split_refuses_non_finite_like_encode():
    """A04: no way around the check."""
    broken = ItemReply(index=3, embedding=vector(math.nan))
    with pytest.raises(NonFinite):
        split_reply(msgspec.structs.replace(reply_of(1), items=[broken]), 100_000)


def test_join_refuses_incomplete_or_foreign_parts():
    """D02: a missing tail is an error, not a shorter answer."""
    parts = [decode_reply(body) for body in split_reply(reply_of(20), 500)]
    assert len(parts) > 2
    assert join_parts([*parts, parts[0]]) == reply_of(20)  # at least once: a part may come twice
    replace = msgspec.structs.replace
    for bad in (
        [],
        parts[:-1],
        parts[1:],
        [*parts[:-1], replace(parts[-1], id="other")],
        [*parts[:-1], replace(parts[-1], parts=99)],
        [*parts[:-1], replace(parts[-1], items=parts[-1].items[:-1])],
        [*parts[:-1], replace(parts[-1], items=parts[0].items)],
    ):
        with pytest.raises(InvalidRequest):
            join_parts(bad)


# ------------------------------------------------------------------------------------------ decode


@both
def test_fields_of_a_newer_service_are_skipped(content_type):
    """Rule 11: records evolve by addition, so an old reader must read a new reply."""
    body = encode_reply(reply_of(1), content_type=content_type)
    load, dump = (
        (json.loads, lambda w: json.dumps(w).encode())
        if content_type == "application/json"
        else (msgpack.unpackb, msgpack.packb)
    )
    wire = load(body)
    wire["schema_version"] = 2
    wire["new"] = {"deep": [[1]]}
    wire["model"]["revision"] = "x"
    wire["usage"]["cached_tokens"] = 1
    wire["data"][0]["new"] = [None]
    assert plain(decode_reply(dump(wire))) == plain(reply_of(1))


@both
@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_code_round_trips(content_type, code):
    error = BY_CODE[code]("text", path="$.input[3]", items=[3], limit=5, given=9)
    failure = FailureReply(id="r", error=error, metadata={"a": 1})
    decoded = decode_reply(encode_reply(failure, content_type=content_type))
    assert plain(decoded) == plain(failure)
    item = rerank_of(ItemReply(index=0, id="d", error=error))
    assert plain(decode_reply(encode_reply(item, content_type=content_type))) == plain(item)


@pytest.mark.parametrize("retryable", [True, False])
def test_unknown_code_of_a_newer_service_keeps_code_and_retryable(retryable):
    wire = {"id": "r", "error": {"code": "quota", "message": "m", "retryable": retryable, "x": 1}}
    error = decode_reply(json.dumps(wire).encode()).error
    assert type(error) is Internal
    assert (error.code, error.retryable, error.message) == ("quota", retryable, "m")
    assert Internal("x").code == "internal" and Internal("x").retryable  # the class is untouched


def test_malformed_error_fields_do_not_break_the_reader():
    wire = {"id": "r", "error": {"code": "too_long", "items": "x", "limit": "y", "path": 3}}
    error = decode_reply(json.dumps(wire).encode()).error
    assert type(error) is TooLong and (error.items, error.limit, error.path) == ((), None, None)
    assert type(decode_reply(b'{"id":"r","error":{}}').error) is Internal


def test_long_message_is_cut_to_two_kib():
    error = Overloaded("é" * 5_000)
    assert len(error.message.encode()) <= 2_048 and error.message.endswith("...")


GOOD = msgpack.unpackb(encode_reply(reply_of(1)))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"id": 3}, "$.id"), ({"task": "x"}, "$.task"), ({"task": None}, "$.task"),
        ({"data": None}, "$.data"), ({"n": "1"}, "$.n"), ({"n": None}, "$.n"),
        ({"usage": None}, "$.usage"), ({"model": {"name": "m"}}, "$.model"),
        ({"dtype": "float8"}, "$.dtype"), ({"data": [{"index": "0"}]}, "$.data[0].index"),
        ({"data": [{"index": 0, "embedding": b"abc"}]}, "$.data[0]"),
        ({"data": [{"index": 0, "embedding": {"a": 1}}]}, "$.data[0]"),
        ({"data": [{"index": 0, "embedding": "@"}]}, "$.data[0]"),
        ({"metadata": [1]}, "$.metadata"),
    ],
)  # fmt: skip
def test_wrong_reply_field_is_named(change, path):
    with pytest.raises(InvalidRequest) as caught:
        decode_reply(msgpack.packb({**GOOD, **change}))
    assert caught.value.path == path


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xc1",
        b"{",
        b'{"id":NaN}',
        b"\x81\xa2id",
        encode_reply(reply_of(1)) + b"\x00",
        b'{"id":"\xff"}',
    ],
)
def test_bytes_that_are_no_reply(body):
    with pytest.raises(UndecodableRecord):
        decode_reply(body)


@pytest.mark.parametrize(
    "body", [b"\x81\xa3new" + b"\x91" * 100_000, b'{"metadata":{"a":' + b"[" * 100_000]
)
def test_nesting_bomb_in_a_reply(body):
    with pytest.raises(TooDeep):
        decode_reply(body)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_vector_in_a_reply_is_refused(value):
    """A03: not even a broken peer can hand NaN to our client."""
    for item in (
        {"index": 0, "embedding": [1.0, value]},
        {"index": 0, "embedding": vector(value)},
        {"index": 0, "relevance_score": value},
        {"index": 0, "scores": {"a": value}},
    ):
        with pytest.raises(NonFinite):
            decode_reply(msgpack.packb({**GOOD, "data": [item]}))


def test_content_type_that_contradicts_the_reply():
    """D08: the header is checked on this side too."""
    with pytest.raises(UndecodableRecord):
        decode_reply(encode_reply(reply_of(1)), {"content-type": b"application/json"})


def test_joining_costs_nothing_when_a_part_announces_too_many() -> None:
    """`parts` is read from a record: it must not decide how much memory is taken."""
    part = Reply(id="a", task="embed", model=ModelRef("m", "f", "float32"), items=[], n=0, usage=Usage(1, 1),
                 part=0, parts=2**62)  # fmt: skip
    with pytest.raises(InvalidRequest, match="missing"):
        join_parts([part])


@pytest.mark.parametrize("tokens", [0, 3, 70_000])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_short_way_of_a_plain_item_writes_what_the_long_one_does(
    tokens: int, truncated: bool
) -> None:
    reply = reply_of(2)
    item = ItemReply(index=7, embedding=vector(1, 2, 3), tokens=tokens, truncated=truncated)
    assert _is_plain(item)
    short, long = _plain_to_wire(item, "float32"), item_to_wire(item, reply, BOTH[0], "bytes")
    assert list(short.items()) == list(long.items())
    others = (("id", "x"), ("document", "d"), ("scale", 0.5), ("scales", [1.0]),
                        ("sparse", Sparse([1], [1.0])), ("multivector", [b""]), ("spans", [(0, 1)]),
                        ("scores", {"a": 1.0}), ("relevance_score", 0.0), ("error", TooLong("x")),
                        ("tokens", None), ("truncated", None), ("embedding", None))  # fmt: skip
    for name, value in others:
        assert not _is_plain(msgspec.structs.replace(item, **{name: value}))
    assert {name for name, _ in others} == {*ItemReply.__struct_fields__} - {"index"}

"""Header names, values, and their rank beside the body."""

from __future__ import annotations

import pytest

from schemas import headers as h
from schemas.codec import decode_request
from schemas.errors import EmbedstreamError, Internal, InvalidRequest, UndecodableRecord
from schemas.results import FailureReply
from tests.support.wire import BOTH, decode, raw, refusal

EMBED = {"input": "a"}


@pytest.mark.parametrize("content_type", BOTH)
def test_header_beats_body_for_reply_to_and_deadline(content_type):
    body = {**EMBED, "reply_to": "embedstream.body", "deadline_ms": 5}
    request = decode(
        body, content_type, headers={"reply-to": b"embedstream.head", "deadline-ms": b"9"}
    )
    assert (request.reply_to, request.deadline_ms) == ("embedstream.head", 9)
    request = decode(body, content_type)
    assert (request.reply_to, request.deadline_ms) == ("embedstream.body", 5)


def test_names_in_any_case_and_str_values():
    request = decode(
        EMBED,
        headers={
            "Content-Type": "application/msgpack", "REPLY-TO": "embedstream.é",
            "Request-Id": b"r", "Deadline-Ms": " 12 ", "TraceParent": b"00-ab-cd-01",
            "x-other": b"\xff",
        },
    )  # fmt: skip
    assert (request.reply_to, request.id) == ("embedstream.é", "r")
    assert (request.deadline_ms, request.traceparent) == (12, "00-ab-cd-01")


def test_headers_may_be_none():
    """E14: a record without headers."""
    assert decode_request(raw(EMBED), None, default_id="d").id == "d"
    with pytest.raises(UndecodableRecord):
        decode_request(b"", None, default_id="d")


def test_empty_header_values_count_as_absent():
    request = decode({**EMBED, "reply_to": "b"}, headers=dict.fromkeys(h.REQUEST_HEADERS, b""))
    assert (request.id, request.reply_to, request.deadline_ms) == ("default-id", "b", None)


@pytest.mark.parametrize(
    "value", [b"soon", b"-1", b"1.5", b"1e3", b"\xff", b"9223372036854775808", b"9" * 5000, "²"]
)
def test_bad_deadline_header(value):
    error = refusal(EMBED, headers={"deadline-ms": value})
    assert type(error) is InvalidRequest and error.path == "headers.deadline-ms"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reply-to", b"\xff"),
        ("request-id", b"\xff"),
        ("reply-to", b"x" * 1025),
        ("reply-to", "\ud800"),
    ],
)
def test_unreadable_header(name, value):
    error = refusal({**EMBED, "id": "r"}, headers={name: value})
    assert type(error) is InvalidRequest and error.path == f"headers.{name}"
    assert error.request_id == "r"


def test_request_id_header_obeys_the_id_cap():
    error = refusal(EMBED, headers={"request-id": b"x" * 257})
    assert error.path == "headers.request-id" and error.limit == 256


@pytest.mark.parametrize("value", [b"\xff", b"a\nb", b"x" * 300])
def test_bad_traceparent_is_dropped(value):
    """I04: tracing must never fail a request."""
    assert decode(EMBED, headers={"traceparent": value}).traceparent is None


@pytest.mark.parametrize(
    ("value", "content_type"),
    [
        (b"application/json", BOTH[1]), (b"Application/JSON; charset=UTF-8", BOTH[1]),
        (b"application/json;charset=\"utf-8\"", BOTH[1]), (b"application/x-msgpack", BOTH[0]),
        (b"application/vnd.msgpack", BOTH[0]), ("application/msgpack", BOTH[0]),
    ],
)  # fmt: skip
def test_accepted_content_types(value, content_type):
    request = decode(raw(EMBED, content_type), headers={"content-type": value})
    assert request.content_type == content_type


@pytest.mark.parametrize(
    "value",
    [
        b"text/plain",
        b"application/x-python-pickle",
        b"json",
        b"\xff",
        b"application/json; charset=latin-1",
    ],
)
def test_unknown_content_type(value):
    """D08: the codec is named in a header; an unknown one is refused, with an address."""
    error = refusal(raw({**EMBED, "id": "r", "reply_to": "b"}), headers={"content-type": value})
    assert type(error) is UndecodableRecord and error.path == "headers.content-type"
    assert (error.request_id, error.reply_to) == ("r", "b")


@pytest.mark.parametrize(("declared", "actual"), [BOTH, BOTH[::-1]])
def test_header_that_contradicts_the_bytes(declared, actual):
    """D08: msgpack to a JSON reader and the reverse."""
    error = refusal(raw(EMBED, actual), headers={"content-type": declared.encode()})
    assert type(error) is UndecodableRecord
    assert declared in error.message and actual in error.message


@pytest.mark.parametrize("body", [b'{"input":"a"}', b' \r\n\t{"input":"a"}'])
def test_first_byte_decides_without_a_header(body):
    assert decode(body).content_type == "application/json"
    assert decode(raw(EMBED)).content_type == "application/msgpack"


def test_salvage_leaves_out_what_is_unreadable():
    found = h.salvage_headers(
        {"Reply-To": b"a", "deadline-ms": b"x", "content-type": b"pickle", "request-id": b"\xff"}
    )
    assert found == h.RecordHeaders(reply_to="a")


def test_reply_headers_pass_the_trace_on():
    """I04: each reply carries its own request's traceparent."""
    reply = FailureReply(id="ré", error=Internal("x"))
    assert h.reply_headers(reply.id, "application/json", traceparent="00-ab-cd-01") == {
        "content-type": b"application/json",
        "request-id": "ré".encode(),
        "traceparent": b"00-ab-cd-01",
    }
    assert "traceparent" not in h.reply_headers(reply.id, "application/json")


def test_dead_letter_names_are_distinct_and_lower_case():
    names = {*h.DEAD_LETTER_HEADERS, *h.REQUEST_HEADERS}
    assert len(names) == 10 and all(name == name.lower() for name in names)
    assert {h.KIND_FAILED, h.KIND_UNPROCESSABLE} == {"failed", "unprocessable"}


def test_errors_without_a_request_carry_nothing():
    error = EmbedstreamError("x")
    assert (error.request_id, error.reply_to, error.content_type, error.metadata) == (None,) * 4

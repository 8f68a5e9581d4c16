"""Version 1 on disk: bytes that every later version must read, and that this one writes."""

from __future__ import annotations

import json

import msgpack
import pytest

from schemas.codec import decode_reply, decode_request, encode_request
from schemas.requests import CancelRequest
from tests.support.wire_examples import (
    GOLDEN,
    SUFFIX,
    golden_bytes,
    plain,
    replies,
    requests,
)

FILES = golden_bytes()
FORMATS = list(SUFFIX.items())


def test_no_golden_file_is_missing_or_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == {
        *FILES,
        "openai-embeddings.json",
        "jina-rerank.json",
    }


@pytest.mark.parametrize("name", sorted(FILES))
def test_encoder_gives_the_golden_bytes(name):
    assert FILES[name] == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize(("content_type", "suffix"), FORMATS)
@pytest.mark.parametrize("name", sorted(requests("application/json")))
def test_golden_request_decodes_to_the_expected_values(name, content_type, suffix):
    expected = requests(content_type)[name]
    body = (GOLDEN / f"request-{name}.{suffix}").read_bytes()
    decoded = decode_request(body, encode_request(expected)[1], default_id="unused")
    assert decoded == expected and type(decoded) is type(expected)


@pytest.mark.parametrize(("content_type", "suffix"), FORMATS)
@pytest.mark.parametrize("name", sorted(replies()))
def test_golden_reply_decodes_to_the_expected_values(name, content_type, suffix):
    body = (GOLDEN / f"reply-{name}.{suffix}").read_bytes()
    decoded = decode_reply(body, {"content-type": content_type.encode()})
    assert plain(decoded) == plain(replies()[name][0])


def test_golden_cancel():
    body = (GOLDEN / "request-cancel.msgpack").read_bytes()
    assert decode_request(body, {}, default_id="x") == CancelRequest(id="r-1")


def test_field_names_on_the_wire():
    """The names that clients in other languages read, spelled out once."""
    reply = msgpack.unpackb((GOLDEN / "reply-embed-default.msgpack").read_bytes())
    assert list(reply) == [
        "id", "task", "model", "object", "data", "n", "dimensions", "dtype", "normalized",
        "prompt", "usage", "timings", "metadata",
    ]  # fmt: skip
    assert list(reply["data"][0]) == [
        "index", "embedding", "sparse", "multivector", "tokens", "truncated",
    ]  # fmt: skip
    assert reply["data"][1] == {
        "index": 1,
        "error": {
            "code": "too_long", "message": "551 tokens", "retryable": False,
            "path": "$.input[1]", "items": [1], "limit": 512, "given": 551,
        },
    }  # fmt: skip
    part = json.loads((GOLDEN / "reply-embed-part.json").read_bytes())
    assert (part["part"], part["parts"], part["n"]) == (1, 3, 3)
    failure = json.loads((GOLDEN / "reply-failure.json").read_bytes())
    assert list(failure) == ["id", "error", "metadata"]


def test_openai_and_jina_bodies_are_records_as_they_are():
    embeddings = decode_request(
        (GOLDEN / "openai-embeddings.json").read_bytes(), {}, default_id="k"
    )
    assert (embeddings.task, embeddings.encoding, embeddings.dimensions) == ("embed", "base64", 256)
    rerank = decode_request((GOLDEN / "jina-rerank.json").read_bytes(), {}, default_id="k")
    assert (rerank.task, rerank.top_n, rerank.n_items) == ("rerank", 3, 2)

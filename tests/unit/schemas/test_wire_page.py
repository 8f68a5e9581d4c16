"""docs/wire-format.md is the contract that users read: it must be complete, and its examples work."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import msgpack
import msgspec
import pytest

from schemas import headers
from schemas.codec import decode_reply, decode_request, encode_reply
from schemas.errors import ALL_ERRORS, BY_CODE
from schemas.requests import Limits
from schemas.results import FailureReply, ItemReply, Reply
from schemas.validation import ALL_FIELDS
from tests.support.wire_examples import replies

PAGE = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text()
FENCES = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def section(title: str) -> str:
    return re.split(r"\n##+ ", PAGE.split(f"## {title}\n", 1)[1])[0]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by the name in backticks that they begin with."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([a-z_-]+)`", cells[0]) if line.startswith("| `") else ():
            found[name] = cells[1:]
    return found


def test_every_error_code_has_its_row():
    table = rows(section("Errors"))
    assert set(table) == set(BY_CODE)
    for error in ALL_ERRORS:
        assert table[error.code][0] == ("yes" if error.retryable else "no"), error.code


def test_every_request_field_has_its_row():
    assert set(rows(section("Requests"))) == ALL_FIELDS


def test_every_reply_field_has_its_row():
    wire = {*rows(section("Replies"))}
    for struct_ in (Reply, FailureReply, ItemReply):
        assert set(struct_.__struct_fields__) - {"items"} <= wire


def test_every_limit_has_its_row_with_its_default():
    table = rows(section("Limits"))
    assert set(table) == set(Limits.__struct_fields__)
    for name, value in msgspec.structs.asdict(Limits()).items():
        number, _, unit = table[name][0].partition(" ")
        assert int(number) * {"": 1, "KiB": 1024, "MiB": 1024**2}[unit] == value, name
        assert table[name][2].strip("`") in BY_CODE


def test_every_header_is_named():
    names = (*headers.REQUEST_HEADERS, *headers.DEAD_LETTER_HEADERS)
    assert [name for name in names if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("source", [text for kind, text in FENCES if kind == "json"])
def test_json_examples_are_records(source):
    if '"error"' in source:
        assert decode_reply(source.encode()).error.items == (7, 42)
        return
    from_json = decode_request(source.encode(), {}, default_id="d")
    from_msgpack = decode_request(msgpack.packb(json.loads(source)), {}, default_id="d")
    assert type(from_json) is type(from_msgpack) and from_json.id == from_msgpack.id


def test_what_differs_from_openais_reply_is_what_the_page_says():
    """Two changes make an embed reply one of OpenAI's: its fields, and the fields of its entries."""
    assert "a reader that wants OpenAI's shape sets these two" in " ".join(PAGE.split())
    sent = json.loads(encode_reply(replies()["embed-part"][0], content_type="application/json"))
    shaped = {**sent, "model": sent["model"]["name"]}
    shaped["data"] = [{"object": "embedding", **entry} for entry in sent["data"]]
    assert shaped["object"] == "list" and isinstance(shaped["model"], str)
    assert set(shaped["usage"]) == {"prompt_tokens", "total_tokens"}
    for entry in shaped["data"]:
        assert {"object", "index", "embedding"} <= set(entry)
        assert isinstance(entry["embedding"], list)


def snippet(word: str) -> str:
    return next(text for kind, text in FENCES if kind == "python" and word in text)


def test_kafka_snippet(monkeypatch, capsys):
    """The snippet runs as printed, against a client that records what it sends."""
    sent = []

    class Client:
        def __init__(self, *topics, **options):
            self.topics = topics

        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            return None

        async def send_and_wait(self, topic, value, key, headers):
            sent.append((topic, value, key, headers))

        async def __aiter__(self):
            reply = replies()["rerank"][0]
            body = encode_reply(reply, content_type="application/json")
            yield types.SimpleNamespace(key=b"other", value=b"")
            yield types.SimpleNamespace(key=b"q-2", value=body)

    module = types.SimpleNamespace(AIOKafkaConsumer=Client, AIOKafkaProducer=Client)
    monkeypatch.setitem(sys.modules, "aiokafka", module)
    exec(compile(snippet("aiokafka"), "wire-format.md", "exec"), {})
    [(topic, value, key, its_headers)] = sent
    assert topic == "embedstream.requests" and key == b"q-2"
    assert decode_request(value, dict(its_headers), default_id="q-2").task == "rerank"
    assert "relevance_score" in capsys.readouterr().out

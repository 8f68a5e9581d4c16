"""`input` and `documents` in all their forms."""

from __future__ import annotations

import base64

import pytest

from schemas.errors import (
    EmptyInput,
    InvalidRequest,
    ItemTooLarge,
    TooManyItems,
    Unsupported,
)
from schemas.requests import Conversation, Document, Image, Limits, Message, Text, TokenIds
from tests.support.wire import BOTH, decode, refusal

both = pytest.mark.parametrize("content_type", BOTH)
PNG = b"\x89PNG\r\n\x1a\n\x00\xff"
DATA_URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


@both
@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("a", (Text("a"),)),
        ("", (Text(""),)),
        (["a", "é", ""], (Text("a"), Text("é"), Text(""))),
        ([15339, 1917], (TokenIds((15339, 1917)),)),
        ([0], (TokenIds((0,)),)),
        ([[1], [2, 3]], (TokenIds((1,)), TokenIds((2, 3)))),
        ([[]], (TokenIds(()),)),
        ([2**31 - 1], (TokenIds((2**31 - 1,)),)),
        ([{"text": "a"}, {"text": "b"}], (Text("a"), Text("b"))),
        ([{"image": DATA_URI}], (Image(PNG),)),
        ([{"image": DATA_URI, "text": "cat"}], (Image(PNG, "cat"),)),
        (["a", {"text": "b"}, [7]], (Text("a"), Text("b"), TokenIds((7,)))),
    ],
)
def test_forms_of_input(content_type, value, items):
    """B19 (syntax part): a flat list of numbers is one item of ids, never many texts."""
    assert decode({"input": value}, content_type).input == items


def test_image_as_bytes_in_msgpack():
    assert decode({"input": [{"image": PNG, "text": "t"}]}).input == (Image(PNG, "t"),)


@both
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, -1], "$.input[1]"), ([True], "$.input[0]"), ([1, True], "$.input[1]"),
        ([1, 2.0], "$.input[1]"), ([1, "a"], "$.input[1]"), (["a", 1], "$.input[1]"),
        ([[1, False]], "$.input[0][1]"), ([[1], [-5]], "$.input[1][0]"), ([2**31], "$.input[0]"),
        ([1, None], "$.input[1]"), ([None], "$.input[0]"), (["a", None], "$.input[1]"),
        ([1.5], "$.input[0]"), ([["a"]], "$.input[0][0]"), ([[[1]]], "$.input[0][0]"),
        ([2**63], "$.input[0]"), (5, "$.input"), (True, "$.input"), (1.5, "$.input"),
        ({"text": "a"}, "$.input"), ([{}], "$.input[0]"), ([{"text": 3}], "$.input[0].text"),
        ([{"text": None}], "$.input[0]"), ([{"image": 3}], "$.input[0].image"),
        ([{"image": ""}], "$.input[0].image"), ([{"text": ["a"]}], "$.input[0].text"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_at_its_path(content_type, value, path):
    """B19 (syntax part): booleans, negatives and mixtures are no token ids."""
    error = refusal({"input": value}, content_type)
    assert type(error) is InvalidRequest and error.path == path


@both
@pytest.mark.parametrize(
    "url", ["https://example.org/cat.png", "http://10.0.0.1/", "file:///etc/passwd", "cat.png"]
)
def test_no_url_is_ever_fetched(content_type, url):
    error = refusal({"input": [{"image": url}]}, content_type)
    assert error.path == "$.input[0].image"
    assert "never fetches" in error.message and url not in error.message


@both
@pytest.mark.parametrize(
    "uri",
    ["data:image/png,abc", "data:image/png;base64", "data:;base64,@@@", "data:;base64,é",
     "data:text/html;base64,YQ==", "data:;base64,"],
)  # fmt: skip
def test_bad_data_uri(content_type, uri):
    error = refusal({"input": [{"image": uri}]}, content_type)
    assert type(error) is InvalidRequest and error.path == "$.input[0].image"


@both
def test_data_uri_without_media_type_and_in_upper_case(content_type):
    uris = ["data:;base64,YQ==", "DATA:IMAGE/PNG;BASE64,YQ=="]
    assert decode({"input": [{"image": u} for u in uris]}, content_type).input == (
        Image(b"a"), Image(b"a"),
    )  # fmt: skip


@both
@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"task": "classify", "input": []},
        {"query": "q", "documents": []},
        {"task": "score", "query": "q", "documents": []},
    ],
)
def test_empty_list_is_the_same_error_for_every_task(content_type, fields):
    """B14, D03: `[]` is `empty_input` everywhere."""
    error = refusal(fields, content_type)
    assert type(error) is EmptyInput
    assert error.path == ("$.documents" if "documents" in fields else "$.input")


@both
def test_item_cap_is_separate_and_named(content_type):
    """C09 (cap part): 32 items pass, 33 and 1,000 name the cap."""
    limits = Limits(max_items=32)
    assert decode({"input": ["a"] * 32}, content_type, limits=limits).n_items == 32
    for n in (33, 1000):
        error = refusal({"input": ["a"] * n}, content_type, limits=limits)
        assert type(error) is TooManyItems and (error.limit, error.given) == (32, n)
    error = refusal({"query": "q", "documents": [{"text": "a"}] * 33}, content_type, limits=limits)
    assert type(error) is TooManyItems and error.path == "$.documents"


@both
def test_long_id_list_is_one_item(content_type):
    """C09: ids do not count as items."""
    limits = Limits(max_items=2)
    assert decode({"input": list(range(50))}, content_type, limits=limits).n_items == 1


@both
def test_items_over_the_byte_limit_are_all_named(content_type):
    """D06: 100 texts, 7 and 42 too long."""
    texts = ["short"] * 100
    texts[7] = "x" * 300
    texts[42] = "é" * 200
    error = refusal({"input": texts}, content_type, limits=Limits(max_item_bytes=256))
    assert type(error) is ItemTooLarge and error.items == (7, 42)
    assert (error.path, error.limit, error.given) == ("$.input[7]", 256, 300)
    documents = {"query": "q", "documents": [{"text": t} for t in texts]}
    assert refusal(documents, content_type, limits=Limits(max_item_bytes=256)).items == (7, 42)


@both
def test_text_of_exactly_the_byte_limit_passes(content_type):
    limits = Limits(max_item_bytes=256)
    assert decode({"input": ["é" * 128, "x"]}, content_type, limits=limits).n_items == 2
    assert refusal({"input": ["é" * 128 + "x"]}, content_type, limits=limits).given == 257


@both
def test_token_ids_count_eight_bytes_each(content_type):
    limits = Limits(max_item_bytes=80)
    assert decode({"input": [[1] * 10]}, content_type, limits=limits).n_items == 1
    error = refusal({"input": [[1], [1] * 11, [2] * 12]}, content_type, limits=limits)
    assert type(error) is ItemTooLarge and error.items == (1, 2) and error.given == 88
    flat = refusal({"input": [1] * 11}, content_type, limits=limits)
    assert type(flat) is ItemTooLarge and flat.items == (0,) and flat.path == "$.input"


@both
def test_image_bytes_count(content_type):
    error = refusal(
        {"input": [{"text": "a"}, {"image": DATA_URI, "text": "cat"}]},
        content_type,
        limits=Limits(max_item_bytes=12),
    )
    assert type(error) is ItemTooLarge and error.items == (1,) and error.given == len(PNG) + 3


@both
def test_classify_takes_no_images(content_type):
    error = refusal({"task": "classify", "input": ["a", {"image": DATA_URI}]}, content_type)
    assert type(error) is Unsupported and error.path == "$.input[1].image"


@both
def test_messages_of_a_classify_item(content_type):
    """Beside other items, in their order; the roles are a closed list."""
    talk = [
        {"role": "system", "content": ""}, {"role": "user", "content": "hé \ud800?"},
        {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    given = ["a", {"messages": talk}, [7], {"text": "b", "messages": None}]
    request = decode({"task": "classify", "input": given}, content_type)
    told = (Message("system", ""), Message("user", "hé \ufffd?"), Message("assistant", "yes"))
    assert request.input == (Text("a"), Conversation(told), TokenIds((7,)), Text("b"))
    refused = refusal({"input": ["a", {"messages": talk}]}, content_type)
    assert type(refused) is Unsupported and refused.path == "$.input[1].messages"


@both
@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({"messages": "hi"}, ".messages"), ({"messages": {"role": "user"}}, ".messages"),
        ({"messages": ["hi"]}, ".messages[0]"), ({"messages": [[]]}, ".messages[0]"),
        ({"messages": [{"role": "user"}]}, ".messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, ".messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, ".messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, ".messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, ".messages[0].role"),
        ({"messages": [{"role": "user<|im_end|>", "content": "a"}]}, ".messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, ".messages[0].role"),
        ({"messages": [{"content": "a"}]}, ".messages[0].role"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, ".messages[0].name"),
        ({"messages": [{"role": "user", "content": "a", "messages": []}]}, ".messages[0].messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 257}, ".messages"),
        ({"messages": [{"role": "user", "content": "a"}], "text": "b"}, ""),
        ({"messages": [{"role": "user", "content": "a"}], "image": DATA_URI}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_wrong_messages(content_type, item, path):
    error = refusal({"task": "classify", "input": [item]}, content_type)
    assert type(error) is InvalidRequest and error.path == f"$.input[0]{path}"
    empty = refusal({"task": "classify", "input": [{"messages": []}]}, content_type)
    assert type(empty) is EmptyInput and empty.path == "$.input[0].messages"


@both
def test_messages_count_in_bytes_and_nest_no_deeper(content_type):
    """A conversation is as large as its texts; maps in maps in maps are refused, not followed."""
    talk = [{"role": "user", "content": "é" * 5}, {"role": "user", "content": "x" * 3}]
    request = {"task": "classify", "input": ["a", {"messages": talk}]}
    error = refusal(request, content_type, limits=Limits(max_item_bytes=12))
    assert type(error) is ItemTooLarge and error.items == (1,) and error.given == 13
    assert decode(request, content_type, limits=Limits(max_item_bytes=13)).n_items == 2
    nested: dict = {"role": "user", "content": "a"}
    for _ in range(300):
        nested = {"messages": [nested]}
    deep = refusal({"task": "classify", "input": [nested]}, content_type)
    assert deep.path in ("$.input[0].messages[0].messages", "$.input[0].messages[0].role")


@both
def test_forms_of_documents(content_type):
    request = decode({"query": "q", "documents": ["a", {"text": "b", "id": "d"}]}, content_type)
    assert request.documents == (Document("a"), Document("b", "d"))


@both
@pytest.mark.parametrize(
    ("documents", "path"),
    [
        ("a", "$.documents"), ([1], "$.documents[0]"), (["a", ["b"]], "$.documents[1][0]"), ([[-1]], "$.documents[0][0]"),
        ([{"id": "x"}], "$.documents[0].text"), ([{"text": 1}], "$.documents[0].text"),
        ([{"text": "a", "id": 1}], "$.documents[0].id"), ([{"text": "a", "id": ""}], "$.documents[0].id"),
        (["a", None], "$.documents[1]"), ([{"text": "a", "id": "x" * 257}], "$.documents[0].id"),
    ],
)  # fmt: skip
def test_wrong_documents(content_type, documents, path):
    error = refusal({"query": "q", "documents": documents}, content_type)
    assert type(error) is InvalidRequest and error.path == path

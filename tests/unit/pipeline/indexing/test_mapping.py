"""Records become documents: ids, templates, metadata, change events, tombstones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.indexing.mapping import DocumentMapping, Raw, clean_text
from pipeline.indexing.options import DocumentOptions
from pipeline.indexing.paths import Template
from pipeline.indexing.records import Change, Version
from schemas.errors import InvalidRequest, ItemTooLarge

V = Version("docs/0", 7)


def change(value: Any, key: str | None = "k", **options: Any) -> Change | None:
    """One record through a mapping."""
    body = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    options.setdefault("text", "{title}")
    return DocumentMapping(DocumentOptions(**options)).change(Raw(key, body, V))


def test_the_key_the_text_and_chosen_metadata_make_a_document() -> None:
    document = {"title": "T", "body": "B", "url": "u", "deep": {"lang": "de"}, "other": 1}
    made = change(document, text="{title}\n\n{body}", metadata=("url", "deep.lang", "absent"))
    assert made == Change("k", V, "T\n\nB", {"url": "u", "deep.lang": "de"})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a.b}", "deep"),
        ("{tags}", "x\ny"),
        ("{parts.t}", "1\n2"),
        ("{parts.1.t}", "2"),
        ("{n} {yes} {f}", "3 true 1.5"),
        ("{none?}|{nowhere?}", "|"),
        ("{{literal}} {n}", "{literal} 3"),
        ("{dotted.name}", "found"),
        ("{$.n}", "3"),
        ("plain", "plain"),
    ],
)
def test_templates_read_dotted_paths_lists_and_scalars(template: str, text: str) -> None:
    document = {
        "a": {"b": "deep"},
        "tags": ["x", None, "y"],
        "parts": [{"t": 1}, {"t": 2}, {"u": 3}],
        "n": 3,
        "yes": True,
        "f": 1.5,
        "none": None,
        "dotted.name": "found",
    }
    assert Template(template).render(document) == text


@pytest.mark.parametrize("template", ["{", "}", "{}", "{ }", "{a..b}", "{a{b}}", "{?}"])
def test_templates_that_cannot_be_meant_are_refused_at_start(template: str) -> None:
    with pytest.raises(ValueError, match=r"document\.text"):
        DocumentMapping(DocumentOptions(text=template))


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"body": "no title"}, "$.title"),
        ({"title": None}, "$.title"),
        ({"title": {"en": "x"}}, "$.title"),
        ([1], "$"),
        ("text", "$"),
        (b"", "$"),
        (b"\xff\xfe", "$"),
        (b"{", "$"),
        (b'{"title": NaN}', "$"),
        (b"[" * 100_000, "$"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_the_path_and_none_of_its_text(
    body: Any, path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        change(body)
    assert caught.value.path == path
    assert "secret" not in caught.value.message


def test_an_absent_body_is_a_delete_and_an_empty_one_is_a_mistake() -> None:
    """E14, H07."""
    assert change(None) == Change("k", V, None)
    with pytest.raises(InvalidRequest):
        change(b"")
    with pytest.raises(InvalidRequest, match="no key"):
        change(None, key=None)


@pytest.mark.parametrize(
    ("document_id", "expected"),
    [("1-0", "1-0"), (7, "7"), (2**64, str(2**64)), ("./data/a.txt_1", "./data/a.txt_1")],
)
def test_ids_may_be_text_or_whole_numbers(document_id: Any, expected: str) -> None:
    """H01."""
    made = change({"id": document_id, "title": "t"}, id="id")
    assert made is not None and made.document_id == expected


@pytest.mark.parametrize("document_id", ["", None, 1.5, True, [], {}, "a\x00b", "a\nb", "x" * 513])
def test_ids_that_no_store_would_keep_are_refused(document_id: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        change({"id": document_id, "title": "t"}, id="id")
    assert caught.value.path == "$.id"


def test_a_field_of_a_json_key_may_be_the_id() -> None:
    made = change({"title": "t"}, key='{"id": 5}', id="key.id")
    assert made is not None and made.document_id == "5"
    with pytest.raises(InvalidRequest, match="not JSON"):
        change({"title": "t"}, key="x", id="key.id")


@pytest.mark.parametrize("wrapped", [False, True])
def test_change_events_of_debezium_put_and_delete(wrapped: bool) -> None:
    def event(**fields: Any) -> Any:
        return {"schema": {}, "payload": fields} if wrapped else fields

    row = {"id": 1, "title": "t"}
    for op in "cru":
        made = change(event(op=op, before=None, after=row), format="debezium", id="id")
        assert made == Change("1", V, "t")
    gone = change(event(op="d", before={"id": 1}, after=None), format="debezium", id="id")
    assert gone == Change("1", V, None)
    assert change(event(op="m"), format="debezium", id="id") is None
    for bad in (
        {"op": "t"},
        {"op": "u", "after": None},
        {"op": "d", "before": None},
        {"title": "x"},
    ):
        with pytest.raises(InvalidRequest):
            change(event(**bad), format="debezium", id="id")


def test_a_tombstone_after_a_debezium_delete_finds_its_document_by_key() -> None:
    made = change(None, key='{"id": 1}', format="debezium", id="key.id")
    assert made == Change("1", V, None)


def test_a_version_field_numbers_the_document() -> None:
    made = change({"title": "t", "v": 12}, version="v")
    assert made is not None and made.version == Version("", 12)
    for bad in (None, "12", 1.5, True, 2**63):
        with pytest.raises(InvalidRequest):
            change({"title": "t", "v": bad}, version="v")


def test_what_a_store_refuses_is_cleaned_or_refused_here() -> None:
    """H05: NUL in text and nested metadata; NaN cannot be JSON; lone surrogates."""
    body = b'{"title": "a\\u0000b", "m": {"x": ["c\\u0000", 9223372036854775808]}}'
    made = change(body, metadata=("m",))
    assert made is not None
    assert made.text == "a\ufffdb"
    assert made.metadata == {"m": {"x": ["c\ufffd", "9223372036854775808"]}}
    assert clean_text("a\ud800b") == "a\ufffdb"
    with pytest.raises(ItemTooLarge):
        change({"title": "t", "m": "x" * 70_000}, metadata=("m",))


@given(st.text())
def test_cleaned_text_is_utf8_without_nul(text: str) -> None:
    clean = clean_text(text)
    assert "\x00" not in clean
    clean.encode()
    if "\x00" not in text:
        assert clean == text


def test_metadata_star_keeps_every_field() -> None:
    made = change({"title": "t", "a": 1, "b": None}, metadata=("*",))
    assert made is not None and made.metadata == {"title": "t", "a": 1, "b": None}


def test_plain_text_is_taken_as_it_is() -> None:
    made = change(b"hello {x}", format="text", text="")
    assert made == Change("k", V, "hello {x}")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        change(b"\xff", format="text", text="")


def test_options_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ValueError, match=r"document\.text"):
        DocumentMapping(DocumentOptions())
    with pytest.raises(ValueError, match=r"document\.text"):
        DocumentMapping(DocumentOptions(format="text", text="{x}"))


def test_equal_content_has_an_equal_hash_whatever_the_order_of_its_fields() -> None:
    first = Change("a", V, "t", {"x": 1, "y": 2})
    second = Change("b", Version("p", 9), "t", {"y": 2, "x": 1})
    assert first.content_hash == second.content_hash
    assert first.content_hash != Change("a", V, "t", {"x": 1}).content_hash
    assert Change("a", V, None).content_hash == ""

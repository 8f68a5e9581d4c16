"""Every field of a request record: its default, its forms, and what is refused at which path."""

from __future__ import annotations

import pytest

from schemas.codec import encode_request
from schemas.errors import InvalidDimensions, InvalidRequest, ItemTooLarge, TooDeep, Unsupported
from schemas.requests import (
    CancelRequest,
    ClassifyRequest,
    Document,
    EmbedRequest,
    Limits,
    RerankRequest,
    ScoreRequest,
    Text,
    TokenIds,
)
from tests.support.wire import BOTH, decode, refusal

both = pytest.mark.parametrize("content_type", BOTH)
EMBED = {"input": "hello"}
RERANK = {"query": "q", "documents": ["a", "b"]}


@both
def test_defaults_of_an_embed_request(content_type):
    assert decode(EMBED, content_type) == EmbedRequest(
        id="default-id",
        content_type=content_type,
        encoding="bytes" if content_type == "application/msgpack" else "float",
        input=(Text("hello"),),
    )


@both
def test_every_embed_field(content_type):
    request = decode(
        {
            "id": "r1", "task": "embed", "model": "minilm", "input": ["a", "b"], "dimensions": 128,
            "normalize": False, "outputs": ["dense", "sparse"], "encoding": "base64",
            "dtype": "int8", "prompt_name": "query", "truncate": "left", "priority": "bulk",
            "deadline_ms": 1_800_000_000_000, "reply_to": "embedstream.mine",
            "metadata": {"tenant": "x", "n": [1, 2.5, None, True]}, "schema_version": 1,
        },
        content_type,
    )  # fmt: skip
    assert request == EmbedRequest(
        id="r1", content_type=content_type, model="minilm", input=(Text("a"), Text("b")),
        dimensions=128, normalize=False, outputs=("dense", "sparse"), encoding="base64",
        dtype="int8", prompt_name="query", truncate="left", priority="bulk",
        deadline_ms=1_800_000_000_000, reply_to="embedstream.mine",
        metadata={"tenant": "x", "n": [1, 2.5, None, True]},
    )  # fmt: skip


@both
def test_every_rerank_field(content_type):
    request = decode(
        {
            "query": "q", "documents": ["a", {"id": "d2", "text": "b"}], "top_n": 5,
            "return_documents": True, "raw_scores": True, "instruction": "judge", "sort": False,
        },
        content_type,
    )  # fmt: skip
    assert isinstance(request, RerankRequest)
    assert request.documents == (Document("a"), Document("b", "d2"))
    assert (request.query, request.top_n, request.instruction) == ("q", 5, "judge")
    assert (request.return_documents, request.raw_scores, request.sort) == (True, True, False)


@both
def test_classify_and_score(content_type):
    classify = decode({"task": "classify", "input": "x", "raw_scores": True}, content_type)
    assert isinstance(classify, ClassifyRequest) and classify.raw_scores
    score = decode({"task": "score", **RERANK}, content_type)
    assert isinstance(score, ScoreRequest) and not score.sort and score.n_items == 2


@both
def test_labels_of_a_score_request(content_type):
    """Texts or ids, 1 to 256, in their order; anything else at its path."""
    for labels in (["yes"], ["no", "yes", " né"], [9454], list(range(256))):
        score = decode({"task": "score", **RERANK, "labels": labels}, content_type)
        assert isinstance(score, ScoreRequest) and score.labels == tuple(labels)
    assert decode({"task": "score", **RERANK, "labels": None}, content_type).labels == ()
    for labels, path in (
        ([], "$.labels"), ("yes", "$.labels"), (7, "$.labels"), ([["yes"]], "$.labels[0]"),
        (["yes", ""], "$.labels[1]"), (["yes", 7], "$.labels[1]"), ([7, "yes"], "$.labels"),
        ([-1], "$.labels[0]"), ([2**31], "$.labels[0]"), ([1.5], "$.labels[0]"), ([True], "$.labels[0]"),
        (["a", "a"], "$.labels"), ([3, 3], "$.labels"), (list(range(257)), "$.labels"),
        (["yes", {"text": "no"}], "$.labels[1]"), ({"yes": 1}, "$.labels"),
    ):  # fmt: skip
        error = refusal({"task": "score", **RERANK, "labels": labels}, content_type)
        assert error.code == "invalid_request" and (error.path or "").startswith(path), (
            labels,
            error.path,
        )
    many = refusal({"task": "score", **RERANK, "labels": list(range(257))}, content_type)
    assert (many.limit, many.given) == (256, 257)
    for task in ("rerank", None):
        assert refusal({"task": task, **RERANK, "labels": ["a"]}, content_type).path == "$.labels"


@both
def test_task_is_rerank_when_query_and_documents_are_there(content_type):
    assert type(decode(RERANK, content_type)) is RerankRequest
    assert type(decode(EMBED, content_type)) is EmbedRequest


@both
def test_cancel_record(content_type):
    """G10: a record that withdraws queued requests."""
    assert decode({"task": "cancel", "id": "r1"}, content_type) == CancelRequest(id="r1")
    assert refusal({"task": "cancel", "id": "r1", "input": "x"}, content_type).path == "$.input"
    newer = {"task": "cancel", "id": "r1", "why": "x", "schema_version": 2}
    assert decode(newer, content_type) == CancelRequest(id="r1")


@both
@pytest.mark.parametrize("task", ["translate", "", 3, ["embed"], {"a": 1}, True])
def test_unknown_task_is_refused(content_type, task):
    error = refusal({"task": task, "input": "x"}, content_type)
    assert type(error) is InvalidRequest and error.path == "$.task"


@both
@pytest.mark.parametrize(
    ("task", "missing"),
    [("embed", "input"), ("classify", "input"), ("rerank", "query"), ("score", "query")],
)
def test_missing_field_is_named(content_type, task, missing):
    error = refusal({"task": task}, content_type)
    assert error.path == f"$.{missing}" and missing in error.message


@both
def test_missing_documents_are_named(content_type):
    assert refusal({"task": "rerank", "query": "q"}, content_type).path == "$.documents"


@both
def test_empty_record_misses_its_input(content_type):
    assert refusal({}, content_type).path == "$.input"


@both
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({**EMBED, "top_n": 1}, "$.top_n"),
        ({**EMBED, "query": "q"}, "$.query"),
        ({"task": "classify", "input": "x", "dimensions": 3}, "$.dimensions"),
        ({"task": "classify", "input": "x", "aggregate": "mean"}, "$.aggregate"),
        ({**RERANK, "chunk_tokens": 8}, "$.chunk_tokens"),
        ({**EMBED, "aggregate": "mean", "truncate": "right"}, "$.truncate"),
        ({**EMBED, "aggregate": "mean", "chunk_tokens": 8}, "$.aggregate"),
        ({**EMBED, "chunk_tokens": 8, "outputs": ["dense"]}, "$.outputs"),
        ({**EMBED, "aggregate": "max"}, "$.aggregate"),
        *(
            (
                {**EMBED, "input": ["y", {"text": "ab", "spans": [[0, 1]]}], **beside},
                "$.input[1].spans",
            )
            for beside in (
                {"outputs": ["dense"]},
                {"truncate": "left"},
                {"chunk_tokens": 8},
                {"aggregate": "mean"},
            )
        ),
        *(
            ({**EMBED, "input": [{"text": "ab", "spans": spans}]}, f"$.input[0].spans{where}")
            for spans, where in (
                ([], ""),
                ("x", ""),
                ([[0, 1]] * 4097, ""),
                ([[0, 1], [1, 3]], "[1]"),
                ([[1, 1]], "[0]"),
                ([[2, 1]], "[0]"),
                ([[-1, 1]], "[0]"),
                ([[0, True]], "[0]"),
                ([[0, 1.0]], "[0]"),
                ([[0]], "[0]"),
                ([[0, 1, 2]], "[0]"),
                ([3], "[0]"),
            )
        ),
        (
            {**EMBED, "input": [{"image": "data:;base64,eA==", "text": "ab", "spans": [[0, 1]]}]},
            "$.input[0].spans",
        ),
        ({**EMBED, "input": [{"spans": [[0, 1]]}]}, "$.input[0].spans"),
        ({**EMBED, "chunk_tokens": 0}, "$.chunk_tokens"),
        ({**EMBED, "chunk_tokens": True}, "$.chunk_tokens"),
        ({**RERANK, "input": "x"}, "$.input"),
        ({**RERANK, "task": "score", "top_n": 1}, "$.top_n"),
        ({**RERANK, "task": "score", "sort": True}, "$.sort"),
    ],
)
def test_option_that_cannot_take_effect_is_refused(content_type, fields, path):
    """D07: an option that is ignored would look as if it worked."""
    error = refusal(fields, content_type)
    assert type(error) is InvalidRequest and error.path == path


@both
def test_unknown_field_is_refused_with_its_path(content_type):
    """D07: `dimensionz=3` is not accepted in silence."""
    error = refusal({**EMBED, "dimensionz": 3}, content_type)
    assert type(error) is InvalidRequest and error.path == "$.dimensionz"
    nested = refusal({"input": [{"text": "a", "lang": "en"}]}, content_type)
    assert nested.path == "$.input[0].lang"
    document = refusal({"query": "q", "documents": ["a", {"text": "b", "url": "u"}]}, content_type)
    assert document.path == "$.documents[1].url"


@both
def test_shown_field_name_is_cut_and_printable(content_type):
    error = refusal({**EMBED, "evil\n\x1b[31m" + "x" * 500: 3}, content_type)
    assert error.path is not None and error.path.isprintable() and len(error.path) < 80


@both
def test_newer_sender_may_send_fields_that_this_version_does_not_know(content_type):
    """D07, rule 11: the version field decides."""
    fields = {
        "input": [{"text": "a", "lang": {"deep": [1]}}], "schema_version": 2, "new": {"x": [1, 2]}
    }  # fmt: skip
    request = decode(fields, content_type)
    assert request.input == (Text("a"),)
    assert refusal({**fields, "schema_version": 1}, content_type).path == "$.new"
    assert refusal({**fields, "dimensions": "3"}, content_type).path == "$.dimensions"


@both
@pytest.mark.parametrize("version", [0, -1, "2", 1.0, True, [1]])
def test_wrong_schema_version(content_type, version):
    """E13: a record of a wrong version is an answer, not a crash."""
    assert refusal({**EMBED, "schema_version": version}, content_type).path == "$.schema_version"


@both
def test_openais_user_is_taken_and_not_read(content_type):
    """An OpenAI body is a valid record as it is; for other tasks the field stays unknown."""
    body = {"model": "minilm", "input": ["a"], "encoding_format": "base64", "user": "u-1234"}
    plain = {name: value for name, value in body.items() if name != "user"}
    assert decode(body, content_type) == decode(plain, content_type)
    assert refusal({**EMBED, "user": 7}, content_type).path == "$.user"
    rerank = {"query": "q", "documents": ["a"], "user": "u"}
    assert refusal(rerank, content_type).path == "$.user"


@both
def test_null_means_absent_for_optional_fields(content_type):
    fields = dict.fromkeys(
        ["id", "task", "model", "dimensions", "normalize", "outputs", "encoding", "dtype",
         "prompt", "prompt_name", "truncate", "priority", "deadline_ms", "reply_to", "metadata",
         "encoding_format", "schema_version", "top_n"]
    )  # fmt: skip
    assert decode({**EMBED, **fields}, content_type) == decode(EMBED, content_type)
    assert refusal({"input": None}, content_type).path == "$.input"


@both
@pytest.mark.parametrize("field", ["normalize"])
@pytest.mark.parametrize("value", [0, 1, "true", "false", 1.0, [True]])
def test_booleans_are_strict(content_type, field, value):
    """D10: only true and false turn normalising on and off."""
    assert refusal({**EMBED, field: value}, content_type).path == f"$.{field}"


@both
@pytest.mark.parametrize("normalize", [True, False, None])
def test_normalize_is_carried(content_type, normalize):
    """D10: true, false and absent are three different wishes."""
    assert decode({**EMBED, "normalize": normalize}, content_type).normalize is normalize


@both
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float64"), ("dtype", 32), ("truncate", True), ("truncate", "middle"),
        ("priority", "high"), ("encoding", "hex"), ("encoding_format", "hex"), ("model", ""),
        ("model", 3), ("prompt_name", ""), ("prompt", 3), ("outputs", "dense"), ("outputs", []),
        ("outputs", ["dense", "dense"]), ("outputs", {"dense": 1}), ("outputs", ["dense"] * 100),
        ("dimensions", "3"), ("dimensions", 3.0), ("dimensions", True), ("deadline_ms", -1),
        ("deadline_ms", 1.5), ("deadline_ms", "1"), ("deadline_ms", True), ("deadline_ms", 2**63),
        ("reply_to", ""), ("reply_to", 3), ("reply_to", "x" * 1025), ("metadata", "x"),
        ("metadata", [1]),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_at_its_path(content_type, field, value):
    error = refusal({**EMBED, field: value}, content_type)
    assert type(error) is InvalidRequest and error.path == f"$.{field}"


@both
def test_unknown_output_is_refused_at_its_index(content_type):
    assert refusal({**EMBED, "outputs": ["dense", "hex"]}, content_type).path == "$.outputs[1]"
    assert refusal({**EMBED, "outputs": [["dense"]]}, content_type).path == "$.outputs[0]"


@both
@pytest.mark.parametrize("dimensions", [0, -1, -(2**40)])
def test_dimensions_below_one(content_type, dimensions):
    """A09 (syntax part): zero and negative sizes name the limit."""
    error = refusal({**EMBED, "dimensions": dimensions}, content_type)
    assert type(error) is InvalidDimensions and (error.limit, error.given) == (1, dimensions)


@both
@pytest.mark.parametrize("top_n", [-1, 0, 1.0, "1", True, 2**63])
def test_top_n_refused(content_type, top_n):
    """D03: -1 is refused, and so is 0: a request for no result is a mistake."""
    assert refusal({**RERANK, "top_n": top_n}, content_type).path == "$.top_n"


@both
@pytest.mark.parametrize("top_n", [1, 2, 7])
def test_top_n_accepted(content_type, top_n):
    """D03: more than there are documents is allowed; it is clamped later."""
    assert decode({**RERANK, "top_n": top_n}, content_type).top_n == top_n


@both
def test_encoding_and_its_alias(content_type):
    """D01: base64 is honoured under both names."""
    assert decode({**EMBED, "encoding": "base64"}, content_type).encoding == "base64"
    assert decode({**EMBED, "encoding_format": "base64"}, content_type).encoding == "base64"
    same = {**EMBED, "encoding": "float", "encoding_format": "float"}
    assert decode(same, content_type).encoding == "float"
    error = refusal({**EMBED, "encoding": "float", "encoding_format": "base64"}, content_type)
    assert error.path == "$.encoding_format"


@pytest.mark.parametrize("field", ["encoding", "encoding_format"])
def test_json_cannot_ask_for_bytes(field):
    error = refusal({**EMBED, field: "bytes"}, "application/json")
    assert error.path == f"$.{field}" and "base64" in error.message
    assert decode({**EMBED, field: "bytes"}).encoding == "bytes"


@both
def test_prompt_and_prompt_name_exclude_each_other(content_type):
    error = refusal({**EMBED, "prompt": "query: ", "prompt_name": "query"}, content_type)
    assert type(error) is InvalidRequest and error.path == "$.prompt_name"
    assert decode({**EMBED, "prompt": ""}, content_type).prompt == ""


@both
@pytest.mark.parametrize("field", ["query", "instruction"])
def test_long_query_or_instruction(content_type, field):
    error = refusal({**RERANK, field: "é" * 600}, content_type, limits=Limits(max_item_bytes=1000))
    assert type(error) is ItemTooLarge
    assert (error.path, error.limit, error.given) == (f"$.{field}", 1000, 1200)


@both
@pytest.mark.parametrize("request_id", ["", 7, True, ["a"], "x" * 257, "é" * 129])
def test_wrong_id(content_type, request_id):
    error = refusal({**EMBED, "id": request_id}, content_type)
    assert type(error) is InvalidRequest and error.path == "$.id"
    assert error.request_id == "default-id"  # the failure still has an address


@both
def test_id_order_body_header_default(content_type):
    headers = {"request-id": b"from-header"}
    body = {**EMBED, "id": "from-body"}
    assert decode(body, content_type, headers=headers).id == "from-body"
    assert decode(EMBED, content_type, headers=headers).id == "from-header"
    assert decode(EMBED, content_type).id == "default-id"
    assert decode({**EMBED, "id": "x" * 256}, content_type).id == "x" * 256


@both
def test_default_id_that_is_too_long_is_refused_and_cut(content_type):
    error = refusal(EMBED, content_type, default_id="k" * 400)
    assert error.path == "key" and error.request_id == "k" * 256


# ----------------------------------------------------------------------------------------- metadata


@both
def test_metadata_is_echoed_as_it_came(content_type):
    metadata = {"z": 1, "a": {"b": [1, -(2**63), 2**64 - 1, 0.1, "é", "", None, False]}, "": {}}
    request = decode({**EMBED, "metadata": metadata}, content_type)
    assert request.metadata == metadata and list(request.metadata) == ["z", "a", ""]


def test_metadata_may_hold_bytes_in_msgpack():
    assert decode({**EMBED, "metadata": {"b": b"\x00\xff"}}).metadata == {"b": b"\x00\xff"}


@both
def test_metadata_byte_cap(content_type):
    limits = Limits(max_metadata_bytes=100)
    error = refusal({**EMBED, "metadata": {"a": "x" * 100}}, content_type, limits=limits)
    assert type(error) is InvalidRequest and error.path == "$.metadata"
    assert error.limit == 100 and error.given is not None and error.given > 100
    assert decode({**EMBED, "metadata": {"a": "x" * 80}}, content_type, limits=limits).metadata


@both
def test_metadata_depth(content_type):
    def nested(levels: int) -> dict:
        value: dict = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return value

    assert decode({**EMBED, "metadata": nested(15)}, content_type).metadata == nested(15)
    error = refusal({**EMBED, "metadata": nested(16)}, content_type)
    assert type(error) is TooDeep and (error.path, error.limit) == ("$.metadata", 16)


@pytest.mark.parametrize(
    "value", [{"a": {1: 2}}, {"a": {b"k": 2}}, {"a": float("nan")}, {"a": [float("-inf")]}]
)
def test_metadata_refuses_what_json_could_not_say(value):
    error = refusal({**EMBED, "metadata": value})
    assert type(error) is InvalidRequest and error.path == "$.metadata"


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"18446744073709551616", b"9" * 3000])
def test_metadata_numbers_beyond_64_bits_in_json(number):
    error = refusal(b'{"input":"a","metadata":{"n":' + number + b"}}")
    assert type(error) is InvalidRequest and error.path == "$.metadata"


@both
def test_token_ids_as_query_and_documents(content_type):
    """The ids of a text's own tokens, beside texts in one list; one list of ids is no list of documents."""
    body = {"query": [1, 2], "documents": [[3, 4], "text", {"id": "d", "text": "x"}]}
    request = decode(body, content_type)
    assert request.query == TokenIds((1, 2))
    assert request.documents == (Document(ids=(3, 4)), Document("text"), Document("x", "d"))
    again = decode(encode_request(request)[0], content_type)
    assert (again.query, again.documents) == (request.query, request.documents)
    for change, path in (
        ({"query": []}, "$.query"),
        ({"query": [1, -1]}, "$.query[1]"),
        ({"query": [1, True]}, "$.query[1]"),
        ({"query": [[1]]}, "$.query"),
        ({"documents": [1, 2]}, "$.documents[0]"),
        ({"documents": [[1, "a"]]}, "$.documents[0]"),
        ({"return_documents": True}, "$.return_documents"),
    ):
        assert refusal({**body, **change}, content_type).path.startswith(path), change


@both
def test_token_ids_of_a_pair_count_against_the_byte_limit(content_type):
    limits = Limits(max_item_bytes=80)
    for body in (
        {"query": list(range(11)), "documents": ["x"]},
        {"query": "q", "documents": ["x", list(range(11))]},
    ):
        assert isinstance(refusal(body, content_type, limits=limits), ItemTooLarge)


@both
def test_spans_are_for_embed_alone(content_type):
    error = refusal(
        {"task": "classify", "input": [{"text": "ab", "spans": [[0, 1]]}]}, content_type
    )
    assert type(error) is Unsupported and error.path == "$.input[0].spans"
    request = decode({**EMBED, "input": [{"text": "añ", "spans": [[0, 1], [0, 2]]}]}, content_type)
    assert request.input == (Text("añ", ((0, 1), (0, 2))),)

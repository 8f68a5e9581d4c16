"""Properties over generated records: round trips, and no bytes that escape the typed errors."""

from __future__ import annotations

import json
import struct

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.codec import (
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    join_parts,
    split_reply,
)
from schemas.errors import ALL_ERRORS, EmbedstreamError, RecordTooLarge
from schemas.requests import (
    ROLES,
    CancelRequest,
    ClassifyRequest,
    Conversation,
    Document,
    EmbedRequest,
    Image,
    Limits,
    Message,
    Request,
    RerankRequest,
    ScoreRequest,
    Text,
    TokenIds,
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
from tests.support.wire_examples import golden_bytes, plain

settings.register_profile("schemas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
bounded = settings(settings.get_profile("schemas"), max_examples=120)

texts = st.text(max_size=20)
names = st.text(min_size=1, max_size=12)
floats = st.floats(allow_nan=False, allow_infinity=False)
indexes = st.integers(0, 2**31)


def optional(strategy):
    return st.none() | strategy


def metadata(content_type):
    scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts
    if content_type == "application/msgpack":
        scalars |= st.binary(max_size=8)
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )
    return optional(st.dictionaries(texts, values, max_size=3))


@st.composite
def requests(draw):
    content_type = draw(st.sampled_from(BOTH))
    binary = content_type == "application/msgpack"
    common = {
        "id": draw(names),
        "content_type": content_type,
        "model": draw(optional(names)),
        "encoding": draw(st.sampled_from(["float", "base64", *(["bytes"] if binary else [])])),
        "truncate": draw(st.sampled_from(["error", "right", "left"])),
        "priority": draw(optional(st.sampled_from(["interactive", "bulk"]))),
        "deadline_ms": draw(optional(st.integers(0, 2**63 - 1))),
        "reply_to": draw(optional(names)),
        "metadata": draw(metadata(content_type)),
        "traceparent": draw(optional(st.text("0123456789abcdef-", min_size=1, max_size=60))),
    }
    kind = draw(st.sampled_from([EmbedRequest, ClassifyRequest, RerankRequest, ScoreRequest]))
    if kind in (EmbedRequest, ClassifyRequest):
        item = st.builds(Text, texts) | st.builds(
            TokenIds, st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
        )
        if kind is ClassifyRequest:
            messages = st.builds(Message, st.sampled_from(ROLES), texts)
            item |= st.builds(Conversation, st.lists(messages, min_size=1, max_size=3).map(tuple))
        if kind is EmbedRequest:
            item |= st.builds(Image, st.binary(min_size=1, max_size=20), optional(texts))
        common["input"] = tuple(draw(st.lists(item, min_size=1, max_size=5)))
        prompt = draw(st.sampled_from(["prompt", "prompt_name", None]))
        if prompt:
            common[prompt] = draw(names)
    else:
        document = st.builds(Document, texts, optional(names))
        common["query"] = draw(texts)
        common["documents"] = tuple(draw(st.lists(document, min_size=1, max_size=5)))
        common["return_documents"] = draw(st.booleans())
        common["instruction"] = draw(optional(texts))
    if kind is ScoreRequest:
        ids = st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=5)
        common["labels"] = tuple(draw(ids | st.lists(names, unique=True, max_size=5)))
    if kind is RerankRequest:
        common["top_n"] = draw(optional(st.integers(1, 2**63 - 1)))
        common["sort"] = draw(st.booleans())
    if kind is EmbedRequest:
        common["dimensions"] = draw(optional(st.integers(1, 2**63 - 1)))
        common["normalize"] = draw(optional(st.booleans()))
        common["dtype"] = draw(st.sampled_from(["float32", "float16", "int8", "binary"]))
        outputs = st.lists(
            st.sampled_from(["dense", "sparse", "multivector"]), unique=True, min_size=1
        )
        long_texts = draw(st.sampled_from(["aggregate", "chunk_tokens", "spans", None]))
        if long_texts == "chunk_tokens":
            common["chunk_tokens"] = draw(st.integers(1, 2**31 - 1))
        elif long_texts == "spans":
            text = draw(texts)
            if text:
                spans = tuple((i, draw(st.integers(i + 1, len(text)))) for i in range(len(text)))
                common["input"] += (Text(text, spans[:3]),)
                common["truncate"] = "error"
        else:
            common["outputs"] = tuple(draw(outputs))
        if long_texts == "aggregate":
            common |= {"aggregate": "mean", "truncate": "error"}
    else:
        common["raw_scores"] = draw(st.booleans())
    return kind(**common)


@bounded
@given(requests())
def test_request_round_trip(request_):
    body, headers = encode_request(request_)
    decoded = decode_request(body, headers, default_id="unused")
    assert decoded == request_ and type(decoded) is type(request_)
    assert encode_request(decoded) == (body, headers)


def vectors(dtype, n):
    """Finite vectors of n values in the given dtype."""
    if dtype in ("int8", "binary"):
        return st.binary(min_size=n, max_size=n)
    width, code = (32, "f") if dtype == "float32" else (16, "e")
    number = st.floats(allow_nan=False, allow_infinity=False, width=width)
    return st.lists(number, min_size=n, max_size=n).map(lambda v: struct.pack(f"<{n}{code}", *v))


@st.composite
def errors(draw):
    return draw(st.sampled_from(ALL_ERRORS))(
        draw(texts),
        path=draw(optional(texts)),
        items=draw(st.lists(indexes, max_size=3)),
        limit=draw(optional(indexes)),
        given=draw(optional(indexes)),
    )


@st.composite
def replies(draw):
    task = draw(st.sampled_from(["embed", "classify", "rerank", "score"]))
    dtype = draw(st.sampled_from(["float32", "float16", "int8", "binary"]))
    n_values = draw(st.integers(1, 6))
    items = []
    for index in range(draw(st.integers(0, 6))):
        if draw(st.integers(0, 4)) == 0:
            items.append(ItemReply(index=index, id=draw(optional(names)), error=draw(errors())))
            continue
        fields = {
            "index": index,
            "tokens": draw(optional(indexes)),
            "truncated": draw(optional(st.booleans())),
        }
        if task == "embed":
            fields["embedding"] = draw(optional(vectors(dtype, n_values)))
            fields["multivector"] = draw(optional(st.lists(vectors(dtype, n_values), max_size=3)))
            fields["scale"] = draw(optional(floats))
            fields["scales"] = draw(optional(st.lists(floats, max_size=3)))
            weights = draw(st.dictionaries(indexes, floats, max_size=3))
            fields["sparse"] = draw(
                optional(st.just(Sparse(list(weights), list(weights.values()))))
            )
        elif task == "classify":
            fields["scores"] = draw(st.dictionaries(texts, floats, max_size=3))
        else:
            fields["relevance_score"] = draw(floats)
            fields["id"] = draw(optional(names))
            fields["document"] = draw(optional(texts))
        items.append(ItemReply(**fields))
    return Reply(
        id=draw(names), task=task, model=ModelRef(draw(texts), draw(texts), draw(texts)),
        items=items, n=len(items), usage=Usage(draw(indexes), draw(indexes)),
        dimensions=draw(optional(indexes)), dtype=dtype if task == "embed" else None,
        normalized=draw(optional(st.booleans())), prompt=draw(optional(texts)),
        timings=draw(optional(st.builds(Timings, floats, floats, floats))),
        metadata=draw(metadata("application/json")),
    )  # fmt: skip


written = st.sampled_from(
    [
        (BOTH[0], "bytes"),
        (BOTH[0], "float"),
        (BOTH[0], "base64"),
        (BOTH[1], "float"),
        (BOTH[1], "base64"),
    ]
)


@bounded
@given(replies(), written)
def test_reply_round_trip(reply, form):
    content_type, encoding = form
    body = encode_reply(reply, content_type=content_type, encoding=encoding)
    decoded = decode_reply(body, {"content-type": content_type.encode()})
    assert plain(decoded) == plain(reply)
    assert encode_reply(decoded, content_type=content_type, encoding=encoding) == body


@bounded
@given(
    st.builds(FailureReply, id=names, error=errors(), metadata=metadata("application/json")),
    written,
)
def test_failure_round_trip(failure, form):
    body = encode_reply(failure, content_type=form[0], encoding=form[1])
    assert plain(decode_reply(body)) == plain(failure)


@bounded
@given(replies(), written, st.integers(0, 2_000))
def test_split_always_fits_or_says_that_it_cannot(reply, form, limit):
    """E12: whatever the reply and the limit."""
    content_type, encoding = form
    try:
        bodies = split_reply(reply, limit, content_type=content_type, encoding=encoding)
    except RecordTooLarge as error:
        assert error.limit == limit and error.given is not None and error.given > limit
        return
    assert all(len(body) <= limit for body in bodies)
    joined = join_parts([decode_reply(body) for body in bodies])
    assert [item.index for item in joined.items] == [item.index for item in reply.items]
    for before, after in zip(reply.items, joined.items, strict=True):
        if after.error is None or after.error.code != "record_too_large":
            assert plain(Reply(**{**_bare(reply), "items": [before]})) == plain(
                Reply(**{**_bare(reply), "items": [after]})
            )


def _bare(reply):
    return {name: getattr(reply, name) for name in reply.__struct_fields__}


# --------------------------------------------------------------------------------- arbitrary bytes

SEEDS = sorted(golden_bytes().items())
LIMITS = Limits(max_record_bytes=4_096, max_items=8, max_item_bytes=256, max_metadata_bytes=128)
header_names = st.sampled_from(
    ["content-type", "reply-to", "request-id", "deadline-ms", "X", "Reply-To"]
)
any_headers = st.dictionaries(
    header_names,
    st.binary(max_size=12) | st.sampled_from([b"application/json", b"application/msgpack"]),
    max_size=3,
)


@st.composite
def mutated(draw):
    """A valid record with bytes changed, inserted, removed or repeated."""
    body = bytearray(draw(st.sampled_from(SEEDS))[1])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(body) - 1, 0)))
        how = draw(st.integers(0, 3))
        if how == 0:
            body[at : at + 1] = draw(st.binary(min_size=1, max_size=2))
        elif how == 1:
            body[at:at] = draw(st.binary(max_size=6))
        elif how == 2:
            del body[at : at + draw(st.integers(1, 8))]
        else:
            body[at:at] = body[at : at + draw(st.integers(1, 30))]
    return bytes(body)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["text", "image", "id", "a"]), inner, max_size=4)
    ),
    max_leaves=10,
)
FIELD_NAMES = [
    "id", "task", "model", "input", "query", "documents", "top_n", "dimensions", "normalize",
    "outputs", "encoding", "encoding_format", "dtype", "prompt", "truncate", "priority",
    "deadline_ms", "reply_to", "metadata", "schema_version", "instruction", "sort", "unknown",
]  # fmt: skip


@st.composite
def odd_records(draw):
    """Well-formed maps of known field names with values of any type."""
    fields = draw(st.dictionaries(st.sampled_from(FIELD_NAMES), plain_values, max_size=6))
    if draw(st.booleans()):
        fields["task"] = draw(st.sampled_from(["embed", "classify", "rerank", "score", "cancel"]))
    if draw(st.booleans()):
        return msgpack.packb(fields)
    return json.dumps(fields, default=lambda b: b.decode("latin-1")).encode()


def decodes_or_raises_ours(body, headers):
    try:
        decoded = decode_request(body, headers, default_id="d", limits=LIMITS)
    except EmbedstreamError as error:
        assert error.request_id is not None  # every failure has an address
        json.dumps(error.to_wire())
        assert len(json.dumps(error.to_wire())) < 16_384
        return
    assert isinstance(decoded, Request | CancelRequest)
    if isinstance(decoded, Request):
        again, its_headers = encode_request(decoded)
        assert decode_request(again, its_headers, default_id="d") == decoded


@settings(bounded, max_examples=400)
@given(st.binary(max_size=200), any_headers)
def test_any_bytes_decode_or_raise_ours(body, headers):
    """E13: no bytes get past the typed errors."""
    decodes_or_raises_ours(body, headers)


@settings(bounded, max_examples=400)
@given(mutated(), any_headers)
def test_mutated_records_decode_or_raise_ours(body, headers):
    """E13: nor do records that are nearly right."""
    decodes_or_raises_ours(body, headers)


@settings(bounded, max_examples=300)
@given(odd_records())
def test_odd_records_decode_or_raise_ours(body):
    """D07: known names with values of any type."""
    decodes_or_raises_ours(body, {})


@settings(bounded, max_examples=300)
@given(st.binary(max_size=200) | mutated())
def test_any_bytes_as_a_reply(body):
    try:
        assert isinstance(decode_reply(body), Reply | FailureReply)
    except EmbedstreamError as error:
        json.dumps(error.to_wire())


@pytest.mark.parametrize("name", [name for name, _ in SEEDS])
def test_every_truncation_is_a_typed_error(name):
    """D08, E13: a record cut anywhere is refused, never half read."""
    body = dict(SEEDS)[name]
    decode = decode_reply if name.startswith("reply") else _decode_request
    for end in range(len(body)):
        with pytest.raises(EmbedstreamError):
            decode(body[:end])


def _decode_request(body):
    return decode_request(body, {}, default_id="d")


@bounded
@given(requests())
def test_both_encodings_say_the_same(request_):
    """One contract: a record means the same in msgpack and in JSON."""
    body, _ = encode_request(request_)
    if request_.content_type == "application/json":
        fields = json.loads(body)
        other = decode_request(msgpack.packb(fields), {}, default_id="d")
        same = decode_request(body, {}, default_id="d")
        for name in same.__struct_fields__:
            if name not in ("content_type", "encoding", "traceparent"):
                assert getattr(other, name) == getattr(same, name)

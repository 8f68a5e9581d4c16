"""One named example of every request kind and reply kind; their bytes are the golden files.

Who calls it: tests of the wire contract. Run as a module it writes golden files that are missing
(`python -m tests.support.wire_examples`); an existing one is never touched: a released version's
bytes are what readers of that version rely on.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from schemas.codec import encode_reply, encode_request
from schemas.errors import NonFinite, TooLong, UnknownModel
from schemas.requests import (
    AnyRequest,
    CancelRequest,
    ClassifyRequest,
    ContentType,
    Conversation,
    Document,
    EmbedRequest,
    Encoding,
    Image,
    Message,
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

GOLDEN = Path(__file__).parent / "golden" / "v1"
SUFFIX: dict[ContentType, str] = {"application/msgpack": "msgpack", "application/json": "json"}
MODEL = ModelRef("minilm", "sha256:0123456789abcdef", "float32")


def requests(content_type: ContentType) -> dict[str, AnyRequest]:
    """Requests by name, as decoded."""
    default: Encoding = "bytes" if content_type == "application/msgpack" else "float"
    common: dict[str, Any] = {"content_type": content_type, "encoding": default}
    return {
        "embed-minimal": EmbedRequest(id="r-1", input=(Text("hello"),), **common),
        "embed-full": EmbedRequest(
            id="r-2", content_type=content_type, encoding="base64", model="minilm",
            input=(Text("naïve 👍"), Text("")), dimensions=128, normalize=False,
            outputs=("dense", "sparse", "multivector"), dtype="float16", prompt_name="query",
            truncate="right", priority="interactive", deadline_ms=1_800_000_000_000,
            reply_to="embedstream.replies", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            metadata={"tenant": "é", "n": [1, -2, 2.5, None, True, {"k": ""}]},
        ),
        "embed-token-ids": EmbedRequest(
            id="r-3", input=(TokenIds((15339, 1917)), TokenIds((0,)), TokenIds(())), **common
        ),
        "embed-image": EmbedRequest(
            id="r-4", input=(Image(b"\x89PNG\x00\xff"), Image(b"GIF8", "a cat")), **common
        ),
        "classify": ClassifyRequest(
            id="r-5", input=(Text("good"), TokenIds((7,))), raw_scores=True, prompt="say: ", **common
        ),
        "classify-messages": ClassifyRequest(
            id="r-12", input=(
                Conversation((Message("system", ""), Message("user", "hé?"), Message("assistant", "yes"))),
                Text("plain"),
            ), **common,
        ),
        "rerank": RerankRequest(
            id="r-6", query="capital of China", documents=(Document("Beijing"), Document("Tokyo", "d2")),
            top_n=1, return_documents=True, raw_scores=True, instruction="judge", sort=False,
            **common,
        ),
        "score": ScoreRequest(id="r-7", query="q", documents=(Document("a"), Document("b")), **common),
        "score-labels": ScoreRequest(
            id="r-10", query="q", documents=(Document("a"),), labels=("yes", " né"), **common
        ),
        "score-label-ids": ScoreRequest(
            id="r-11", query=TokenIds((7, 8)), documents=(Document(ids=(9,)),), labels=(9454, 0),
            raw_scores=True, **common,
        ),
    }  # fmt: skip


def replies() -> dict[str, tuple[Reply | FailureReply, Encoding | None]]:
    """Replies by name, with the encoding they are written in (None: the default)."""
    f32 = struct.pack("<4f", 0.1, -0.25, 3.4028234663852886e38, 1.401298464324817e-45)
    full = Reply(
        id="r-2", task="embed", model=MODEL, n=2, usage=Usage(7, 7), dimensions=4, dtype="float32",
        normalized=True, prompt="query: ", timings=Timings(0.5, 12.25, 13.0), metadata={"k": [1]},
        items=[
            ItemReply(
                index=0, embedding=f32, sparse=Sparse([3, 77], [0.5, 1.25]), multivector=[f32, f32],
                tokens=7, truncated=False,
            ),
            ItemReply(index=1, error=TooLong("551 tokens", path="$.input[1]", items=[1], limit=512, given=551)),
        ],
    )  # fmt: skip
    int8 = Reply(
        id="r-3", task="embed", model=MODEL, n=2, usage=Usage(3, 3), dimensions=4, dtype="int8",
        items=[
            ItemReply(index=0, embedding=b"\x00\x7f\x80\xff", scale=0.0078125, multivector=[b"\x01\x02\x03\xff"], scales=[0.5], tokens=3, truncated=True),
            ItemReply(index=1, error=NonFinite("the model gave NaN")),
        ],
    )  # fmt: skip
    part = Reply(
        id="r-8", task="embed", model=MODEL, n=3, usage=Usage(3, 3), dimensions=8, dtype="binary",
        part=1, parts=3, items=[ItemReply(index=1, embedding=b"\xa5", tokens=1, truncated=False)],
    )  # fmt: skip
    classify = Reply(
        id="r-5", task="classify", model=MODEL, n=1, usage=Usage(2, 2),
        items=[ItemReply(index=0, scores={"good": 0.75, "bad": 0.25}, tokens=2, truncated=False)],
    )  # fmt: skip
    rerank = Reply(
        id="r-6", task="rerank", model=MODEL, n=2, usage=Usage(9, 9),
        items=[
            ItemReply(index=1, relevance_score=0.5, id="d2", document="Tokyo", tokens=5, truncated=False),
            ItemReply(index=0, relevance_score=-8.25, tokens=4, truncated=False),
        ],
    )  # fmt: skip
    labels = Reply(
        id="r-10", task="score", model=MODEL, n=1, usage=Usage(4, 4),
        items=[ItemReply(index=0, scores={"yes": 0.75, " né": 0.25}, tokens=4, truncated=False)],
    )  # fmt: skip
    failure = FailureReply(id="r-9", error=UnknownModel("no such model"), metadata={"tenant": "é"})
    return {
        "embed-default": (full, None),
        "embed-float": (full, "float"),
        "embed-base64": (full, "base64"),
        "embed-int8": (int8, None),
        "embed-part": (part, None),
        "classify": (classify, None),
        "rerank": (rerank, None),
        "score-labels": (labels, None),
        "failure": (failure, None),
    }


def golden_bytes() -> dict[str, bytes]:
    """File name -> bytes that today's encoder gives."""
    files: dict[str, bytes] = {"request-cancel.msgpack": encode_request(CancelRequest(id="r-1"))[0]}
    for content_type, suffix in SUFFIX.items():
        for name, request in requests(content_type).items():
            files[f"request-{name}.{suffix}"] = encode_request(request)[0]
        for name, (reply, encoding) in replies().items():
            files[f"reply-{name}.{suffix}"] = encode_reply(
                reply, content_type=content_type, encoding=encoding
            )
    return files


def plain(reply: Reply | FailureReply) -> Any:
    """A reply in a form that compares by value (errors compare by identity)."""

    def error(value: Any) -> Any:
        return None if value is None else (type(value), value.to_wire())

    if isinstance(reply, FailureReply):
        return (reply.id, error(reply.error), reply.metadata)
    items = [
        [error(value) if name == "error" else value for name, value in fields_of(item)]
        for item in reply.items
    ]
    return [pair for pair in fields_of(reply) if pair[0] != "items"], items


def fields_of(struct_: msgspec.Struct) -> list[tuple[str, Any]]:
    """Names and values in the order of declaration."""
    return [(name, getattr(struct_, name)) for name in struct_.__struct_fields__]


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for file_name, data in golden_bytes().items():
        if not (GOLDEN / file_name).exists():
            (GOLDEN / file_name).write_bytes(data)

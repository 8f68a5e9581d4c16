"""Long texts through the whole service: bytes in, reply out."""

from __future__ import annotations

from pathlib import Path

import msgpack
import numpy as np
import pytest

from gpu.load import make_runner_factory
from pipeline.oneoff import run_inproc
from pipeline.settings.load import Settings
from schemas.codec import decode_reply
from schemas.errors import InvalidRequest, Unsupported
from schemas.results import FailureReply, Reply
from tests.support.models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "m", "bert", max_seq_length=16)


async def answers(folder: Path, *records: dict[str, object]) -> list[Reply | FailureReply]:
    factories = {"tiny": make_runner_factory("tiny", folder, device="cpu")}
    replies = []
    async with run_inproc(Settings(), runner_factories=factories) as running:
        for record in records:
            (raw,) = await running.request(msgpack.packb(record), None)
            replies.append(decode_reply(raw.body, raw.headers))
    return replies


async def test_one_reply_entry_per_long_text(folder: Path) -> None:
    """B20, B03: n results for n texts; tokens are those computed; nothing is called truncated."""
    long = " ".join(["river stream of text"] * 20)
    averaged, late, plain, cls = await answers(
        folder,
        {"id": "a", "input": ["kafka", long], "aggregate": "mean"},
        {"id": "b", "input": ["one two three four five"], "chunk_tokens": 3, "dtype": "int8"},
        {"id": "c", "input": ["kafka", long]},
        {"id": "d", "task": "classify", "input": "kafka", "chunk_tokens": 3},
    )
    assert isinstance(averaged, Reply) and averaged.n == 2
    short, joined = averaged.items
    assert short.tokens == 3 and joined.tokens == 80 + 2 * 6
    assert joined.truncated is False and joined.error is None
    vector = np.frombuffer(joined.embedding or b"", "<f4")
    assert vector.shape == (32,) and abs(np.linalg.norm(vector) - 1) <= 1e-6
    assert averaged.usage.total_tokens == 95

    assert isinstance(late, Reply) and late.dimensions == 32
    (entry,) = late.items
    assert entry.embedding is None and entry.spans == [(0, 2), (2, 4), (4, 7)]
    assert [len(row) for row in entry.multivector or ()] == [32, 32, 32]
    assert entry.scales is not None and len(entry.scales) == 3

    assert isinstance(plain, Reply) and plain.items[1].error is not None
    assert plain.items[1].error.code == "too_long"
    assert isinstance(cls, FailureReply) and isinstance(cls.error, InvalidRequest)


async def test_a_model_that_cannot_says_so(tmp_path: Path) -> None:
    (reply,) = await answers(
        write_model(tmp_path / "m", "bert", pooling="cls"),
        {"id": "a", "input": "kafka", "chunk_tokens": 3},
    )
    assert isinstance(reply, FailureReply) and isinstance(reply.error, Unsupported)
    assert reply.error.path == "$.chunk_tokens"

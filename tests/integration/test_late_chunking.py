"""Late chunking from files to a collection and back, with a tiny real model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from gpu.encode.measure import text_measure
from gpu.load import make_runner_factory
from pipeline.cli.commands import main
from pipeline.indexing.chunking import Chunker
from pipeline.indexing.options import ChunkOptions
from pipeline.indexing.sinks.base import Row
from pipeline.indexing.sinks.registry import open_collection
from tests.support.models import write_model
from tests.unit.gpu.encode.test_spans import reference

pytestmark = [pytest.mark.timeout(180)]
pytest.importorskip("lancedb")

SENTENCE = "The river of text runs to a queue. One broker reads the stream."
SHORT = {"id": "short", "text": f"{SENTENCE} {SENTENCE}"}
LONG = {"id": "long", "text": " ".join([SENTENCE] * 12)}
TO = "lance://index#docs"
HOW = ["--id", "id", "--text", "{text}", "--chunk-tokens", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", max_seq_length=128)


def index(model: Path, *documents: dict[str, str], to: str = TO, late: bool = True) -> int:
    Path("docs.jsonl").write_text("\n".join(map(json.dumps, documents)))
    flags = [*HOW, "--late"] if late else HOW
    return main(["index", "docs.jsonl", "--to", to, *flags, "--model", str(model)])


def rows(url: str = TO) -> dict[tuple[str, int], Row]:
    async def read() -> dict[tuple[str, int], Row]:
        collection = open_collection(url)
        try:
            await collection.open_as_is()
            return {(row.document_id, row.ordinal): row async for row in collection.rows()}
        finally:
            await collection.aclose()

    return asyncio.run(read())


def test_chunks_know_their_document_and_follow_its_changes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document that fits against transformers; one that changes far from a chunk changes its vector."""
    monkeypatch.chdir(tmp_path)
    assert index(model, SHORT, LONG) == 0
    first = rows()
    texts = [row.text for (name, _), row in sorted(first.items()) if name == "short"]
    spans, at = [], 0
    for text in texts:
        at = SHORT["text"].index(text, at)
        spans.append((at, at + len(text)))
        at += len(text)
    wanted = reference(model, SHORT["text"], spans)
    found = np.stack([first["short", i].vector for i in range(len(texts))])
    assert len(texts) > 1 and np.abs(found - wanted).max() <= 1e-5
    assert index(model, SHORT, LONG) == 0
    assert "0 documents written, 2 there already" in capsys.readouterr().err
    assert {k: r.vector.tobytes() for k, r in rows().items()} == {
        k: r.vector.tobytes() for k, r in first.items()
    }
    changed = {"id": "short", "text": SHORT["text"].rstrip(".") + " of kafka."}
    assert index(model, changed, LONG) == 0
    second = rows()
    same_text = second["short", 0].text == first["short", 0].text
    assert same_text and not np.array_equal(second["short", 0].vector, first["short", 0].vector)
    assert all(np.array_equal(second[k].vector, first[k].vector) for k in first if k[0] == "long")
    shorter = {"id": "short", "text": SENTENCE[:30]}
    assert index(model, shorter, LONG) == 0
    assert [key for key in rows() if key[0] == "short"] == [("short", 0)]


def test_each_window_of_a_long_document_is_read_for_itself(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers, window by window."""
    monkeypatch.chdir(tmp_path)
    assert index(model, LONG) == 0
    encoder = make_runner_factory("m", model)().encoder
    measure = text_measure(encoder, prompt=None, prompt_name=None)
    options = ChunkOptions(late=True, max_tokens=24)
    cut = Chunker(options, tokenizer_json=measure.tokenizer_json, room=measure.room).cut(
        LONG["text"]
    )
    assert len(cut.items) > 1
    stored = rows()
    assert [stored["long", i].text for i in range(len(stored))] == list(cut.texts)
    found = np.stack([stored["long", i].vector for i in range(len(stored))])
    wanted = np.concatenate([reference(model, item.text, item.spans) for item in cut.items])
    assert np.abs(found - wanted).max() <= 1e-5


def test_plain_and_late_chunks_never_share_a_collection(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """H03: the same model, prompt and cuts, and other vectors all the same."""
    monkeypatch.chdir(tmp_path)
    assert index(model, SHORT, late=False) == 0
    assert index(model, SHORT, late=True) == 1
    told = capsys.readouterr().err
    assert "chunking is" in told and "late=true" in told and "reindex" in told
    assert main(["reindex", TO, "--to", "lance://index#late", "--late", "--chunk-tokens", "24",
                 "--model", str(model)]) == 0  # fmt: skip
    assert index(model, SHORT, to="lance://index#anew") == 0
    made, anew = rows("lance://index#late"), rows("lance://index#anew")
    assert [row.text for row in made.values()] == [row.text for row in anew.values()]
    assert main(["index", "status", "lance://index#late"]) == 0
    assert "late=true" in capsys.readouterr().out
    search = ["search", SHORT["text"][:40], "--in", "lance://index#late", "--model", str(model)]
    assert main(search) == 0
    assert "short" in capsys.readouterr().out


def test_what_late_chunking_cannot_do_is_said_at_start(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_model(tmp_path / "cls", pooling="cls")
    assert index(other, SHORT) == 2
    assert "mean pooling" in capsys.readouterr().err
    Path("docs.jsonl").write_text(json.dumps(SHORT))
    plain = ["index", "docs.jsonl", "--to", TO, "--id", "id", "--text", "{text}"]
    assert main([*plain, "--late", "--model", str(model)]) == 2
    assert "chunk.late needs chunk.max_tokens" in capsys.readouterr().err
    overlapping = [*plain, "--chunk-tokens", "24", "--overlap", "8", "--model", str(model)]
    assert main(overlapping) == 0
    command = ["reindex", TO, "--to", "lance://index#b", "--late", "--chunk-tokens", "24"]
    assert main([*command, "--model", str(model)]) == 2
    assert "overlap" in capsys.readouterr().err

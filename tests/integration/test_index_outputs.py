"""Sparse and token-level vectors from files to a collection and back, with tiny real models."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.device.pick import init_executor_thread
from gpu.load import make_runner_factory
from pipeline.cli.commands import main
from pipeline.indexing.sinks.base import Row
from pipeline.indexing.sinks.registry import open_collection
from tests.conformance.collection_suite import as_bytes
from tests.support.models import write_model
from tests.support.models_outputs import write_colbert, write_splade
from tests.unit.gpu.encode.test_long_texts import answer, encode

pytestmark = [pytest.mark.timeout(180)]
pytest.importorskip("lancedb")
pytest.importorskip("qdrant_client")

TEXTS = {
    "river": "the river runs to the stream",
    "queue": "one broker and a queue of kafka",
    "text": "text in two vectors",
}
QDRANT, LANCE = "qdrant:///{}/q#docs", "lance://index#docs"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "sparse": write_splade(folder / "splade"),
        "multivector": write_colbert(folder / "colbert"),
        "dense": write_model(folder / "dense"),
    }


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": name, "text": text}) for name, text in TEXTS.items()]
    Path("docs.jsonl").write_text("\n".join(rows))


def index(to: str, model: Path, *more: str) -> int:
    how = ["--id", "id", "--text", "{text}", "--model", str(model)]
    return main(["index", "docs.jsonl", "--to", to, *how, *more])


def rows(url: str) -> dict[str, Row]:
    async def read() -> dict[str, Row]:
        collection = open_collection(url)
        try:
            await collection.open_as_is()
            return {row.document_id: row async for row in collection.rows()}
        finally:
            await collection.aclose()

    return asyncio.run(read())


def outputs(model: Path, name: str, text: str, **fields: Any) -> Any:
    """What the engine gives for one text, on a thread like an executor's: with more intra-op threads than
    one, last digits may differ."""

    def compute() -> Any:
        runner = make_runner_factory("m", model)()
        (found,) = answer(runner, encode(runner, text, outputs=(name,), **fields).items)
        return getattr(found, name)

    with ThreadPoolExecutor(1, initializer=init_executor_thread) as thread:
        return thread.submit(compute).result()


def first_hit(capsys: pytest.CaptureFixture[str], question: str, url: str, model: Path) -> str:
    capsys.readouterr()
    assert main(["search", question, "--in", url, "--model", str(model)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\d\.\d", line)]
    return lines[0]


def test_a_sparse_model_fills_a_store_that_has_sparse_vectors(
    tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, model = QDRANT.format(tmp_path), models["sparse"]
    assert index(url, model) == 0
    for name, row in rows(url).items():
        indices, values = outputs(model, "sparse", TEXTS[name])
        assert as_bytes(row.vector) == indices.tobytes() + values.tobytes()
    assert "queue" in first_hit(capsys, TEXTS["queue"], url, model)
    assert main(["index", "status", url]) == 0
    assert "sparse, compared by dot" in capsys.readouterr().out
    assert index(url, model) == 0
    assert "0 documents written, 3 there already" in capsys.readouterr().err


def test_a_model_with_vectors_per_token_fills_a_store_that_has_them(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = models["multivector"]
    assert index(LANCE, model) == 0
    stored = rows(LANCE)
    for name, row in stored.items():
        wanted = outputs(model, "multivector", TEXTS[name])
        assert isinstance(row.vector, np.ndarray) and np.array_equal(row.vector, wanted)
    line = first_hit(capsys, TEXTS["river"], LANCE, model)
    question = outputs(model, "multivector", TEXTS["river"], prompt_name="query")
    score = (question @ stored["river"].vector.T).max(axis=1).sum()  # type: ignore[union-attr]
    found = re.search(r"\d+\.\d+", line)
    assert found is not None and abs(float(found.group()) - score) < 2e-3


@pytest.mark.parametrize(
    ("kind", "stores"),
    [("sparse", "Qdrant, PostgreSQL, Milvus"), ("multivector", "Qdrant, LanceDB")],
)
def test_a_store_without_that_kind_refuses_at_start_and_names_those_that_have_it(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], kind: str, stores: str
) -> None:
    assert index("parquet://other#docs", models[kind]) == 1
    told = capsys.readouterr().err
    assert f"no {kind} vectors" in told and stores in told
    assert not Path("other", "docs").exists()


def test_what_a_model_does_not_give_is_said_at_start(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert index(LANCE, models["dense"], "--output", "sparse") == 2
    assert "makes no sparse vectors (it makes: dense)" in capsys.readouterr().err
    assert index(LANCE, models["sparse"], "--late", "--chunk-tokens", "16") == 2
    assert "chunk.late is for dense vectors" in capsys.readouterr().err


def test_a_dense_collection_is_made_again_with_sparse_vectors(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    url, model = QDRANT.format(tmp_path), models["sparse"]
    assert index(LANCE, models["dense"]) == 0
    assert main(["reindex", LANCE, "--to", url, "--model", str(model)]) == 0
    made = rows(url)
    other = url.replace("/q#", "/anew#")
    assert index(other, model) == 0
    anew = rows(other)
    assert {k: as_bytes(r.vector) for k, r in made.items()} == {
        k: as_bytes(r.vector) for k, r in anew.items()
    }

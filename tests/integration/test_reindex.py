"""`embedstream reindex` with two tiny real models: a second collection that `search` and `serve` accept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pipeline.cli.commands import main
from pipeline.indexing.sinks.base import Collection
from pipeline.indexing.sinks.registry import open_collection
from tests.support.memory_collection import MemoryCollection
from tests.support.models import write_model

pytestmark = pytest.mark.timeout(180)
DOCUMENTS = [{"id": f"d{i}", "text": f"document number {i}", "lang": "en"} for i in range(30)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "first"), write_model(folder / "second", seed=1)


@pytest.fixture
def indexed(tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    return tmp_path


def index(to: str, model: Path) -> None:
    arguments = ["--id", "id", "--text", "{text}", "--metadata", "lang", "--model", str(model)]
    assert main(["index", "docs.jsonl", "--to", to, *arguments]) == 0


def stored(url: str) -> dict[str, tuple[str, str, bytes]]:
    async def read() -> dict[str, tuple[str, str, bytes]]:
        collection = open_collection(url)
        try:
            await collection.open_as_is()
            return {
                row.document_id: (row.text, row.metadata["lang"], row.vector.tobytes())
                async for row in collection.rows()
            }
        finally:
            await collection.aclose()

    return asyncio.run(read())


def test_the_second_collection_is_the_one_that_indexing_anew_would_make(
    indexed: Path, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte; a question is then embedded by the second model."""
    pytest.importorskip("lancedb")
    first, second = models
    index("lance://index#docs", first)
    command = ["reindex", "lance://index#docs", "--to", "lance://index#docs2"]
    assert main([*command, "--model", str(second)]) == 0
    captured = capsys.readouterr()
    assert "30 documents written with second, 0 there already, 0 failed" in captured.err
    assert "overlap@10" in captured.err
    index("lance://index#anew", second)
    assert stored("lance://index#docs2") == stored("lance://index#anew")
    assert stored("lance://index#docs2") != stored("lance://index#docs")
    search = ["search", "number 3", "--in", "lance://index#docs2", "-k", "1"]
    assert main([*search, "--model", str(second)]) == 0
    # Again: nothing to do; and a file indexed into it is known.
    assert main([*command, "--model", str(second)]) == 0
    assert "0 documents written with second, 30 there already" in capsys.readouterr().err
    index("lance://index#docs2", second)
    assert "0 documents written, 30 there already" in capsys.readouterr().err


def test_the_route_that_writes_into_the_new_collection_says_how(
    indexed: Path, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lancedb")
    first, second = models
    index("lance://index#docs", first)
    Path("service.toml").write_text(
        f'models.other.path = "{first}"\nmodels.second.path = "{second}"\n'
        '[[routes]]\nname = "docs"\nmodel = "second"\n'
        'source = "kafka://localhost:1/docs?group=g"\ndestination = "lance://index#docs2"\n'
        '[routes.document]\ntext = "{text}"\nprompt = "passage: "\n[routes.chunk]\nmax_tokens = 20\n'
    )
    command = ["reindex", "lance://index#docs", "--to", "lance://index#docs2"]
    assert main([*command, "--config", "service.toml", "--chunk-tokens", "9"]) == 2
    assert "route docs writes into that collection" in capsys.readouterr().err
    assert main([*command, "--config", "service.toml"]) == 0
    assert main(["index", "status", "lance://index#docs2"]) == 0
    shown = capsys.readouterr().out
    assert "'passage: '" in shown and "max_tokens=20" in shown and "second" in shown


def test_readers_follow_the_alias_once_every_document_is_there(
    indexed: Path,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Over a store in memory: what a store does with its aliases is in its conformance suite."""
    pytest.importorskip("lancedb")
    first, second = models
    index("lance://index#docs", first)
    led: list[str] = []
    refused = {"d7"}

    class Aliased(MemoryCollection):
        has_aliases = True

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.refused = refused

        async def lead_alias(self, alias: str) -> None:
            assert len(self._stored.entries) == len(DOCUMENTS)
            led.append(f"{alias} -> {self.name}")

    def opened(url: str) -> Collection:
        return Aliased("v2") if url == "memory:v2" else open_collection(url)

    command = ["reindex", "lance://index#docs", "--alias", "docs", "--model", str(second), "--to"]
    assert main([*command, "lance://index#docs2"]) == 2
    assert "has no aliases" in capsys.readouterr().err
    monkeypatch.setattr("pipeline.indexing.sinks.registry.open_collection", opened)
    try:
        assert main([*command, "memory:v2"]) == 1
        assert "d7: one of them" in capsys.readouterr().err and led == []
        refused.clear()
        assert main([*command, "memory:v2"]) == 0
        assert led == ["docs -> v2"]
    finally:
        Aliased.stores.pop("v2", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lance://index#docs", "--to", "lance://index#docs"], "the same collection"),
        (["lance://index#none", "--to", "lance://index#docs2"], "does not exist"),
        (["lance://index#docs", "--to", "nothing://x#y"], "no such store"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_made(
    indexed: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    pytest.importorskip("lancedb")
    assert main(["reindex", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err
    assert not Path("index", "docs2.lance").exists()

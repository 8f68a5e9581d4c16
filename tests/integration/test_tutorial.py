"""docs/tutorial.md does what it says, with its own files and commands; so does the README's Kafka code.

The brokers are the session's in place of `embedstream up`, which tests/fault/test_up.py runs; commands
run in this process, so that the model's library is loaded once.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.commands import main
from pipeline.indexing.sinks.registry import open_collection
from tests.support.client import background_service
from tests.support.models import write_model
from tests.support.servers import ServerInfo, unique

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(word: str) -> list[list[str]]:
    """Arguments of the page's `embedstream` commands that begin so."""
    lines = "".join(blocks(PAGE, "sh")).splitlines()
    return [
        shlex.split(line)[1:] for line in lines if line.startswith(f".venv/bin/embedstream {word}")
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka_server: ServerInfo, model: Path
) -> Iterator[Callable[[str], str]]:
    """The reader's folder with the page's files, and the page's text for this broker and its names."""
    topic = unique("notes")

    def adapted(text: str) -> str:
        text = text.replace("localhost:9092", kafka_server.address).replace("8322", "0")
        text = text.replace("9092/notes", f"9092/{topic}").replace('("notes"', f'("{topic}"')
        return text.replace("/notes?group=notes-index", f"/{topic}?group={topic}")

    monkeypatch.chdir(tmp_path)
    settings = adapted(blocks(PAGE, "toml")[0])
    assert 'path = "all-MiniLM-L6-v2"' in settings
    (tmp_path / "notes.toml").write_text(settings.replace("all-MiniLM-L6-v2", str(model)))
    (tmp_path / "write.py").write_text(adapted(blocks(PAGE, "python")[0]))
    yield adapted


@contextlib.contextmanager
def serving() -> Iterator[subprocess.Popen[bytes]]:
    """The page's `serve`, until the block ends."""
    (arguments,) = commands("serve")
    with Path("serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *arguments], stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        until(lambda: "service_ready" in Path("serve.log").read_text(), process)
        yield process
    finally:
        process.terminate()
        assert process.wait(40) == 0, Path("serve.log").read_text()[-2000:]


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    stop = time.monotonic() + 120
    while not holds():
        assert process.poll() is None and time.monotonic() < stop, Path("serve.log").read_text()[
            -2000:
        ]
        time.sleep(0.1)


def stored() -> dict[str, str]:
    """Note -> its text, as the collection has it."""

    async def read() -> dict[str, str]:
        collection = open_collection("lance://index#notes")
        try:
            await collection.open_as_is()
            return {row.document_id: row.text async for row in collection.rows()}
        finally:
            await collection.aclose()

    return asyncio.run(read())


def test_notes_are_found_changed_and_gone(
    here: Callable[[str], str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model of random weights, which finds anything: what the page's own finds is tested below."""
    pytest.importorskip("lancedb")

    def told(arguments: list[str]) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    def write(*arguments: str) -> None:
        subprocess.run([sys.executable, "write.py", *arguments], check=True, timeout=60)

    (check,), (status,) = commands("check"), commands("index status")
    assert main(check) == 0
    captured = capsys.readouterr()
    assert "serve would start" in captured.out
    assert "serve will make what is missing" in captured.err
    lines = "".join(blocks(PAGE, "sh")).splitlines()
    first, move, delete = [shlex.split(line)[2:] for line in lines if "python write.py" in line]
    with serving() as process:
        write(*first)
        until(lambda: set(stored()) == {"deadlock", "lunch", "backup"}, process)
        write(*move)
        write(*delete)
        until(
            lambda: set(stored()) == {"deadlock", "lunch"} and "Monday" in stored()["lunch"],
            process,
        )
        shown = told([*commands("search")[-1], "--model", str(model)])
        assert "Monday" in shown and "Friday" not in shown and "backup" not in shown
        assert re.search(r"documents\W+2\b", told(status))


@pytest.mark.model
def test_the_questions_find_what_the_page_says(
    packaged_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """K37: the first search finds `lunch`, the second `deadlock`, and after the change Monday."""
    folder = packaged_model("all-MiniLM-L6-v2")
    notes = dict(re.findall(r'^    "(\w+)": \[(.*)\],$', blocks(PAGE, "python")[0], re.M))
    texts = ["\n\n".join(ast.literal_eval(f"[{note}]")) for note in notes.values()]
    questions = [arguments[1] for arguments in commands("search")]
    assert main(["embed", *texts, *questions, "-o", "jsonl", "--model", str(folder)]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    vectors = np.array([item["embedding"] for item in data])
    best = (vectors[len(texts) :] @ vectors[: len(texts)].T).argmax(axis=1)
    assert [list(notes)[row] for row in best] == ["lunch", "deadlock", "lunch"]


def test_the_kafka_code_of_the_readme_runs(kafka_server: ServerInfo) -> None:
    requests, replies = unique("embedstream.requests"), unique("embedstream.replies")
    code = blocks(README, "python")[1].replace("localhost:9092", kafka_server.address)
    code = code.replace("embedstream.requests", requests).replace("embedstream.replies", replies)
    source = f"kafka://{kafka_server.address}/{requests}?reply_topic={replies}&partitions=1"
    with background_service(source):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[{") and done.stdout.count("'embedding'") == 2

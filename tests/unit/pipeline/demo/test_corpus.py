"""Demo corpora: the same selection everywhere, and every question has its answer in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.demo import corpus
from pipeline.demo.corpus import Document, load_corpus, parse_dictd, python_documents

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def digits(value: int) -> str:
    text = ALPHABET[value % 64]
    while value := value // 64:
        text = ALPHABET[value % 64] + text
    return text


def dictionary(entries: dict[str, str]) -> tuple[bytes, str]:
    """A dictd text and index with one line of the index for every headword of an entry."""
    text, index = b"", ["00-database-info\tA\tF"]
    for headwords, body in entries.items():
        names = headwords.split("|")
        entry = ("\n".join(names) + "\n\n   " + body.replace("\n", "\n   ") + "\n\n").encode()
        index += [f"{name}\t{digits(len(text))}\t{digits(len(entry))}" for name in names]
        text += entry
    return text, "\n".join(index) + "\n"


LONG = "is something that takes at least ten words to be explained properly, é"


def test_a_dictionary_is_read_entry_by_entry() -> None:
    text, index = dictionary(
        {
            "deadlock|deadly embrace": f"<parallel> {LONG}\nsee {{process}}. (1999-03-30)",
            "stub": "see elsewhere",
            "zebra": LONG,
        }
    )
    documents = parse_dictd(text, index)
    assert [d.title for d in documents] == ["deadlock", "zebra"], "two headwords, one document"
    assert documents[0].text == f"deadlock: <parallel> {LONG} see process."


@pytest.mark.parametrize("index", ["word\tA", "word only", "wörd\t!\tB"])
def test_a_broken_index_is_refused(index: str) -> None:
    with pytest.raises(ValueError, match=r"not enough values|base-64"):
        parse_dictd(b"text", index)


def fake_dictionary(monkeypatch: pytest.MonkeyPatch, n: int = 40) -> list[int]:
    """Instead of apt: `n` filler entries and the answers of all sample questions."""
    entries = {f"word {i}": f"{LONG} {'more ' * i}" for i in range(n)}
    entries.update({q.answer: f"{LONG} answer" for q in corpus.FOLDOC_QUESTIONS})
    calls: list[int] = []

    def fetch(folder: Path) -> tuple[bytes, str]:
        calls.append(1)
        return dictionary(entries)

    monkeypatch.setattr(corpus, "_fetch_dictionary", fetch)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return calls


@pytest.mark.parametrize("n", [1, 5, 20, 1000])
def test_every_question_has_its_answer_in_the_selection(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_dictionary(monkeypatch)
    found = load_corpus(n, root=tmp_path)
    titles = [document.title for document in found.documents]
    assert len(titles) == len(set(titles)) == min(n, 47)
    assert len(found.questions) == min(5, n)
    assert {question.answer for question in found.questions} <= set(titles)
    assert found.note == ""


def test_the_selection_is_the_same_every_time_and_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_dictionary(monkeypatch)
    first = load_corpus(20, root=tmp_path)
    assert load_corpus(20, root=tmp_path) == first
    assert len(calls) == 1
    assert set(first.documents) < set(load_corpus(30, root=tmp_path).documents)
    (tmp_path / "foldoc.json").write_text("[damaged")
    assert load_corpus(20, root=tmp_path) == first
    assert len(calls) == 2


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(100, "apt-get"),
        subprocess.TimeoutExpired("apt-get", 60),
        OSError(28, "No space left on device"),
        EOFError("Compressed file ended"),
    ],
)
def test_whatever_keeps_the_dictionary_away_is_said_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> tuple[bytes, str]:
        raise error

    monkeypatch.setattr(corpus, "_fetch_dictionary", fail)
    monkeypatch.setattr(corpus, "python_documents", lambda: [Document("t", LONG)])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = load_corpus(200, root=tmp_path)
    assert found.name == "Python documentation"
    assert "cannot be had here" in found.note and "\n" not in found.note


def test_the_python_documentation_answers_its_questions(tmp_path: Path) -> None:
    found = load_corpus(200, root=tmp_path, download=False)
    assert len(found.documents) == 200
    assert len(found.questions) == 5
    titles = {document.title for document in found.documents}
    assert {question.answer for question in found.questions} <= titles


def test_a_system_without_apt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(corpus, "python_documents", lambda: [Document("t", LONG)])
    assert "no apt-get" in load_corpus(10, root=tmp_path).note
    assert "downloads are off" in load_corpus(10, root=tmp_path, download=False).note


def test_lists_of_our_own_are_fetched_when_the_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        commands.append(command)
        if command[-1] == corpus.PACKAGE and len(commands) == 1:
            raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr(corpus, "_run", run)
    with pytest.raises(OSError, match="has no package"):
        corpus._fetch_dictionary(tmp_path)
    assert [command[-1] for command in commands] == [corpus.PACKAGE, "update", corpus.PACKAGE]
    own = next(part for part in commands[1] if part.startswith("Dir::State::Lists="))
    assert str(tmp_path) in own, "the system's own lists stay as they are"


def test_docstrings_come_with_their_dotted_names(tmp_path: Path) -> None:
    package = tmp_path / "collections"
    package.mkdir()
    (package / "__init__.py").write_text(
        f'"""{LONG}"""\nclass Counter:\n    """{LONG} counts."""\n    def _hidden(self):\n'
        f'        """{LONG}"""\n    def total(self):\n        """{LONG} total."""\n'
    )
    (package / "broken.py").write_text("def (")
    (tmp_path / "copy.py").write_text('"""too short"""\n')
    own = [d for d in python_documents(tmp_path) if not d.title.startswith("topic ")]
    assert own == [
        Document("collections", f"collections: {LONG}"),
        Document("collections.Counter", f"collections.Counter: {LONG} counts."),
        Document("collections.Counter.total", f"collections.Counter.total: {LONG} total."),
    ]

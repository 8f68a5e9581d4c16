"""Documents and questions for the demo: a dictionary of computing, or the Python documentation.

Who calls it: `pipeline.demo.run`.
What must stay true: the same source gives the same selection on every machine; every sample question
has its answer in the selection; nothing needs root or a changed system: the dictionary is fetched by
`apt-get download` into our cache, and where that cannot be, the documentation inside every CPython
is used and said to be.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "dict-foldoc"
APT_TIMEOUT_S = 60.0
"""For one apt command; a mirror that hangs must not hang the demo."""
MIN_WORDS = 10
MAX_CHARS = 20_000
N_QUESTIONS = 5
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_DIGIT = {char: value for value, char in enumerate(_BASE64)}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: `title` is unique inside its corpus."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A sample question and the title of a document that answers it."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """A selection of documents with the questions that they answer."""

    name: str
    licence: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    note: str = ""


FOLDOC_QUESTIONS = (
    Question("how does a computer find the address for a host name", "Domain Name System"),
    Question("two processes wait for each other and neither can go on", "deadlock"),
    Question("How is memory that a program no longer uses reclaimed?", "garbage collection"),
    Question("How can I encrypt without sharing a secret key first?", "public-key encryption"),
    Question("Which sorting algorithm divides the list around one element?", "Quicksort"),
    Question("pretending that there is more memory than is installed", "virtual memory"),
    Question("a function that calls itself", "recursion"),
)
PYTHON_QUESTIONS = (
    Question("How do I count how often each element occurs?", "collections.Counter"),
    Question("How do I run blocking functions in a pool of threads?", "concurrent.futures.thread.ThreadPoolExecutor"),
    Question("How can I make a temporary directory that is removed afterwards?", "tempfile.TemporaryDirectory"),
    Question("How do I find where to insert an item into a sorted list?", "bisect.bisect_left"),
    Question("Which function formats text to fit a given width?", "textwrap.fill"),
    Question("How do I copy a whole directory tree?", "shutil.copytree"),
    Question("How do I measure the similarity of two sequences?", "difflib.SequenceMatcher"),
)  # fmt: skip


def corpora_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where parsed corpora are kept: the user's cache folder."""
    env = os.environ if environ is None else environ
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "embedstream" / "corpora"


def load_corpus(n_documents: int, *, root: Path | None = None, download: bool = True) -> Corpus:
    """`n_documents` documents of mixed length, with up to five questions that they answer.

    The dictionary where it can be had, else the Python documentation; `note` says why.
    Fewer documents come back when the source has fewer.
    """
    entries, reason = _dictionary(root or corpora_root(), download)
    if entries:
        return _select(
            "Free On-line Dictionary of Computing",
            "GFDL-1.1-or-later",
            entries,
            FOLDOC_QUESTIONS,
            n_documents,
        )
    return _select(
        "Python documentation",
        "PSF-2.0",
        list(python_documents()),
        PYTHON_QUESTIONS,
        n_documents,
        note=f"the dictionary of computing cannot be had here ({reason})",
    )


def _select(
    name: str,
    licence: str,
    entries: Sequence[Document],
    questions: Sequence[Question],
    n_documents: int,
    note: str = "",
) -> Corpus:
    """The answers, and then documents in the order of a hash: the same everywhere, mixed lengths."""
    by_title = {entry.title: entry for entry in entries}
    asked = [q for q in questions if q.answer in by_title][: min(N_QUESTIONS, n_documents)]
    answers = {question.answer for question in asked}
    rest = sorted((e for e in entries if e.title not in answers), key=_rank)
    chosen = [by_title[title] for title in answers] + rest[: max(0, n_documents - len(answers))]
    return Corpus(name, licence, tuple(sorted(chosen, key=_rank)), tuple(asked), note)


def _rank(document: Document) -> bytes:
    return hashlib.sha256(document.title.encode()).digest()


# --- the dictionary of computing ------------------------------------------------------------------


def _dictionary(root: Path, download: bool) -> tuple[list[Document], str]:
    """The parsed dictionary, from the cache or fetched now; else no entries and the reason."""
    cached = root / "foldoc.json"
    try:
        return [Document(title, text) for title, text in json.loads(cached.read_text("utf-8"))], ""
    except (OSError, ValueError, TypeError):
        pass
    if not download:
        return [], "downloads are off"
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            return [], f"no {tool} on this system"
    with tempfile.TemporaryDirectory(prefix="embedstream-foldoc-") as folder:
        try:
            entries = parse_dictd(*_fetch_dictionary(Path(folder)))
        except (OSError, subprocess.SubprocessError, ValueError, EOFError) as error:
            return [], f"{PACKAGE}: {str(error).splitlines()[0][:120] or type(error).__name__}"
    _write_cache(cached, entries)
    return entries, ""


def _write_cache(path: Path, entries: Iterable[Document]) -> None:
    """Best effort and atomic: without a cache the next run downloads again."""
    text = json.dumps([[entry.title, entry.text] for entry in entries], ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".tmp-", delete=False
        ) as handle:
            handle.write(text)
        os.replace(handle.name, path)
    except OSError:
        return


def _fetch_dictionary(folder: Path) -> tuple[bytes, str]:
    """(text, index) of the Debian package, downloaded and unpacked inside `folder`."""
    quick = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15"]
    if os.geteuid() == 0:
        quick += ["-o", "APT::Sandbox::User=root"]
    try:
        _apt([*quick, "download", PACKAGE], folder)
    except subprocess.CalledProcessError:
        # No package lists on this system (a container, say): use lists of our own.
        lists = folder / "lists"
        (lists / "partial").mkdir(parents=True)
        own = [*quick, "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={folder / 'cache'}"]
        _apt([*own, "update"], folder)
        _apt([*own, "download", PACKAGE], folder)
    package = next(folder.glob(f"{PACKAGE}_*.deb"), None)
    if package is None:
        raise FileNotFoundError(f"{folder} has no package")
    _run(["dpkg-deb", "-x", str(package), str(folder / "x")], folder)
    share = folder / "x" / "usr" / "share" / "dictd"
    with gzip.open(share / "foldoc.dict.dz") as handle:
        return handle.read(), (share / "foldoc.index").read_text("utf-8")


def _apt(arguments: list[str], folder: Path) -> None:
    _run(["apt-get", "-qq", *arguments], folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(  # noqa: S603 - fixed commands, no shell
        command,
        cwd=folder,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=APT_TIMEOUT_S,
    )


def parse_dictd(text: bytes, index: str) -> list[Document]:
    """Entries of a dictd dictionary, one per distinct place, in the order of the text.

    `index` lines are ``headword TAB offset TAB length``, numbers in base 64 (A-Za-z0-9+/), most
    significant digit first. Entries that only point elsewhere are left out.

    Raises:
        ValueError: the index does not have that form.
    """
    places: set[tuple[int, int]] = set()
    for line in index.splitlines():
        headword, first, size = line.split("\t")[:3]
        if not headword.startswith("00"):  # what the dictionary says about itself
            places.add((_number(first), _number(size)))
    documents: dict[str, Document] = {}
    for offset, length in sorted(places):
        entry = text[offset : offset + length].decode("utf-8", "replace")
        title, _, body = entry.strip().partition("\n")
        # Other headwords stand unindented under the first one.
        lines = [line for line in body.splitlines() if line.startswith((" ", "\t"))]
        plain = " ".join(" ".join(lines).replace("{", "").replace("}", "").split())
        plain = re.sub(r"\s*\(\d{4}-\d\d-\d\d\)$", "", plain)[:MAX_CHARS]
        if title and len(plain.split()) >= MIN_WORDS:
            documents.setdefault(title, Document(title, f"{title}: {plain}"))
    return list(documents.values())


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        if digit not in _DIGIT:
            raise ValueError(f"{digits!r} is no base-64 number")
        value = value * 64 + _DIGIT[digit]
    return value


# --- the Python documentation ---------------------------------------------------------------------

_MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "collections", "concurrent",
    "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal",
    "difflib", "email", "enum", "fileinput", "fnmatch", "fractions", "ftplib", "functools",
    "getpass", "gettext", "glob", "gzip", "hashlib", "heapq", "hmac", "html", "http", "imaplib",
    "importlib", "inspect", "ipaddress", "json", "locale", "logging", "lzma", "mailbox",
    "mimetypes", "multiprocessing", "netrc", "numbers", "operator", "optparse", "os", "pathlib",
    "pdb", "pickle", "pickletools", "platform", "plistlib", "pprint", "queue", "random", "re",
    "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "socketserver", "sqlite3", "ssl", "statistics", "string", "struct", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "token", "tokenize", "trace", "traceback",
    "tracemalloc", "turtle", "types", "typing", "unittest", "urllib", "uuid", "warnings", "wave",
    "weakref", "webbrowser", "wsgiref", "xml", "xmlrpc", "zipfile", "asyncio",
)  # fmt: skip


def python_documents(stdlib: Path | None = None) -> Iterator[Document]:
    """Language topics and docstrings of the standard library, each with its dotted name."""
    seen: set[str] = set()
    for name, text in sorted(_topics().items()):
        yield from _document(f"topic {name}", str(text), seen)
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        for path in _sources(root, module):
            dotted = ".".join(path.relative_to(root).with_suffix("").parts)
            yield from _docstrings(path, dotted.removesuffix(".__init__"), seen)


def _topics() -> Mapping[str, Any]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        return {}
    return topics


def _sources(root: Path, module: str) -> list[Path]:
    single = root / f"{module}.py"
    if single.is_file():
        return [single]
    found = (root / module).rglob("*.py")
    return sorted(path for path in found if "test" not in str(path.relative_to(root)))


def _docstrings(path: Path, dotted: str, seen: set[str]) -> Iterator[Document]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    pending: list[tuple[str, Any]] = [(dotted, tree)]
    while pending:
        name, node = pending.pop()
        text = ast.get_docstring(node)
        if text:
            yield from _document(name, text, seen)
        pending.extend(
            (f"{name}.{child.name}", child)
            for child in node.body
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not child.name.startswith("_")
        )


def _document(title: str, text: str, seen: set[str]) -> Iterator[Document]:
    plain = " ".join(text.split())[:MAX_CHARS]
    if title not in seen and len(plain.split()) >= MIN_WORDS:
        seen.add(title)
        yield Document(title, f"{title}: {plain}")

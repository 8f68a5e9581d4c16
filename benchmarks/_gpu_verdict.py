"""What `gpu_check` decides: which modules that had never run on a GPU stay, and which go.

Who calls it: `benchmarks.gpu_check`, with its rows.
What must stay true: a wrong number always means "remove"; what did not run is undecided and never kept by
silence; a module that is right stays only for a gain that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

BACKENDS = ("flashinfer", "varlen", "sdpa")  # in the order in which they are asked
GAIN = 1.05  # of a backend over the next one, and of one copy over many
GRAPH_GAIN = 1.1  # of packs of up to SMALL tokens
SMALL = 512

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """module: file. word: what to do with it. why: one line with the figures."""

    module: str
    word: Literal["keep", "remove", "undecided"]
    why: str


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One for each module that only a GPU can try."""
    return [
        *(_backend(name, rows) for name in BACKENDS),
        _staging([row for row in rows if row["section"] == "staging"]),
        _graphs([row for row in rows if row["section"] in ("graphs", "mfu")]),
    ]


def _backend(name: str, rows: Sequence[Row]) -> Verdict:
    module = f"gpu/attention/{name}.py"
    own = [row for row in rows if _named(row, name) and "why" not in row]
    wrong = _wrong(module, [*own, *(r for r in rows if name in str(r.get("served_by", "")))])
    if wrong is not None:
        return wrong
    if not any(row["section"] == "numbers" for row in own):
        refused = [str(row["why"]) for row in rows if _named(row, name) and "why" in row]
        return Verdict(module, "undecided", refused[0] if refused else "its section did not run")
    if name == BACKENDS[-1]:
        return Verdict(
            module, "keep", "its numbers are right, and it serves what the others refuse"
        )
    gains = _gains(name, rows)
    if not gains:
        return Verdict(module, "undecided", "right, but no layer was timed beside another backend")
    best, where = max((gain, what) for what, gain in gains.items())
    told = (
        f"at best {best:.2f} times the next backend ({where}), median {median(gains.values()):.2f}"
    )
    return Verdict(module, "keep" if best >= GAIN else "remove", told)


def _gains(name: str, rows: Sequence[Row]) -> dict[str, float]:
    """Per timed layer: the fastest backend behind this one in the order, plan included, over this one."""
    behind = BACKENDS[BACKENDS.index(name) + 1 :]
    took: dict[str, dict[str, float]] = {}
    for row in rows:
        backend, _, layer = str(row["what"]).partition(": ")
        if row["section"] == "layer" and "run_ms" in row:
            took.setdefault(layer, {})[backend] = row["run_ms"]
    return {
        layer: min(by[other] for other in behind if other in by) / by[name]
        for layer, by in took.items()
        if name in by and any(other in by for other in behind)
    }


def _staging(rows: Sequence[Row]) -> Verdict:
    module = "gpu/device/staging.py"
    wrong = _wrong(module, rows)
    if wrong is not None:
        return wrong
    timed = [row for row in rows if "one_ms" in row]
    if not timed:
        return Verdict(module, "undecided", "its section did not run")
    gain = timed[0]["eight_ms"] / timed[0]["one_ms"]
    told = f"one copy is {gain:.2f} times as fast as eight"
    return Verdict(module, "keep" if gain >= GAIN else "remove", told)


def _graphs(rows: Sequence[Row]) -> Verdict:
    module = "gpu/forward/cuda_graphs.py"
    wrong = _wrong(module, rows)
    if wrong is not None:
        return wrong
    took: dict[str, dict[str, float]] = {}
    for row in rows:
        what, _, setting = str(row["what"]).rpartition(", ")
        if "pack_ms" in row and setting.startswith("graphs "):
            took.setdefault(what, {})[setting] = row["pack_ms"]
    gains = {
        what: by["graphs off"] / by["graphs on"]
        for what, by in took.items()
        if len(by) == 2 and _tokens(what) <= SMALL
    }
    if not gains:
        return Verdict(module, "undecided", "no small pack was timed with graphs and without")
    told = f"median gain {median(gains.values()):.2f} in packs of up to {SMALL} tokens"
    return Verdict(module, "keep" if median(gains.values()) >= GRAPH_GAIN else "remove", told)


def _tokens(what: str) -> int:
    return int(what.rpartition(", ")[2].split()[0])


def _named(row: Row, backend: str) -> bool:
    """Whether the row is this backend's own: "flashinfer: ..." or "flashinfer batch-invariant: ..."."""
    what = str(row["what"])
    return what.startswith((f"{backend}:", f"{backend} batch-invariant:"))


def _wrong(module: str, rows: Iterable[Row]) -> Verdict | None:
    bad = [row for row in rows if row["ok"] is False]
    if not bad:
        return None
    return Verdict(module, "remove", f"wrong in {len(bad)} rows, first: {bad[0]['what']}")

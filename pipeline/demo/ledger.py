"""What the demo believes only after checking it: one good vector for every document, search, quantiles.

Who calls it: `pipeline.demo.run`.
What must stay true: pure; a document counts once however often it is answered, and every further
answer is counted as a duplicate and must be the same; a vector that is not finite or not of unit
length is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

UNIT_TOLERANCE = 1e-3
"""float32 sums over a few hundred squares are good to 1e-6; anything near this is a real fault."""
_MAX_PROBLEMS = 5

Vectors = npt.NDArray[np.float32]


class Ledger:
    """Answers to embed requests, by request id and position.

    Args:
        expected: request id -> how many texts it holds.
    """

    def __init__(self, expected: Mapping[str, int]) -> None:
        self._expected = dict(expected)
        self._vectors: dict[tuple[str, int], bytes] = {}
        self._problems: list[str] = []
        self.n_expected = sum(expected.values())
        self.duplicates = 0
        self.unknown = 0
        self.tokens = 0
        self.truncated = 0

    @property
    def n_answered(self) -> int:
        """Documents with a good vector."""
        return len(self._vectors)

    @property
    def complete(self) -> bool:
        """Every document is answered, or something has failed for good."""
        return self.n_answered == self.n_expected or bool(self._problems)

    def record(self, request_id: str, body: bytes) -> None:
        """Take one reply record (or one part of a reply)."""
        if request_id not in self._expected:
            self.unknown += 1
            return
        try:
            reply = msgpack.unpackb(body)
        except ValueError:
            self._problem(f"the reply to {request_id} is not msgpack")
            return
        if not isinstance(reply, dict) or reply.get("id") != request_id:
            self._problem(f"the reply to {request_id} names another request")
            return
        if "error" in reply:
            self._problem(f"{request_id} failed: {reply['error'].get('code')}")
            return
        for entry in reply.get("data", ()):
            self._entry(request_id, entry)

    def _entry(self, request_id: str, entry: Mapping[str, Any]) -> None:
        index = entry.get("index", -1)
        where = f"document {index} of {request_id}"
        if not 0 <= index < self._expected[request_id]:
            self._problem(f"{where} was never sent")
            return
        if "error" in entry:
            self._problem(f"{where} failed: {entry['error'].get('code')}")
            return
        vector = entry.get("embedding", b"")
        if (known := self._vectors.get((request_id, index))) is not None:
            self.duplicates += 1
            if known != vector:
                self._problem(f"{where} was answered twice, differently")
            return
        if fault := vector_fault(vector):
            self._problem(f"{where}: {fault}")
            return
        self._vectors[request_id, index] = vector
        self.tokens += int(entry.get("tokens") or 0)
        self.truncated += bool(entry.get("truncated"))

    def _problem(self, text: str) -> None:
        self._problems.append(text)

    def problems(self) -> list[str]:
        """Why the demo must not claim success, a few lines at most; empty when all is well."""
        found = self._problems[:_MAX_PROBLEMS]
        if len(self._problems) > _MAX_PROBLEMS:
            found.append(f"and {len(self._problems) - _MAX_PROBLEMS} more")
        missing = self.n_expected - self.n_answered
        if missing and not found:
            found.append(f"{missing} of {self.n_expected} documents were never answered")
        sizes = {len(vector) for vector in self._vectors.values()}
        if len(sizes) > 1:
            found.append(f"vectors of different sizes: {sorted(size // 4 for size in sizes)}")
        return found

    def matrix(self) -> Vectors:
        """[n_documents, dimensions] float32, in the order of the expected requests."""
        rows = [
            np.frombuffer(self._vectors[request_id, index], dtype="<f4")
            for request_id, n in self._expected.items()
            for index in range(n)
        ]
        return np.stack(rows).astype(np.float32, copy=False)


def vector_fault(vector: Any) -> str | None:
    """What is wrong with an embedding as it stands in a reply; None when nothing is."""
    if not isinstance(vector, bytes) or not vector or len(vector) % 4:
        return "no float32 vector"
    values = np.frombuffer(vector, dtype="<f4")
    if not np.isfinite(values).all():
        return "the vector is not finite"
    norm = float(np.linalg.norm(values.astype(np.float64)))
    if abs(norm - 1.0) > UNIT_TOLERANCE:
        return f"the vector has length {norm:.4f}, not 1"
    return None


def nearest(matrix: Vectors, query: Vectors, k: int) -> list[tuple[int, float]]:
    """(row, cosine) of the k nearest rows, best first, ties by row. Rows and query have length 1."""
    scores = matrix @ query
    order = np.lexsort((np.arange(len(scores)), -scores))[:k]
    return [(int(row), float(scores[row])) for row in order]


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: with 50 values, p99 is the largest."""
    ordered = sorted(values)
    rank = max(1, int(np.ceil(share * len(ordered))))
    return ordered[rank - 1]


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Sums from the Prometheus text format: sample name -> model label ("" when none) -> value."""
    sums: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        bare, _, labels = name.partition("{")
        model = labels.partition('model="')[2].partition('"')[0]
        by_model = sums.setdefault(bare, {})
        by_model[model] = by_model.get(model, 0.0) + float(value)
    return sums

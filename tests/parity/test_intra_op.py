"""A lone pack that idle executor threads help with has the bits that one thread gives it, whatever its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import EncodedItem, ItemOptions, pack, scatter
from gpu.device import intra_op
from gpu.executor import ModelExecutor
from gpu.load import make_runner_factory
from tests.support.models import write_model

WAIT_S = 60.0
FAMILIES = ("bert", "mpnet", "modernbert", "qwen3", "gemma2")
"""Own layers, a bias, windows, shared heads, a soft cap."""


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Everything that may be divided is, however small; the numbers of parts, as they come."""
    monkeypatch.setattr(intra_op, "SHORTEST_S", 0.0)
    monkeypatch.setattr(intra_op, "TRIED_EVERY", 2)  # by turns
    monkeypatch.setattr(intra_op, "PART_ROWS", 3)
    seen: list[int] = []
    whole = intra_op.Lent.map

    def map_(self: intra_op.Lent, works: list[Callable[[], Any]]) -> list[Any]:
        seen.append(len(works))
        return whole(self, works)

    monkeypatch.setattr(intra_op.Lent, "map", map_)
    yield seen


def compared(folder: Path, seen: list[int], lengths: tuple[int, ...], **given: Any) -> None:
    executor = ModelExecutor({"m": make_runner_factory("m", folder, **given)}, 4)
    try:
        runner = executor.load("m").result(WAIT_S)
        rng = np.random.default_rng(7)
        size = int(runner.spec.config["vocab_size"])
        options = ItemOptions(task=min(runner.spec.tasks))
        items = [EncodedItem(rng.integers(5, size, n, np.int32), options=options) for n in lengths]
        for part in (items, *([item] for item in items)):
            batch = pack(part)
            alone = scatter(batch, runner.forward(batch))
            for _ in range(4):  # whole, then in parts
                helped = scatter(batch, executor.submit("m", batch).result(WAIT_S))
                for one, other in zip(helped, alone, strict=True):
                    for name in ("dense", "scores"):
                        a, b = getattr(one, name), getattr(other, name)
                        assert (a is None) == (b is None)
                        assert a is None or a.tobytes() == b.tobytes()
        assert seen and max(seen) > 2
    finally:
        executor.close(WAIT_S)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_pack_has_the_same_bytes(tmp_path: Path, divided: list[int], family: str) -> None:
    """A06, K51."""
    folder = write_model(tmp_path / "m", family, pooling="mean", max_seq_length=60)
    compared(folder, divided, (13, 28, 28, 40))


@pytest.mark.parametrize("labels", [None, 2])
def test_so_has_one_of_which_first_tokens_are_read(
    tmp_path: Path, divided: list[int], labels: int | None
) -> None:
    """A06."""
    folder = write_model(tmp_path / "m", "bert", pooling="cls", labels=labels)
    compared(folder, divided, tuple(range(2, 50, 3)))


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("linears", ["onednn", "torch"])
def test_with_any_kernel_and_either_implementation(
    tmp_path: Path, divided: list[int], linears: str, implementation: str
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 200}
    folder = write_model(tmp_path / "m", "bert", pooling=None, **sizes)
    given = {"linears": linears, "implementation": implementation, "pooling": "mean"}
    compared(folder, divided, (61, 9), **given)

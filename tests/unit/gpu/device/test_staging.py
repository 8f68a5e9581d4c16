"""Pinned buffers and the copy-out, with copies that happen as late as CUDA may let them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gpu.answer.heads
import gpu.answer.outputs
from gpu.batch import EncodedItem, ItemOptions, pack
from gpu.device.staging import SMALLEST, CopyOut, InputStaging, row_numbers, upload
from tests.support.recorded import LateCopies

CPU = torch.device("cpu")


def target(n: int, rows: int = 1) -> torch.Tensor:
    return torch.full((rows, n), -1, dtype=torch.int64)


def test_a_buffer_waits_for_its_copy_before_it_is_written_again() -> None:
    """Four uploads through a ring of two: every target gets its own values, though late."""
    calls = LateCopies()
    ring = InputStaging(calls, torch.int64)
    targets = [ring.upload([np.full(3, i, np.int32)], target(3)) for i in range(4)]
    assert calls.log == [
        f"pinned {SMALLEST}", "copy 3", "record",
        f"pinned {SMALLEST}", "copy 3", "record",
        "wait", "copy 3", "record",
        "wait", "copy 3", "record",
    ]  # fmt: skip
    assert targets[2].tolist() == [[-1] * 3]  # the last two have not happened yet
    calls.run_until(4)
    assert [t.tolist() for t in targets] == [[[i] * 3] for i in range(4)]


def test_rows_travel_in_one_copy_and_buffers_double() -> None:
    calls = LateCopies()
    ring = InputStaging(calls, torch.int64)
    rows = [np.arange(5, dtype=np.int32), np.arange(5, 10, dtype=np.int32)]
    got = ring.upload(rows, target(5, 2))
    calls.run_until(1)
    assert got.tolist() == [list(range(5)), list(range(5, 10))]
    ring.upload([np.zeros(1, np.int32)], target(1))
    calls.log.clear()
    ring.upload([np.zeros(SMALLEST + 1, np.int32)], target(SMALLEST + 1))
    assert calls.log[:3] == ["wait", f"pinned {2 * SMALLEST}", f"copy {SMALLEST + 1}"]


def test_results_leave_by_one_copy_and_one_wait() -> None:
    calls = LateCopies()
    copies = CopyOut(CPU, calls)
    parts = [torch.randn(2, 3), torch.randn(0, 4), torch.randn(5), torch.randn(4, 4)[:, ::2]]
    tickets = [copies.add(part) for part in parts]
    with pytest.raises(AssertionError, match="finish"):
        tickets[0]()
    copies.finish()
    copies.finish()
    assert calls.log == [f"pinned {SMALLEST}", f"copy {6 + 5 + 8}", "record", "wait"]
    for part, ticket in zip(parts, tickets, strict=True):
        assert np.array_equal(ticket(), part.numpy()) and ticket().dtype == np.float32


def test_what_was_handed_out_is_not_overwritten_by_the_next_forward() -> None:
    calls = LateCopies()
    first, second = CopyOut(CPU, calls), CopyOut(CPU, calls)
    ticket = first.add(torch.ones(4))
    first.finish()
    array = ticket()
    second.add(torch.zeros(4))
    second.finish()
    assert array.tolist() == [1.0] * 4
    assert calls.log.count(f"pinned {SMALLEST}") == 1  # the buffer itself is shared


def test_a_forward_without_results_copies_nothing() -> None:
    calls = LateCopies()
    CopyOut(CPU, calls).finish()
    assert calls.log == []


def test_on_the_cpu_nothing_is_copied() -> None:
    copies = CopyOut(CPU)
    values = torch.randn(3, 2)
    ticket = copies.add(values)
    assert np.shares_memory(ticket(), values.numpy())
    copies.finish()


def test_upload_on_the_cpu() -> None:
    rows = [np.array([1, 2], np.int32), np.array([3, 4], np.int32)]
    made = upload(rows, CPU)
    assert [t.tolist() for t in made] == [[1, 2], [3, 4]]
    assert all(t.dtype == torch.int64 for t in made)
    (narrow,) = upload(rows[:1], CPU, torch.int32)
    assert narrow.dtype == torch.int32
    held = target(2, 2)
    upload(rows, CPU, into=held)
    assert held.tolist() == [[1, 2], [3, 4]]
    assert row_numbers([2, 0], CPU).tolist() == [2, 0]
    assert row_numbers([], CPU).dtype == torch.int64


def mixed_pack(task: Any, outputs: tuple[Any, ...]) -> Any:
    """Items that ask for vectors of two sizes, raw and normalised, and for spans."""
    rng = np.random.default_rng(0)
    options = [
        ItemOptions(task=task, outputs=outputs),
        ItemOptions(task=task, outputs=outputs, raw_scores=True),
    ]
    if task == "embed":
        options += [
            ItemOptions(outputs=("dense",), dimensions=8),
            ItemOptions(outputs=("dense",), normalize=False),
            ItemOptions(outputs=("dense",), chunk_tokens=4),
        ]
    return pack(
        [
            EncodedItem(rng.integers(5, 50, size=n).astype(np.int32), option)
            for n in (11, 6, 6)
            for option in options
        ]
    )


@pytest.mark.parametrize("labels", [None, 3])
def test_a_forward_copies_its_results_once(
    load: Any, monkeypatch: pytest.MonkeyPatch, labels: int | None
) -> None:
    """The same outcomes through pinned memory, whatever the rows ask for, with one copy and one wait."""
    runner = load("bert", labels=labels)
    batch = mixed_pack("classify" if labels else "embed", ("dense",))
    want = runner.forward(batch)
    calls = LateCopies()
    module = gpu.answer.heads if labels else gpu.answer.outputs
    monkeypatch.setattr(module, "CopyOut", lambda device: CopyOut(device, calls))
    got = runner.forward(batch)
    assert [line for line in calls.log if "copy" in line or line == "wait"] == [
        next(line for line in calls.log if "copy" in line), "wait",
    ]  # fmt: skip
    for a, b in zip(got, want, strict=True):
        for name in ("dense", "scores", "multivector"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None) and (x is None or np.array_equal(x, y)), name
        assert a.spans == b.spans

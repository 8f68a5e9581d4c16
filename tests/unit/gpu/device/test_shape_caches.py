"""Packs of ever other sizes do not grow a process: what oneDNN keeps is bounded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.device.linears import _ops
from gpu.device.shape_caches import KEPT, KEPT_BY_THREAD, bound_shape_caches

ROOT = Path(__file__).parents[4]
GROWS = """
import ctypes, sys, torch
from gpu.device.linears import prepack_one
from gpu.device.shape_caches import bound_shape_caches

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap

def held_mb():
    heap = libc.mallinfo2()
    return (heap.e + heap.h) / 1e6

if sys.argv[1] == "bounded":
    bound_shape_caches()
torch.set_num_threads(1)
with torch.inference_mode():
    linear = prepack_one(torch.nn.Linear(64, 64))
    for rows in range(4, 204):
        linear(torch.zeros(rows, 64))
    full = held_mb()
    for rows in range(204, 404):
        linear(torch.zeros(rows, 64))
print(held_mb() - full)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 what is held"
)
@pytest.mark.skipif(_ops() is None, reason="this torch has no oneDNN")
def test_more_numbers_of_rows_hold_no_more_memory() -> None:
    assert _grown_mb("bounded") < 10


def test_both_caches_are_bounded_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    environ: dict[str, str] = {}
    bound_shape_caches(environ)
    assert environ == {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KEPT,
        "LRU_CACHE_CAPACITY": KEPT_BY_THREAD,
    }


def test_numbers_of_the_environment_are_left() -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        environ = {name: "7", "LRU_CACHE_CAPACITY": "3"}
        bound_shape_caches(environ)
        assert environ == {name: "7", "LRU_CACHE_CAPACITY": "3"}


def test_where_weights_may_be_in_torch_s_cache_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    environ: dict[str, str] = {}
    bound_shape_caches(environ)
    assert "LRU_CACHE_CAPACITY" not in environ


def _grown_mb(how: str) -> float:
    """In a process of its own: the numbers are read once."""
    environ = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    told = subprocess.run(
        [sys.executable, "-c", GROWS, how],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return float(told.stdout)

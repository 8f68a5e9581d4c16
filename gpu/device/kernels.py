"""The libraries that may compute a CPU linear, and which of them does for a shape on this machine.

Who calls it: `gpu.device.linears`, at load.
What must stay true: a kernel is taken because it was forced, remembered, or measured here, never by the
name of a CPU; one kernel serves a layer at every row count, so that an item has the same bytes in any
pack; what was measured once is remembered (`remembered`), so that a restart answers with the same bits, and
what cannot be remembered is not chosen. The file is safe to delete: the next load measures again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from gpu.device import mlas
from gpu.faults import ModelLoadError

KernelName: TypeAlias = Literal["onednn", "onednn-apart", "torch", "mlas"]
"""onednn: prepacked oneDNN, GELU as its epilogue; onednn-apart: the same with torch's GELU behind it;
torch: what torch's own linear calls (MKL on x86); mlas: ONNX Runtime's."""
KERNELS: tuple[KernelName, ...] = get_args(KernelName)
DEFAULT: KernelName = "onednn"

MARGIN = 0.95  # of the default's time: less is noise, and not worth other last digits
MEASURED_FROM = 100_000  # weights of a linear; smaller ones take microseconds with any kernel
ROUNDS = 15
TIMED_ROWS, TIMED_FLOP = 512, 600_000_000  # rows of a timed call, fewer for large weights

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def candidates(gelu: bool) -> tuple[KernelName, ...]:
    """Kernels that this installation may have for a linear, with GELU behind it or not."""
    names: list[KernelName] = ["onednn", *(["onednn-apart"] if gelu else []), "torch"]  # type: ignore[list-item]
    return (*names, "mlas") if mlas.version() is not None else tuple(names)


class KernelChoice:
    """setting: "auto", or the name of a kernel. file: where choices are remembered; None: nowhere, so that
    "auto" is oneDNN. Raises `ModelLoadError` for a library that is not installed."""

    def __init__(self, setting: str, file: Path | None = None) -> None:
        if setting == "mlas" and mlas.version() is None:
            raise ModelLoadError(
                'linears = "mlas" needs the package onnxruntime; install it, or say auto'
            )
        self.setting, self._file = setting, file
        self._machine = _machine()
        self._known = _MEMO.setdefault((str(file), self._machine), {})

    def of(
        self,
        shape: tuple[int, int],
        gelu: bool,
        make: Callable[[KernelName], Product | None],
        keeps_rows: Callable[[Any], bool],
    ) -> KernelName:
        """The kernel of a linear of that shape (out, in).

        make: the layer with a kernel; None: it cannot be had, or gives other numbers. keeps_rows:
        whether a row's bits are independent of the other rows.
        """
        if self.setting != "auto":
            return next(name for name in KERNELS if name == self.setting)
        if self._file is None or shape[0] * shape[1] < MEASURED_FROM:
            return DEFAULT
        key = f"{shape[0]}x{shape[1]}" + (" gelu" if gelu else "")
        if key not in self._known:
            self._known.update(self._read())
        if key not in self._known:
            self._known[key] = _fastest(shape, candidates(gelu), make, keeps_rows)
            if not self._write(self._file):
                self._known[key] = DEFAULT
        return self._known[key]

    def _read(self) -> dict[str, KernelName]:
        """What the file says about this machine; whatever it says otherwise is nothing."""
        found = _content(self._file).get(self._machine)
        if not isinstance(found, Mapping):
            return {}
        return {str(k): name for k, v in found.items() for name in KERNELS if name == v}

    def _write(self, file: Path) -> bool:
        """Another process may have written since: what stands there stays."""
        self._known.update(self._read())
        content = _content(file) | {self._machine: dict(sorted(self._known.items()))}
        part = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content, indent=1), encoding="utf-8")
            part.replace(file)
        except OSError:
            return False
        return True


_MEMO: dict[tuple[str, str], dict[str, KernelName]] = {}
"""Choices of this process, by file and machine."""


def remembered(environ: Mapping[str, str] = os.environ) -> Path:
    """The file: `embedstream/linears.json` in the user's cache folder."""
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "embedstream" / "linears.json"


def _content(file: Path | None) -> dict[str, Any]:
    try:
        found = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _fastest(
    shape: tuple[int, int],
    names: tuple[KernelName, ...],
    make: Callable[[KernelName], Product | None],
    keeps_rows: Callable[[Any], bool],
) -> KernelName:
    made = {name: product for name in names if (product := make(name)) is not None}
    if not made:
        return DEFAULT
    rows = TIMED_FLOP // (2 * shape[0] * shape[1])
    seconds = _timed(made, shape[1], max(32, min(rows, TIMED_ROWS)))
    bound = MARGIN * seconds[DEFAULT] if DEFAULT in made else float("inf")
    for name in sorted(made, key=seconds.__getitem__):
        if seconds[name] <= bound and keeps_rows(made[name]):
            return name
    return DEFAULT


def _timed(
    made: Mapping[KernelName, Product], in_features: int, rows: int
) -> dict[KernelName, float]:
    """CPU seconds of one call each, the best of rounds in which all take turns."""
    best = dict.fromkeys(made, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on an executor thread; otherwise its clock would miss the others
    try:
        for turn in range(ROUNDS):
            for name, product in made.items():
                x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(turn))
                start = time.thread_time()
                product(x)
                if turn:  # the first call sets up
                    best[name] = min(best[name], time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best


def _machine() -> str:
    """What a measurement is good for: this kind of CPU with these libraries."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    told: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                told.append(value.strip())
    told += [torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}"]
    return ", ".join([*told, f"onnxruntime {mlas.version() or 'none'}"])

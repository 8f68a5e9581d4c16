"""Is the engine right and fast on this CUDA device, and which of its modules stay? In 8 minutes.

Who calls it: a person with a GPU, from the root of a checkout: `python -m benchmarks.gpu_check`. It needs
torch with CUDA, transformers, numpy and safetensors; flashinfer-python when that backend is to be checked.
No network, no weights: models are seeded ones of real shapes, written to a temporary folder.
What must stay true: every number is computed here and now; what did not run is listed as such, with the
reason; a wrong number makes the exit status 1. Exit 2: no CUDA device. `--dry-run` runs the same code in
small on the CPU, which proves that the script works and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._gpu_graphs import check_graphs, check_staging
from benchmarks._gpu_mfu import check_utilisation, device_gflops
from benchmarks._gpu_models import Shape, check_model, shapes
from benchmarks._gpu_verdict import verdicts
from gpu.attention import (
    AttentionBackend,
    FlashInferBackend,
    LayerKind,
    MultiItem,
    PackLayout,
    SdpaBackend,
    VarlenBackend,
)
from gpu.attention.sdpa import dense
from tests.support.attention import kind, qkv, reference

LIMIT_S = 450.0  # of the 480 promised; the last section that started may run over
ATTENTION_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
KINDS: dict[str, LayerKind] = {
    "bidirectional, heads 12 x 64": kind(n_heads=12, n_kv_heads=12, head_dim=64),
    "bidirectional, heads 12 x 32": kind(n_heads=12, n_kv_heads=12, head_dim=32),
    "causal, heads 16:8 x 128": kind(causal=True, n_heads=16, n_kv_heads=8, head_dim=128),
    "causal window 512, heads 16:8 x 128": kind(
        causal=True, window_left=511, n_heads=16, n_kv_heads=8, head_dim=128
    ),
    "window 64 both ways, heads 12 x 64": kind(
        window_left=64, window_right=64, n_heads=12, n_kv_heads=12, head_dim=64
    ),
    "causal soft cap, heads 8:4 x 256": kind(
        causal=True, softcap=50.0, n_heads=8, n_kv_heads=4, head_dim=256
    ),
    "bias, heads 12 x 64": kind(bias=True, n_heads=12, n_kv_heads=12, head_dim=64),
    "bidirectional, heads 8 x 96": kind(n_heads=8, n_kv_heads=8, head_dim=96),
}
MULTI_ITEM = kind(causal=True, n_heads=16, n_kv_heads=8, head_dim=128, multi_item=True)


@dataclass
class Report:
    """Rows of the table and the JSON; failures decide the exit status."""

    started: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, section: str, what: str, *, ok: bool | None = None, **figures: Any) -> None:
        """ok: None for a plain figure or something that did not run (then `why` says so)."""
        self.rows.append({"section": section, "what": what, "ok": ok, **figures})
        if ok is False:
            self.failures.append(f"{section}: {what}")
        shown = "  ".join(f"{k}={_short(v)}" for k, v in figures.items())
        mark = {True: "ok  ", False: "BAD ", None: "    "}[ok]
        print(f"{mark}{section:<12} {what:<58} {shown}", flush=True)

    def out_of_time(self, section: str, what: str) -> bool:
        if time.monotonic() - self.started < LIMIT_S:
            return False
        self.add(section, what, why="not run: out of time")
        return True


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Place:
    """Where the check runs, and how large."""

    device: torch.device
    dtype: torch.dtype
    dry: bool

    @property
    def pack_tokens(self) -> int:
        return 256 if self.dry else 16384

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median of repeated calls, each with the device idle before and after."""
        for _ in range(1 if self.dry else 3):
            call()
        times: list[float] = []
        end = time.monotonic() + (0.02 if self.dry else 0.5)
        while len(times) < 3 or (time.monotonic() < end and len(times) < 50):
            self.sync()
            start = time.perf_counter()
            call()
            self.sync()
            times.append(time.perf_counter() - start)
        return float(np.median(times))


def backends(invariant: bool = False) -> list[AttentionBackend]:
    return [
        FlashInferBackend(batch_invariant=invariant),
        VarlenBackend(batch_invariant=invariant),
        SdpaBackend(group_equal_lengths=not invariant),
    ]


def attend(
    backend: AttentionBackend,
    layer: LayerKind,
    layout: PackLayout,
    tensors: tuple[torch.Tensor, ...],
    place: Place,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    q, k, v = (t.to(place.device, place.dtype) for t in tensors)
    bias = None if bias is None else bias.to(place.device)
    return backend.run(q, k, v, backend.plan(layout, layer, place.dtype), bias)


def check_correctness(report: Report, place: Place) -> None:
    """Every backend and kind against float64; refusals are rows too."""
    lengths = (70, 70, 33, 1, 0, 9) if place.dry else (700, 300, 300, 129, 64, 33, 2, 1, 0, 1)
    items = MultiItem((20, 9), ((*range(1, 31), *range(1, 4), *range(1, 18)), ()))
    for name, layer in [*KINDS.items(), ("multi-item, heads 16:8 x 128", MULTI_ITEM)]:
        bounds = [0, 70, 79] if layer.multi_item else [0, *accumulate(lengths)]
        layout = PackLayout.of(bounds, place.device, items if layer.multi_item else None)
        tensors = tuple(t.to(place.dtype) for t in qkv(layer, layout.total_tokens))
        size = layout.max_seqlen
        bias = torch.randn(1, layer.n_heads, size, size) if layer.bias else None
        want: torch.Tensor | None = None
        for backend in backends():
            what = f"{backend.name}: {name}"
            refusal = backend.refuses(layer, place.dtype, place.device)
            if refusal is not None:
                report.add("numbers", what, why=f"refused: {refusal}")
                continue
            if report.out_of_time("numbers", what):
                continue
            want = reference(layer, layout, *tensors, bias) if want is None else want
            got = attend(backend, layer, layout, tensors, place, bias)
            worst = float((got.double().cpu() - want).abs().max())
            finite = bool(got.isfinite().all())
            report.add(
                "numbers",
                what,
                ok=finite and worst <= ATTENTION_TOLERANCE[place.dtype],
                max_diff=worst,
            )


def check_neighbours(report: Report, place: Place) -> None:
    """Same bits alone and in packs (with and without `batch_invariant`), and NaN stays in its item."""
    lengths = [70, 33, 33, 5, 1] if place.dry else [700, 300, 300, 129, 64, 33, 20, 9, 2, 1]
    rng = np.random.default_rng(0)
    for name, layer in KINDS.items():
        if layer.bias:
            continue
        data = {i: qkv(layer, n, seed=i) for i, n in enumerate(lengths)}
        for invariant in (False, True):
            for backend in backends(invariant):
                what = f"{backend.name}{' batch-invariant' if invariant else ''}: {name}"
                if backend.refuses(layer, place.dtype, place.device) is not None:
                    continue
                if report.out_of_time("invariance", what):
                    continue
                same, total = _same_bits(backend, layer, lengths, data, place, rng)
                promised = invariant and backend.name in ("varlen", "sdpa")
                report.add(
                    "invariance",
                    what,
                    ok=same == total if promised else None,
                    same_bits=f"{same}/{total}",
                )
                if not invariant:
                    report.add("nan", what, ok=_nan_stays(backend, layer, place))


def _same_bits(
    backend: AttentionBackend,
    layer: LayerKind,
    lengths: list[int],
    data: dict[int, tuple[torch.Tensor, ...]],
    place: Place,
    rng: np.random.Generator,
) -> tuple[int, int]:
    alone = {
        i: attend(backend, layer, PackLayout.of([0, n], place.device), data[i], place)
        for i, n in enumerate(lengths)
    }
    same = total = 0
    for _ in range(4):
        order = [int(i) for i in rng.permutation(len(lengths))[: rng.integers(2, len(lengths) + 1)]]
        layout = PackLayout.of([0, *accumulate(lengths[i] for i in order)], place.device)
        tensors = tuple(torch.cat([data[i][part] for i in order]) for part in range(3))
        out = attend(backend, layer, layout, tensors, place)
        for start, i in zip(layout.cu_seqlens, order, strict=False):
            same += bool(torch.equal(out[start : start + lengths[i]], alone[i]))
            total += 1
    return same, total


def _nan_stays(backend: AttentionBackend, layer: LayerKind, place: Place) -> bool:
    layout = PackLayout.of([0, 40, 73, 100], place.device)
    tensors = qkv(layer, 100)
    for tensor in tensors:
        tensor[40:73] = float("nan")
    out = attend(backend, layer, layout, tensors, place)
    return bool(out[:40].isfinite().all() and out[73:].isfinite().all())


def check_speed(report: Report, place: Place) -> None:
    """One layer over a full pack: packed backends and padded SDPA, on short and on long items."""
    rng = np.random.default_rng(1)
    for mix, mean in (("short", 30), ("long", 400)):
        lengths = _lengths(rng, mean, place.pack_tokens)
        layout = PackLayout.of([0, *accumulate(lengths)], place.device)
        for name, layer in KINDS.items():
            if layer.bias or (place.dry and layer.head_dim > 64):
                continue
            for backend in backends():
                what = f"{backend.name}: {mix} items, {name}"
                if backend.refuses(layer, place.dtype, place.device) is not None:
                    continue
                if not report.out_of_time("layer", what):
                    report.add("layer", what, **_layer_speed(backend, layer, layout, place))
            if not layer.windowed and not report.out_of_time("layer", f"padded: {mix}, {name}"):
                seconds = _padded_seconds(layer, lengths, place)
                report.add(
                    "layer",
                    f"padded SDPA: {mix} items, {name}",
                    run_ms=1e3 * seconds,
                    tokens_per_s=layout.total_tokens / seconds,
                )


def _layer_speed(
    backend: AttentionBackend, layer: LayerKind, layout: PackLayout, place: Place
) -> dict[str, float]:
    q, k, v = (t.to(place.device, place.dtype) for t in qkv(layer, layout.total_tokens))
    plan_s = place.seconds(lambda: backend.plan(layout, layer, place.dtype))
    plan = backend.plan(layout, layer, place.dtype)
    run_s = place.seconds(lambda: backend.run(q, k, v, plan))
    return {
        "run_ms": 1e3 * run_s,
        "plan_ms": 1e3 * plan_s,
        "tokens_per_s": layout.total_tokens / run_s,
    }


def _lengths(rng: np.random.Generator, mean: int, total: int) -> list[int]:
    """Long-tailed lengths that fill `total` tokens, longest first as `pack` lays them."""
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = int(np.clip(rng.lognormal(np.log(mean), 0.6), 1, 8 * mean))
        lengths.append(min(drawn, total - sum(lengths)))
    return sorted(lengths, reverse=True)


def _padded_seconds(layer: LayerKind, lengths: list[int], place: Place) -> float:
    """The same items in batches of 32, sorted by length and padded to the longest of each."""
    batches = []
    for first in range(0, len(lengths), 32):
        part = lengths[first : first + 32]
        q, k, v = (
            t.to(place.device, place.dtype).unflatten(0, (len(part), -1)).transpose(1, 2)
            for t in qkv(layer, len(part) * part[0])
        )
        valid = torch.arange(part[0])[None] < torch.tensor(part)[:, None]
        mask = valid[:, None, None, :].expand(-1, 1, part[0], -1)
        if layer.causal:
            mask = mask & torch.ones(part[0], part[0], dtype=torch.bool).tril()
        lowest = torch.finfo(place.dtype).min
        additive = torch.zeros(mask.shape, dtype=place.dtype).masked_fill(~mask, lowest)
        batches.append((q, k, v, additive.to(place.device)))

    def run() -> None:
        for q, k, v, mask in batches:
            dense(q, k, v, mask=mask, causal=False, scale=layer.scale, softcap=layer.softcap)

    return place.seconds(run)


def check_models(report: Report, place: Place, only: Shape | None = None) -> None:
    """Whole models of real shapes: packed against padded, numbers and texts per second."""
    with tempfile.TemporaryDirectory(prefix="embedstream-gpu-check-") as folder:
        for shape in [only] if only else shapes(place.dry):
            if not report.out_of_time("model", shape.name):
                check_model(report, place, shape, Path(folder))


def check_small_packs(report: Report, place: Place) -> None:
    """Pinned staging, then CUDA graphs on the shapes of the models section."""
    check_staging(report, place)
    with tempfile.TemporaryDirectory(prefix="embedstream-gpu-check-") as folder:
        for shape in shapes(place.dry):
            if not report.out_of_time("graphs", shape.name):
                check_graphs(report, place, shape, Path(folder))


def check_packs(report: Report, place: Place) -> None:
    """How much of the device small to full packs use, with graphs and without."""
    ceiling = device_gflops(place)
    report.add("mfu", "best square product of this device", gflops=ceiling)
    with tempfile.TemporaryDirectory(prefix="embedstream-gpu-check-") as folder:
        for shape in shapes(place.dry)[:3]:
            if not report.out_of_time("mfu", shape.name):
                check_utilisation(report, place, shape, Path(folder), ceiling)


def describe(place: Place) -> dict[str, Any]:
    import transformers

    try:
        import flashinfer

        version = str(flashinfer.__version__)
    except ImportError:
        version = "not installed"
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flashinfer": version,
        "dtype": str(place.dtype),
        "dry_run": place.dry,
    }
    if place.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(place.device)
        found["capability"] = list(torch.cuda.get_device_capability(place.device))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU, in float32")
    parser.add_argument(
        "--sections",
        default="numbers,neighbours,models,packs,graphs,speed",
        help="which, in this order",
    )
    options = parser.parse_args(argv)
    sections = {
        "numbers": check_correctness,
        "neighbours": check_neighbours,
        "models": check_models,
        "packs": check_packs,
        "graphs": check_small_packs,
        "speed": check_speed,
    }
    chosen = options.sections.split(",")
    if unknown := [name for name in chosen if name not in sections]:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(sections)}")
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    place = Place(torch.device("cuda", 0), getattr(torch, options.dtype), False)
    if options.dry_run:
        place = Place(torch.device("cpu"), torch.float32, True)
    report = Report(time.monotonic())
    about = describe(place)
    print("  ".join(f"{k}={v}" for k, v in about.items()))
    with torch.inference_mode():
        for name in chosen:
            sections[name](report, place)
    took = time.monotonic() - report.started
    print(f"{len(report.rows)} rows, {len(report.failures)} bad, {took:.0f} s")
    decided = verdicts(report.rows)
    for verdict in decided:
        dry = " (a dry run, which decides nothing)" if place.dry else ""
        print(f"{verdict.word:<10} {verdict.module}: {verdict.why}{dry}")
    for failure in report.failures:
        print(f"BAD {failure}", file=sys.stderr)
    if options.json:
        document = {"about": about, "took_s": took, "rows": report.rows, "bad": report.failures}
        document["verdicts"] = [asdict(verdict) for verdict in decided]
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

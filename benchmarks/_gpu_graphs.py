"""The small-pack part of `gpu_check`: pinned staging, and CUDA graphs against the ordinary forward.

Who calls it: `benchmarks.gpu_check`, `benchmarks._gpu_mfu`.
What must stay true: both forwards use one set of weights and the same packs; results are compared after
many replays were queued without a wait, so that memory written too early shows as a wrong number; in a
dry run recordings and late copies are played on the CPU, which proves the script and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._gpu_models import FP32_DIFF, HALF_COSINE, Shape, folder_of, vectors_of
from gpu.attention import backends_for, register
from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.device.staging import CopyOut, CudaCalls, InputStaging
from gpu.forward.cuda_graphs import CudaRecorder, GraphedForward, with_graphs
from gpu.forward.packed import PackedForward
from gpu.forward.token_buckets import LARGEST_BUCKET, probe
from tests.support.recorded import CpuRecorder, LateCopies

N_UPLOADS = 200


def check_staging(report: Any, place: Any) -> None:
    """Uploads queued behind long work arrive unmixed; the copy-out has the bytes of plain copies."""
    if report.out_of_time("staging", "uploads and copy-out"):
        return
    calls: Any = LateCopies() if place.dry else CudaCalls()
    ring = InputStaging(calls, torch.int64)
    busy = torch.randn(64 if place.dry else 4096, 64 if place.dry else 4096, device=place.device)
    targets = []
    for value in range(N_UPLOADS):
        if value % 20 == 0:
            busy = (busy @ busy).clamp(-1, 1)
        target = torch.empty(2, 1000 + value, dtype=torch.int64, device=place.device)
        rows = [np.full(1000 + value, value + shift, dtype=np.int32) for shift in (0, 1)]
        targets.append(ring.upload(rows, target))
    if place.dry:
        calls.run_until(N_UPLOADS)
    place.sync()
    right = sum(
        bool((target[0] == value).all() and (target[1] == value + 1).all())
        for value, target in enumerate(targets)
    )
    report.add("staging", "uploads through a ring of two, queued behind work",
               ok=right == N_UPLOADS, right=f"{right}/{N_UPLOADS}")  # fmt: skip
    parts = [torch.randn(64, 384, device=place.device) for _ in range(8)]

    def at_once() -> list[np.ndarray]:
        copies = CopyOut(place.device, calls)
        tickets = [copies.add(part) for part in parts]
        copies.finish()
        return [ticket() for ticket in tickets]

    def one_by_one() -> list[np.ndarray]:
        return [part.cpu().numpy() for part in parts]

    same = all(np.array_equal(a, b) for a, b in zip(at_once(), one_by_one(), strict=True))
    report.add("staging", "8 groups of results: one copy against eight", ok=same,
               one_ms=1e3 * place.seconds(at_once),
               eight_ms=1e3 * place.seconds(one_by_one))  # fmt: skip


def check_graphs(report: Any, place: Any, shape: Shape, folder: Path) -> None:
    """Rows for one shape: recording, numbers and milliseconds per bucket, many replays, threads."""
    path = folder_of(shape, folder)
    for dtype in dict.fromkeys([torch.float32, place.dtype]):
        told = f"{shape.name}: {str(dtype).removeprefix('torch.')}"
        packed, graphed = both(report, place, path, dtype, told)
        if graphed is None:
            continue
        for size in graphed.sizes[:: 1 if place.dry else 2]:
            _bucket(report, place, packed, graphed, size, told)
        _many(report, place, packed, graphed, told)
    _runner(report, place, shape, path)


def both(
    report: Any, place: Any, path: Path, dtype: torch.dtype, told: str
) -> tuple[PackedForward, GraphedForward | None]:
    """The ordinary forward, and the one with graphs where it could be recorded."""
    from gpu.folder.read import load_spec
    from gpu.forward.weights import load_model

    spec = load_spec(path)
    loaded = load_model(
        spec, dtype=dtype, device=place.device, allow_pickle=False, trust_remote_code=False
    )
    model: Any = loaded.model
    model.set_attn_implementation(register())
    packed = PackedForward(
        loaded.base,
        device=place.device,
        position_offset=spec.position_offset,
        token_types=int(getattr(loaded.config, "type_vocab_size", 0) or 0) > 1,
        backends=backends_for(place.device, dtype),
    )
    notes: list[str] = []
    before, start = _held(place), time.perf_counter()
    found = with_graphs(
        packed,
        "auto",
        device=place.device,
        max_batch_tokens=64 if place.dry else LARGEST_BUCKET,
        max_tokens=spec.max_tokens,
        vocab_size=int(loaded.config.vocab_size),
        notes=notes,
        recorder=CpuRecorder if place.dry else CudaRecorder,
    )
    place.sync()
    took = time.perf_counter() - start
    graphed = found if isinstance(found, GraphedForward) else None
    report.add("graphs", f"{told}, recorded", ok=graphed is not None, note=notes[0],
               seconds=took, mib=(_held(place) - before) / 2**20)  # fmt: skip
    return packed, graphed


def _held(place: Any) -> int:
    return 0 if place.dry else int(torch.cuda.memory_reserved(place.device))


def _bucket(
    report: Any, place: Any, packed: PackedForward, graphed: GraphedForward, size: int, told: str
) -> None:
    """A pack that needs filler: numbers, bits and milliseconds with and without the graph."""
    what = f"{told}, bucket {size}"
    if report.out_of_time("graphs", what):
        return
    batch = probe(size - size // 4, _vocabulary(packed), 512)
    got, want = graphed(batch), packed(batch)
    same_bits = bool(torch.equal(got, want))
    with_s, without_s = place.seconds(lambda: graphed(batch)), place.seconds(lambda: packed(batch))
    report.add("graphs", what, ok=_close(got, want), same_bits=same_bits,
               graph_ms=1e3 * with_s, eager_ms=1e3 * without_s,
               speed_up=without_s / with_s)  # fmt: skip


def _many(
    report: Any, place: Any, packed: PackedForward, graphed: GraphedForward, told: str
) -> None:
    """Packs of all buckets in random order without a wait between them, from one thread and from two."""
    rng = np.random.default_rng(0)
    largest = graphed.sizes[-1]
    packs = [_random(rng, int(rng.integers(1, largest + 1)), packed) for _ in range(24)]
    want = [packed(batch) for batch in packs]
    place.sync()
    got = [graphed(batch) for batch in packs]
    place.sync()
    right = sum(_close(a, b) for a, b in zip(got, want, strict=True))
    report.add("graphs", f"{told}, packs queued one behind the other", ok=right == len(packs),
               right=f"{right}/{len(packs)}")  # fmt: skip
    results: dict[int, torch.Tensor] = {}

    def serve(places: range) -> None:
        with torch.inference_mode():
            for i in places:
                results[i] = graphed(packs[i])

    threads = [
        threading.Thread(target=serve, args=(range(first, len(packs), 2),)) for first in (0, 1)
    ]
    _each(threads, threading.Thread.start)
    _each(threads, threading.Thread.join)
    place.sync()
    right = sum(i in results and _close(results[i], want[i]) for i in range(len(packs)))
    report.add("graphs", f"{told}, packs from two threads", ok=right == len(packs),
               right=f"{right}/{len(packs)}")  # fmt: skip


def _each(threads: list[threading.Thread], call: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        call(thread)


def _random(rng: np.random.Generator, tokens: int, packed: PackedForward) -> PackedBatch:
    items = []
    while tokens:
        n = min(tokens, int(rng.integers(1, 65)))
        ids = rng.integers(0, _vocabulary(packed), size=n, dtype=np.int32)
        items.append(EncodedItem(ids))
        tokens -= n
    return pack(items)


def _vocabulary(packed: PackedForward) -> int:
    config: Any = packed.base.config
    return int(config.vocab_size)


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    a, b = got.float(), want.float()
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return False
    if want.dtype is torch.float32:
        return float((a - b).abs().max() / b.abs().max()) <= FP32_DIFF
    return float(torch.cosine_similarity(a, b, dim=-1).min()) >= HALF_COSINE


def _runner(report: Any, place: Any, shape: Shape, path: Path) -> None:
    """The whole runner, loaded as an operator would, on one short text: milliseconds for one answer."""
    from gpu.load import make_runner_factory

    what = f"{shape.name}: runner, one text of 12 tokens"
    if report.out_of_time("graphs", what):
        return
    milliseconds, notes = {}, ""
    batch = pack([EncodedItem(np.arange(5, 17, dtype=np.int32))])
    vectors = {}
    for setting in ("off", "auto"):
        runner = make_runner_factory(
            "check",
            path,
            device=str(place.device),
            dtype=str(place.dtype).removeprefix("torch."),
            cuda_graphs=setting,
        )()
        vectors[setting] = vectors_of(runner.forward(batch))[0]
        milliseconds[setting] = 1e3 * place.seconds(lambda r=runner: r.forward(batch))
        notes = next((note for note in runner.info.notes if "graphs" in note), "no note")
        runner.close()
    cosine = float(np.dot(vectors["off"], vectors["auto"]))
    expected = "cuda_graphs is not in use" if place.dry else "run as CUDA graphs"
    report.add("graphs", what, ok=cosine >= HALF_COSINE and expected in notes, cosine=cosine,
               graphs_ms=milliseconds["auto"], eager_ms=milliseconds["off"], note=notes)  # fmt: skip

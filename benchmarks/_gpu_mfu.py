"""The utilisation part of `gpu_check`: small to full packs, with graphs and without, and what the host costs.

Who calls it: `benchmarks.gpu_check`.
What must stay true: the rate is compared with the best product measured on the same device in the same
dtype, not with a data sheet; packs are queued one behind the other, as a busy service queues them; useful
work is counted without filler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks._gpu_graphs import both
from benchmarks._gpu_models import Shape, folder_of
from gpu.batch import EncodedItem, PackedBatch, pack
from gpu.forward.packed import PackedForward

PACK_TOKENS = (16, 128, 512, 8192)
LONGEST = 512  # tokens of one item
QUEUED = 10  # forwards without a wait between them


def device_gflops(place: Any) -> float:
    """Best rate of a square product in the place's dtype."""
    size = 128 if place.dry else 8192
    left = torch.randn(size, size, device=place.device).to(place.dtype)
    seconds = place.seconds(lambda: left @ left)
    return float(2 * size**3 / seconds / 1e9)


def check_utilisation(
    report: Any, place: Any, shape: Shape, folder: Path, ceiling_gflops: float
) -> None:
    """Rows for one shape: per pack size the rate, its share of the ceiling, and the host's part."""
    told = f"{shape.name}: {str(place.dtype).removeprefix('torch.')}"
    packed, graphed = both(report, place, folder_of(shape, folder), place.dtype, told)
    vocabulary = int(packed.base.config.vocab_size)  # type: ignore[union-attr]
    for tokens in (16, 64) if place.dry else PACK_TOKENS:
        batch = _texts(tokens, shape.mean, vocabulary)
        work = _flop(packed, batch)
        forwards: dict[str, Callable[[PackedBatch], torch.Tensor]] = {"graphs off": packed}
        if graphed is not None and tokens <= graphed.sizes[-1]:
            forwards["graphs on"] = graphed
        for name, forward in forwards.items():
            what = f"{told}, {tokens} tokens, {name}"
            if report.out_of_time("mfu", what):
                continue
            report.add("mfu", what, **_measured(place, forward, batch, work, ceiling_gflops))


def _measured(
    place: Any,
    forward: Callable[[PackedBatch], torch.Tensor],
    batch: PackedBatch,
    work: float,
    ceiling_gflops: float,
) -> dict[str, float]:
    """pack_ms: per forward of a queue. host_ms: until the call is back, of that. kernel_ms: kernels alone."""
    for _ in range(3):
        forward(batch)
    place.sync()
    host, started = 0.0, time.perf_counter()
    for _ in range(QUEUED):
        called = time.perf_counter()
        forward(batch)
        host += time.perf_counter() - called
    place.sync()
    wall = (time.perf_counter() - started) / QUEUED
    kernels = _kernel_seconds(place, lambda: forward(batch))
    return {
        "pack_ms": 1e3 * wall,
        "host_ms": 1e3 * host / QUEUED,
        "kernel_ms": 1e3 * kernels,
        "gap": max(0.0, 1 - kernels / wall),
        "tokens_per_s": batch.n_tokens / wall,
        "mfu": work / wall / 1e9 / ceiling_gflops,
    }


def _kernel_seconds(place: Any, call: Callable[[], Any]) -> float:
    """Seconds in kernels of one forward, as the profiler adds them up; those of operators in a dry run."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU if place.dry else kinds.CUDA]) as profile:
        call()
        place.sync()
    name = "self_cpu_time_total" if place.dry else "self_device_time_total"
    return float(sum(getattr(event, name) for event in profile.key_averages()) / 1e6)


def _texts(tokens: int, mean: int, vocabulary: int) -> PackedBatch:
    """One pack of just so many tokens, of items of about `mean`."""
    rng = np.random.default_rng(tokens)
    items, left = [], tokens
    while left:
        n = min(left, LONGEST, max(1, int(rng.lognormal(np.log(mean), 0.4))))
        items.append(EncodedItem(rng.integers(5, vocabulary, n, dtype=np.int32)))
        left -= n
    return pack(items)


def _flop(packed: PackedForward, batch: PackedBatch) -> float:
    """Two per weight of every linear and token, and attention's two products, half of them when causal."""
    config: Any = packed.base.config
    linears = [one for one in packed.base.modules() if isinstance(one, nn.Linear)]
    per_token = sum(2 * one.in_features * one.out_features for one in linears)
    heads = int(config.num_attention_heads)
    width = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    causal = any(getattr(one, "is_causal", False) for one in packed.base.modules())
    pairs = sum(float(n) * n for n in batch.seqlens) * (0.5 if causal else 1.0)
    return per_token * batch.n_tokens + 4 * width * int(config.num_hidden_layers) * pairs

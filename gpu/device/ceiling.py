"""What this machine's matrix products can do, to compare a model's rate with.

Who calls it: `embedstream bench`.
What must stay true: measured as the executor computes: so many threads at once, one intra-op thread each.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from gpu.device.pick import init_executor_thread

ROWS, INNER, OUTER = 512, 1024, 1024
"""A pack of 512 tokens through a layer of 1,024: large enough for the best rate, and inside a cache."""


def gemm_gflops(threads: int, seconds: float = 0.5) -> float:
    """Best float32 rate of `threads` concurrent products, in GFLOP/s over all of them."""

    def best() -> float:
        left, right = torch.randn(ROWS, INNER), torch.randn(INNER, OUTER)
        out = torch.empty(ROWS, OUTER)
        fastest, started = float("inf"), time.perf_counter()
        while time.perf_counter() - started < seconds:
            begun = time.perf_counter()
            torch.mm(left, right, out=out)
            fastest = min(fastest, time.perf_counter() - begun)
        return 2 * ROWS * INNER * OUTER / fastest / 1e9

    with ThreadPoolExecutor(threads, initializer=init_executor_thread) as pool:
        return sum(pool.map(lambda _: best(), range(threads)))

"""`embedstream serve` itself, a real model, SIGKILL with a thousand requests in flight, both brokers.

The duplicates that a kill causes must be the same bytes: two processes, different packs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.results import Reply
from tests.fault.test_kill_kafka import Bench as KafkaBench
from tests.fault.test_kill_kafka import collect, collect_some
from tests.fault.test_kill_redis import Bench as RedisBench
from tests.support.processes import ROOT
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(240)]

N = 1000


def requests() -> dict[str, Any]:
    """Texts of 3 to 40 words, all different."""
    words = [
        "stream",
        "queue",
        "vector",
        "broker",
        "river",
        "mountain",
        "capital",
        "answer",
        "model",
        "batch",
        "token",
    ]
    return {
        f"r{i}": {"input": f"number {i} " + " ".join(words[(i + k) % 11] for k in range(i % 38))}
        for i in range(N)
    }


@contextmanager
def embedstream(source: str, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """`embedstream serve`, ready; killed after the block."""
    log_path = folder / f"{name}.log"
    command = [sys.executable, "-m", "pipeline", "serve", "--source", source]
    command += ["--set", "health.port=0", "--set", "models.minilm.path=all-MiniLM-L6-v2"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while "service_ready" not in log_path.read_text(errors="replace"):
            assert process.poll() is None, log_path.read_text(errors="replace")[-3000:]
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def check(kept: dict[str, Reply], seen: Counter[str], where: str, before: int) -> None:
    assert before < N and len(kept) == N
    vectors = np.stack(
        [np.frombuffer(kept[f"r{i}"].items[0].embedding or b"", "<f4") for i in range(N)]
    )
    assert vectors.shape == (N, 384) and np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    duplicates = sum(seen.values()) - N
    print(f"{where}: {N} requests, lost 0, duplicates {duplicates}, answered before {before}")


@pytest.mark.kafka
async def test_kafka_loses_nothing_and_repeats_the_same_bytes(
    kafka_server: ServerInfo, packaged_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """E05, E09, A06, A22: the second answer of a redelivered request equals the first, bit for bit."""
    packaged_model("all-MiniLM-L6-v2")
    bench = KafkaBench(kafka_server.address)
    await bench.create(4)
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    async with bench.reading(bench.replies, 4) as consumer:
        with embedstream(bench.source, tmp_path, "first") as first:
            await bench.produce(requests())
            while len(seen) < 150:
                await collect_some(consumer, seen, kept)
            first.kill()
        before = len(seen)
        with embedstream(bench.source, tmp_path, "second"):
            await collect(consumer, set(requests()), seen, kept)
    check(kept, seen, f"kafka ({kafka_server.kind})", before)


@pytest.mark.redis
async def test_redis_loses_nothing_and_repeats_the_same_bytes(
    redis_server: ServerInfo, packaged_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """F04, A06, A22: a dead consumer's entries are claimed and answered with the same bytes."""
    packaged_model("all-MiniLM-L6-v2")
    bench = RedisBench(redis_server.address, "stream")
    source = bench.config()["routes"][0]["source"]
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    try:
        with embedstream(source, tmp_path, "first") as first:
            await bench.send(requests())
            after = b"0"
            while len(seen) < 150:
                after = await bench.read(seen, kept, after)
            first.kill()
        before = len(seen)
        with embedstream(source, tmp_path, "second"):
            await bench.collect(set(requests()), seen, kept, after)
    finally:
        await bench.client.aclose()
    check(kept, seen, f"redis ({redis_server.kind})", before)

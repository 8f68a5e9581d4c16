"""What one caller waits for over Redis beyond the forward: the whole service with MiniLM, one call at a time.

    python -m benchmarks.rpc [--rounds 8] [--calls 40]

Who calls it: a person, alone on the machine. The service is `serve` in a process of its own, on a Redis of its
own; caller and bare forwards share another process.
What must stay true: no text comes twice, so that nothing is remembered; the same texts are computed bare, in
turns of `--calls` with the calls, by a runner with the same settings, a call's texts in one pack of one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import median, table, write_results
from benchmarks.client import quantile
from benchmarks.scaling import wait_for
from embedstream_client import AsyncClient, Client
from gpu.batch import EncodedRequest, Runner, pack
from pipeline.local.redis import RedisServer
from pipeline.local.server import free_port
from schemas.requests import EmbedRequest, Text

GOAL_MS = 1.0
TEXTS = {"short": (1, 1), "long": (1, 12), "ten": (10, 4)}
"""Texts of a call, and how often each says the sentence."""
SENTENCE = "how do I change the default keyboard layout"
_MS = 1e3


def texts(kind: str, block: int, count: int) -> list[list[str]]:
    n, times = TEXTS[kind]
    said = " ".join([SENTENCE] * times)
    return [
        [f"{said} in case {block} of {number} {i}" for i in range(n)] for number in range(count)
    ]


def bare(runner: Runner, said: list[list[str]]) -> tuple[list[float], list[float]]:
    """ms of the forwards, and of ids and forward together."""
    forwards, both = [], []
    for some in said:
        began = time.perf_counter()
        encoded = runner.encoder.encode([EmbedRequest(id="r", input=tuple(map(Text, some)))])[0]
        assert isinstance(encoded, EncodedRequest)
        batch = pack(list(encoded.items))  # type: ignore[arg-type]
        between = time.perf_counter()
        runner.forward(batch)
        ended = time.perf_counter()
        forwards.append(_MS * (ended - between))
        both.append(_MS * (ended - began))
    return forwards, both


async def called(client: AsyncClient, said: list[list[str]]) -> tuple[list[float], list[float]]:
    """ms of the calls, and of the forwards as the replies tell them."""
    calls, forwards = [], []
    for some in said:
        began = time.perf_counter()
        result = await client.embed(some)
        calls.append(_MS * (time.perf_counter() - began))
        assert result.timings is not None
        forwards.append(result.timings.forward_ms)
    return calls, forwards


def called_blocking(client: Client, said: list[list[str]]) -> list[float]:
    calls = []
    for some in said:
        began = time.perf_counter()
        client.embed(some)
        calls.append(_MS * (time.perf_counter() - began))
    return calls


async def measure(address: str, runner: Runner, rounds: int, count: int) -> dict[str, Any]:
    """By kind of text: every time, ms."""
    found: dict[str, Any] = {}
    url = f"redis://{address}/in"
    async with AsyncClient.from_url(url, timeout=60) as client:
        with Client.from_url(url, timeout=60) as blocking:
            for kind in TEXTS:
                one: dict[str, list[float]] = {
                    name: [] for name in ("forward", "with ids", "call", "its forward", "blocking")
                }
                for turn in range(rounds + 1):
                    forwards, both = bare(runner, texts(kind, 2 * turn, count))
                    calls, told = await called(client, texts(kind, 2 * turn, count))
                    apart = await asyncio.to_thread(
                        called_blocking, blocking, texts(kind, 2 * turn + 1, count)
                    )
                    if turn:  # the first one warms
                        for name, values in zip(
                            one, (forwards, both, calls, told, apart), strict=True
                        ):
                            one[name] += values
                found[kind] = one
    return found


def run(rounds: int, count: int) -> dict[str, Any]:
    """Start Redis, service and runner, measure, stop them."""
    import torch

    from gpu.load import make_runner_factory
    from pipeline.demo.fetch import resolve_model

    torch.set_num_threads(1)
    folder = str(resolve_model("all-MiniLM-L6-v2"))
    runner = make_runner_factory("minilm", folder)()
    server, port = RedisServer(), free_port()
    asyncio.run(server.start())
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "serve", "--model", folder, "--health-port", str(port),
         "--source", f"redis://{server.address}/in"],
        stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    ready: Callable[[], Any] = lambda: urllib.request.urlopen(  # noqa: E731
        f"http://127.0.0.1:{port}/ready", timeout=5
    )
    try:
        wait_for(ready)
        return asyncio.run(measure(server.address, runner, rounds, count))
    finally:
        process.terminate()
        process.wait()
        server.close()
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=40, help="of a round")
    parser.add_argument("--out", default="rpc")
    arguments = parser.parse_args()
    found = run(arguments.rounds, arguments.calls)
    rows = []
    for kind, one in found.items():
        forward = median(one["forward"])
        beyond = [call - told for call, told in zip(one["call"], one["its forward"], strict=True)]
        rows.append(
            [kind, len(one["call"])]
            + [f"{median(one[name]):.2f}" for name in ("forward", "with ids", "its forward", "call")]
            + [f"{median(one['call']) - forward:.2f}", f"{median(beyond):.2f}"]
            + [f"{quantile(one['call'], 0.99):.2f}", f"{median(one['blocking']) - forward:.2f}"]
        )  # fmt: skip
    header = ["text", "calls", "bare forward", "with its ids", "forward in the service", "call p50",
              "**call beyond the bare forward**", "beyond its own forward", "call p99",
              "blocking client beyond the bare forward"]  # fmt: skip
    told = (
        "all-MiniLM-L6-v2, one caller, each text once, settings as shipped; ms, medians unless said. A call has one "
        "text of 14 tokens (short) or 100 (long), or ten of 40. The bare forward is one thread's, in the caller's process; the "
        "service's uses the cores that have nothing else to do. Caller, "
        f"Redis and service are three processes of one machine. The goal is {GOAL_MS:g} ms beyond the bare forward."
    )
    path = write_results(
        arguments.out,
        "One caller over Redis, beyond the forward",
        [told, table(header, rows)],
        found,
    )
    print(path.read_text("utf-8"))


if __name__ == "__main__":
    main()

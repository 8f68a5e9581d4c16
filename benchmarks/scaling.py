"""Where one Python process ends: the whole service around a device that sleeps as long as a forward takes.

    python -m benchmarks.scaling [rates | cores | gpu | memory ...] [--cores 16 96]

Who calls it: a person, alone on the machine, part by part. docs/scaling.md is about its results.
What must stay true: all that costs Python is real (source, admission, packing, hand-over to threads,
replies, settling, metrics and logging as shipped); the device alone is simulated: each executor thread
sleeps its tokens over a rate. Rates of a core are those of real forwards, measured in part `rates` on
models of the published sizes; the rate of a GPU is its roofline, and is said to be.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import io
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, median, table, write_results
from benchmarks.load import seeded_bert
from benchmarks.pipeline import VECTOR, NoModel, bodies, inproc, service
from gpu.batch import EncodedItem, EncodedRequest, ItemOptions, ItemOutcome, ItemResult, PackedBatch
from pipeline.local.redis import RedisServer
from pipeline.local.server import free_port
from pipeline.observe.logs import configure_logging
from pipeline.settings.load import AdmissionSettings, ExecutorSettings, LaneAdmission, Settings
from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest

SIZES = {"MiniLM": (6, 384), "bge-base": (12, 768), "bge-large": (24, 1024)}
"""Layers and width; vocabulary and tokenizer are those of all-MiniLM-L6-v2."""
LENGTHS = {"short": 5, "long": 102}
"""Tokens of a text, as in benchmarks/results/engine.md: headwords and dictionary entries."""
H200_FLOPS, H200_SHARE, H200_PACK = 989e12, 0.4, 16_384
"""bf16 without sparsity, as published, and the share of it that large matrix products usually reach."""
RUN_S = 2.5
MOST_TEXTS = 60_000
IN_FLIGHT = 50_000
"""Requests: 96 cores with packs of 102 short texts hold 9,792, more than the default of 4,096."""


@dataclass(frozen=True)
class Device:
    """threads sleep at the same time; each takes s_per_token for a token of its pack."""

    threads: int
    s_per_token: float
    pack_tokens: int = 512

    @property
    def tokens_per_s(self) -> float:
        return self.threads / self.s_per_token


class Sleeps(NoModel):
    """`tokens` ids for each text, and a forward that sleeps."""

    def __init__(self, device: Device, tokens: int) -> None:
        super().__init__()
        self.info = replace(self.info, max_batch_tokens=device.pack_tokens)
        self._s_per_token = device.s_per_token
        self._ids = np.arange(1, tokens + 1, dtype=np.int32)

    def encode(self, requests: list[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        options = ItemOptions()
        return [
            EncodedRequest(tuple(EncodedItem(self._ids, options) for _ in range(request.n_items)))
            for request in requests
        ]

    def forward(self, batch: PackedBatch) -> list[ItemOutcome]:
        time.sleep(len(batch.input_ids) * self._s_per_token)
        return [ItemResult(dense=VECTOR)] * batch.n_items


def flops_per_token(name: str, tokens: int) -> float:
    """Multiply-adds count twice: linears, and attention over `tokens`."""
    layers, hidden = SIZES[name]
    return layers * (24 * hidden * hidden + 4 * hidden * tokens)


# --- rates of one core -----------------------------------------------------------------------------


def rates() -> dict[str, Any]:
    """Texts/s of one thread by model and length, real forwards of packs of 512 tokens."""
    import torch

    from gpu.load import make_runner_factory
    from pipeline.demo.fetch import resolve_model

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    small = Path(resolve_model("all-MiniLM-L6-v2"))
    with tempfile.TemporaryDirectory() as temporary:
        for name, (layers, hidden) in SIZES.items():
            folder = small
            if name != "MiniLM":
                folder = seeded_bert(Path(temporary) / name, small, layers=layers, hidden=hidden)
            runner = make_runner_factory("m", str(folder))()
            found[name] = {kind: _texts_per_s(runner, n) for kind, n in LENGTHS.items()}
            found[name]["linears"] = runner.info.linears
            runner.close()
            print(name, found[name], flush=True)
    return found


def _texts_per_s(runner: Any, tokens: int) -> float:
    from gpu.batch import pack

    per_pack = 512 // tokens
    dice = np.random.default_rng(0)
    items = [
        EncodedItem(dice.integers(1000, 30_000, tokens).astype(np.int32), ItemOptions())
        for _ in range(per_pack)
    ]
    batch = pack(items)
    runner.forward(batch)
    took: list[float] = []
    until = time.perf_counter() + RUN_S
    while time.perf_counter() < until or len(took) < 3:
        started = time.perf_counter()
        runner.forward(batch)
        took.append(time.perf_counter() - started)
    return per_pack / median(took)


# --- one process around devices of many cores ------------------------------------------------------


def many_cores(cores: list[int], texts_per_core: dict[str, Any]) -> list[dict[str, Any]]:
    """What one process delivers of what so many cores could, by model, length and inputs a request."""
    return _around(
        (f"{n} cores", name, Device(n, 1 / (texts_per_core[name][kind] * tokens)), tokens)
        for name in ("MiniLM", "bge-base")
        for n in cores
        for kind, tokens in LENGTHS.items()
    )


def one_gpu() -> list[dict[str, Any]]:
    """The same of one device that is as fast as its roofline."""
    return _around(
        (
            "one H200",
            name,
            Device(1, flops_per_token(name, tokens) / (H200_FLOPS * H200_SHARE), H200_PACK),
            tokens,
        )
        for name in SIZES
        for tokens in LENGTHS.values()
    )


def _around(plans: Iterable[tuple[str, str, Device, int]]) -> list[dict[str, Any]]:
    rows = []
    for what, name, device, tokens in plans:
        possible = device.tokens_per_s / tokens
        held = device.threads * (device.pack_tokens // tokens)
        for n_items in (1, 32):
            most = MOST_TEXTS if n_items > 1 else MOST_TEXTS // 6
            texts = min(most, max(RUN_S * possible, 3 * held))
            count = max(4, int(texts) // n_items)
            delivered = count * n_items / asyncio.run(_deliver(device, tokens, n_items, count))
            rows.append(
                {
                    "device": what, "model": name, "tokens": tokens, "inputs a request": n_items,
                    "possible": possible, "delivered": delivered, "texts": count * n_items,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


async def _deliver(device: Device, tokens: int, n_items: int, count: int) -> float:
    lane = inproc(max_in_flight=IN_FLIGHT)
    transport = await lane.transport(await lane.fill(bodies(count, n_items)))
    return await service(
        transport,
        count,
        factory=lambda: Sleeps(device, tokens),
        settings=Settings(
            executor=ExecutorSettings(cpu_workers=device.threads),
            admission=AdmissionSettings(
                bulk=LaneAdmission(
                    max_in_flight_requests=IN_FLIGHT, max_in_flight_tokens=100_000_000
                )
            ),
        ),
    )


# --- memory ----------------------------------------------------------------------------------------


def memory() -> list[dict[str, Any]]:
    """MiB of the processes of `serve --processes`, each with its model loaded and 200 texts answered."""
    from pipeline.demo.fetch import resolve_model

    small = Path(resolve_model("all-MiniLM-L6-v2"))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        large = seeded_bert(Path(temporary) / "bge-base", small, layers=12, hidden=768)
        for name, folder in (("MiniLM", small), ("bge-base", large)):
            for n in (1, 2):
                rows += [{"model": name, "processes": n, **row} for row in _memory_of(folder, n)]
                print(rows[-1], flush=True)
    return rows


def _memory_of(folder: Path, n: int) -> list[dict[str, Any]]:
    server, port = RedisServer(), free_port()
    asyncio.run(server.start())
    command = [sys.executable, "-m", "pipeline", "serve", "--model", str(folder), "--health-port",
               str(port), "--source", f"redis://127.0.0.1:{server.port}/in", "--processes", str(n)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5))
        asyncio.run(_ask(server.port))
        statistics = urllib.request.urlopen(f"http://127.0.0.1:{port}/statistics", timeout=5).read()
        children = json.loads(statistics).get("processes", {})
        pids = [("a process", one["pid"]) for one in children.values()]
        first = ("the parent" if children else "a process", process.pid)
        return [{"what": what, **_smaps(pid)} for what, pid in (first, *pids)]
    finally:
        process.terminate()
        process.wait()
        server.close()


async def _ask(port: int) -> None:
    from embedstream_client import AsyncClient

    async with AsyncClient.from_url(f"redis://127.0.0.1:{port}/in") as client:
        for _ in range(10):
            await client.embed([f"text number {i} of several" for i in range(20)], timeout=60)


def _smaps(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (x.partition(":") for x in lines)}
    return {
        "rss": kib["Rss"] / 1024,
        "pss": kib["Pss"] / 1024,
        "private": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
        "shared": (kib["Shared_Clean"] + kib["Shared_Dirty"]) / 1024,
    }


def wait_for(ready: Callable[[], Any]) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            ready()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


# --- results ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", default=["rates", "cores", "gpu", "memory"])
    parser.add_argument("--cores", type=int, nargs="*", default=[16, 96])
    parser.add_argument(
        "--out", default="scaling", help="parts that do not run are kept from there"
    )
    arguments = parser.parse_args()
    configure_logging("info", "json", stream=io.StringIO())
    kept = RESULTS / f"{arguments.out}.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data.pop("machine", None)
    if "rates" in arguments.parts:
        data["rates"] = rates()
    if "cores" in arguments.parts:
        data["cores"] = many_cores(arguments.cores, data["rates"])
    if "gpu" in arguments.parts:
        data["gpu"] = one_gpu()
    if "memory" in arguments.parts:
        data["memory"] = memory()
    path = write_results(
        arguments.out, "Many cores: where one Python process ends", _told(data), data
    )
    print(f"written to {path}")


def _told(data: dict[str, Any]) -> list[str]:
    sections = []
    if "rates" in data:
        rows = [
            [name, f"{one['short']:,.0f}", f"{one['long']:,.1f}", one["linears"]]
            for name, one in data["rates"].items()
        ]
        sections.append(
            "## One core\n\nTexts/s of one executor thread in fp32, packs of 512 tokens: "
            f"{LENGTHS['short']} tokens a text (short) and {LENGTHS['long']} (long). The bge sizes have "
            "random weights, which take the same time.\n\n"
            + table(["model", "short texts/s", "long texts/s", "linears"], rows)
        )
    around = [*data.get("cores", ()), *data.get("gpu", ())]
    if around:
        rows = [
            [
                one["device"], one["model"], one["tokens"], one["inputs a request"],
                f"{one['possible']:,.0f}", f"{one['delivered']:,.0f}",
                f"{one['delivered'] / one['possible']:.2f}",
            ]
            for one in around
        ]  # fmt: skip
        sections.append(
            "## One process around a simulated device\n\nThe whole service over the in-process transport; each "
            "of the device's threads sleeps as long as a forward of its tokens takes at the rate of a core "
            f"above, with up to {IN_FLIGHT:,} requests in flight (one H200: a thread, {H200_SHARE:.0%} of {H200_FLOPS / 1e12:.0f} TFLOP/s). Runs are "
            "seconds long, so that the last packs, which are not full, cost a share of 0.05 to 0.2. A real forward also takes the interpreter's lock now and "
            "then, and a broker's client takes more of it than this transport: it is an upper bound of a process.\n\n"
            + table(
                ["device", "model", "tokens a text", "inputs a request", "device texts/s",
                 "one process texts/s", "share"],
                rows,
            )
        )  # fmt: skip
    if "memory" in data:
        rows = [
            [one["model"], one["processes"], one["what"], *(f"{one[k]:.0f}" for k in ("rss", "pss", "private", "shared"))]
            for one in data["memory"]
        ]  # fmt: skip
        sections.append(
            "## Memory of the processes\n\nMiB, of `/proc/PID/smaps_rollup`, after 200 texts.\n\n"
            + table(["model", "processes", "which", "RSS", "PSS", "private", "shared"], rows)
        )
    return sections


if __name__ == "__main__":
    main()

"""Does a service grow? Memory and cost per token over a long run, in one process.

    python -m benchmarks.growth null --requests 1000000
    python -m benchmarks.growth minilm --texts 50000

Who calls it: a person; parts add to one results file.
What must stay true: settings are the defaults, so that every memory that a service has (results, replies
for those that come again, metrics) is in use; each request has an id and a text of its own; what fills
once and stays full (those memories, 32 MiB each, and the replies that the in-process broker keeps) is
full before the first sample counts. A shared machine changes its pace by a third within minutes, CPU time
or not: the same piece of work is timed all along, and cost is judged against it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import datetime
import gc
import io
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, table, write_results
from benchmarks.pipeline import NoModel
from gpu.batch import EncodedItem, EncodedRequest, ItemOptions, Runner
from pipeline.observe.logs import configure_logging
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.oneoff import run_inproc
from pipeline.settings.load import ModelSettings, Settings
from pipeline.transports.inproc.broker import InprocBroker
from schemas.codec import decode_request, encode_request
from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest, EmbedRequest, Text

LIMIT_MB = 50.0
"""Resident memory that a million requests may add."""
FLAT = 1.10
"""Cost per token of the last third over that of the first, at most, in pieces of fixed work."""
PACE_EVERY, PACE_LOOPS = 500, 100
FIXED = EmbedRequest(id="fixed", input=(Text("the same text every time"),))
N_SAMPLES = 24
AHEAD = 2000
WORDS = (
    "stream",
    "queue",
    "topic",
    "broker",
    "vector",
    "model",
    "batch",
    "token",
    "river",
    "mountain",
)


class Distinct(NoModel):
    """As `NoModel`, with other ids for each text: every item is computed."""

    def encode(self, requests: list[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        options = ItemOptions()
        return [
            EncodedRequest(tuple(EncodedItem(_ids(item.text), options) for item in request.input))  # type: ignore[union-attr]
            for request in requests
        ]


def _ids(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    number = int(text.rpartition(" ")[2])
    return np.array([number % 30_000, number // 30_000, 2, 3, 4, 5, 6, 7], dtype=np.int32)


@dataclass
class Run:
    """Samples of one run. MB are 10^6 bytes; cpu_s counts every thread of the process but not the fixed work,
    pace_s the CPU seconds of that since the last sample, for one piece."""

    requests: list[int] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    pace_s: list[float] = field(default_factory=list)
    _spent_s: float = 0.0
    _pieces: list[float] = field(default_factory=list)

    def pace(self) -> None:
        """One piece of fixed work: a request written and read, over and over."""
        began = time.thread_time()
        for _ in range(PACE_LOOPS):
            decode_request(encode_request(FIXED)[0], None, default_id="fixed")
        self._pieces.append(time.thread_time() - began)
        self._spent_s += self._pieces[-1]

    def note(self, done: int, tokens: float) -> None:
        gc.collect()  # what is garbage is no growth; its own cost is the same each time
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.requests.append(done)
        self.rss_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
        self.cpu_s.append(time.process_time() - self._spent_s)
        if not self._pieces:
            self.pace()
        self.pace_s.append(float(np.mean(self._pieces)))
        self._pieces.clear()
        self.wall_s.append(time.perf_counter())
        self.tokens.append(tokens)
        print(
            f"{done:>9,} requests  {self.rss_mb[-1]:.1f} MB  cpu {self.cpu_s[-1]:.1f} s", flush=True
        )

    def growth_mb(self) -> float:
        """MB per million requests: slope of a line through the samples."""
        return float(np.polyfit(np.array(self.requests) / 1e6, np.array(self.rss_mb), 1)[0])

    def thirds(self) -> list[tuple[int, int]]:
        """First and last sample of each."""
        edges = [len(self.requests) * i // 3 for i in range(3)] + [len(self.requests) - 1]
        return list(itertools.pairwise(edges))

    def costs_us(self) -> list[float]:
        """CPU microseconds a token, of each third."""
        return [
            1e6 * (self.cpu_s[b] - self.cpu_s[a]) / (self.tokens[b] - self.tokens[a])
            for a, b in self.thirds()
        ]

    def costs_pieces(self) -> list[float]:
        """The same in thousandths of a piece of fixed work, as that went meanwhile."""
        return [
            1e-3 * us / float(np.mean(self.pace_s[a + 1 : b + 1]))
            for us, (a, b) in zip(self.costs_us(), self.thirds(), strict=True)
        ]

    def samples(self) -> dict[str, list[float]]:
        """For the results file."""
        return {name: values for name, values in vars(self).items() if not name.startswith("_")}


async def run(
    settings: Settings, factories: dict[str, Callable[[], Runner]] | None, count: int, warm: int
) -> Run:
    """`count` requests of one text, after `warm` that do not count."""
    broker, metrics, samples = InprocBroker(), PrometheusMetrics(), Run()
    every = max(1, count // N_SAMPLES)

    def answered() -> float:
        return metrics.registry.get_sample_value("embedstream_items_total", {"task": "embed"}) or 0

    def tokens() -> float:
        name, model = (
            "embedstream_batch_tokens_sum",
            {"model": next(iter(factories or settings.models))},
        )
        return metrics.registry.get_sample_value(name, model) or 0

    async def feed(first: int, last: int) -> None:
        for number in range(first, last):
            while broker.unsettled >= AHEAD:
                await asyncio.sleep(0.001)
            if number % PACE_EVERY == 0:
                samples.pace()
            words = " ".join(WORDS[(number >> shift) % len(WORDS)] for shift in (0, 3, 6))
            request = EmbedRequest(id=f"r{number}", input=(Text(f"{words} {number}"),))
            await broker.put(encode_request(request)[0], key=f"r{number}")
        while broker.unsettled or answered() < last:
            await asyncio.sleep(0.005)

    async with run_inproc(settings, metrics=metrics, runner_factories=factories, broker=broker):
        await feed(0, warm)
        samples.note(0, tokens())
        for done in range(0, count, every):
            upto = min(count, done + every)
            await feed(warm + done, warm + upto)
            samples.note(upto, tokens())
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=["null", "minilm"])
    parser.add_argument("--requests", type=int, default=1_000_000, help="of part null")
    parser.add_argument("--texts", type=int, default=50_000, help="of part minilm")
    parser.add_argument("--warm", type=int, default=50_000, help="requests before the first sample")
    parser.add_argument("--out", default="growth")
    arguments = parser.parse_args()
    configure_logging("info", "json", stream=io.StringIO())
    if arguments.part == "null":
        settings, factories, count = Settings(), {"none": Distinct}, arguments.requests
    else:
        from pipeline.demo.fetch import resolve_model

        path = str(resolve_model("all-MiniLM-L6-v2"))
        settings, factories = Settings(models={"minilm": ModelSettings(path=path)}), None
        count = arguments.texts
    samples = asyncio.run(run(settings, factories, count, arguments.warm))
    kept = RESULTS / f"{arguments.out}.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data.pop("machine", None)
    first, *_, last = samples.costs_pieces()
    data[arguments.part] = {
        "measured": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "requests": count, "warm": arguments.warm, "mb_per_million": samples.growth_mb(),
        "us_per_token": samples.costs_us(), "pieces_per_token": samples.costs_pieces(),
        "samples": samples.samples(),
    }  # fmt: skip
    path = write_results(
        arguments.out, "Growth: memory and cost over a long run", _told(data), data
    )
    print(f"written to {path}")
    if samples.growth_mb() > LIMIT_MB or last > FLAT * first:
        raise SystemExit("it grows: see above")


def _told(data: dict[str, Any]) -> list[str]:
    rows = [
        [
            {"null": "none", "minilm": "all-MiniLM-L6-v2"}[part], f"{one['requests']:,}",
            f"{one['samples']['rss_mb'][0]:.0f}", f"{one['samples']['rss_mb'][-1]:.0f}",
            f"{one['mb_per_million']:+.1f}", " / ".join(f"{us:.1f}" for us in one["us_per_token"]),
            " / ".join(f"{cost:.1f}" for cost in one["pieces_per_token"]),
            f"{one['requests'] / (one['samples']['wall_s'][-1] - one['samples']['wall_s'][0]):,.0f}",
            one["measured"],
        ]
        for part, one in data.items()
    ]  # fmt: skip
    header = ["model", "requests of one text", "MB before", "MB after", "MB per million (slope)",
              "CPU us a token, by thirds", "in pieces of fixed work / 1000", "requests/s", "measured"]  # fmt: skip
    return [
        "Settings as shipped, in-process transport, a feeder in the same process; every text and id is another "
        "one. The parts are separate runs; the date and the load above are of the last. What fills once and stays full is full before the first sample. The machine is shared: CPU time a token is told beside a piece of fixed "
        f"work ({PACE_LOOPS} times a request written and read) that was timed every {PACE_EVERY} requests.",
        table(header, rows),
    ]


if __name__ == "__main__":
    main()

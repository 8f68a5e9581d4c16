"""How much of the bare engine's rate does the service keep? The same texts through both, taking turns.

    python -m benchmarks.end_to_end [--rounds 3]

Who calls it: a person; needs the packaged all-MiniLM-L6-v2.
What must stay true: the bare engine is tokenizer, packer and executor without a service around them
(`benchmarks._engines.OurEngine`); the service is the whole one with the in-process transport and settings as
shipped, fed by the same process, which pays for the feeding too. Both are told as texts per CPU second of
the process and per second of wall time; no text comes twice, so that no remembered result answers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import io
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._common import machine_kind, table, write_results
from benchmarks._engines import OurEngine
from pipeline.demo.corpus import load_corpus
from pipeline.demo.fetch import resolve_model
from pipeline.observe.logs import configure_logging
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.oneoff import run_inproc
from pipeline.settings.load import ModelSettings, Settings
from pipeline.transports.inproc.broker import InprocBroker
from schemas.codec import encode_request
from schemas.requests import EmbedRequest, Text

MODEL = "all-MiniLM-L6-v2"
AHEAD = 500


class Service:
    """The whole service around the model, in this process."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(models={"m": ModelSettings(path=str(folder))})
        self._broker, self._metrics = InprocBroker(), PrometheusMetrics()
        self._running = run_inproc(settings, metrics=self._metrics, broker=self._broker)
        self._sent = 0

    async def __aenter__(self) -> Service:
        await self._running.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._running.__aexit__(*error)  # type: ignore[arg-type]

    def _answered(self) -> float:
        value = self._metrics.registry.get_sample_value(
            "embedstream_items_total", {"task": "embed"}
        )
        return value or 0.0

    async def __call__(self, texts: Sequence[str], per_request: int) -> None:
        """Every text answered."""
        for start in range(0, len(texts), per_request):
            while self._broker.unsettled >= AHEAD:
                await asyncio.sleep(0.02)  # looking costs what is measured
            some = tuple(map(Text, texts[start : start + per_request]))
            request = EmbedRequest(id=f"r{self._sent}", input=some, truncate="right")
            await self._broker.put(encode_request(request)[0], key=request.id)
            self._sent += len(some)
        while self._answered() < self._sent:
            await asyncio.sleep(0.02)


async def run(rounds: int) -> tuple[list[list[object]], dict[str, object]]:
    folder = Path(resolve_model(MODEL))
    documents = load_corpus(4000).documents
    sets = {
        "long": [f"{d.title}\n{d.text}" for d in documents[:256]],
        "short": [d.title for d in documents[:2000]],
    }
    engine = OurEngine(folder)
    rows: list[list[object]] = []
    data: dict[str, object] = {}
    async with Service(folder) as service:
        for name, texts in sets.items():
            for per_request in (1, 32):
                seen: dict[str, list[tuple[float, float]]] = {"engine": [], "service": []}
                for turn in range(rounds + 1):
                    new = [
                        f"{turn} {per_request} {text}" for text in texts
                    ]  # in front: ends are cut
                    for who in seen:
                        cpu, wall = time.process_time(), time.perf_counter()
                        if who == "engine":
                            await asyncio.get_running_loop().run_in_executor(None, engine, new)
                        else:
                            await service(new, per_request)
                        if turn:  # the first warms up
                            spent = time.process_time() - cpu, time.perf_counter() - wall
                            seen[who].append((len(new) / spent[0], len(new) / spent[1]))
                rates = {
                    who: [statistics.median(one[i] for one in found) for i in (0, 1)]
                    for who, found in seen.items()
                }
                ratios = [rates["service"][i] / rates["engine"][i] for i in (0, 1)]
                rows.append([
                    name, per_request, *(f"{rates[who][i]:,.0f}" for i in (0, 1) for who in seen),
                    *(f"{ratio:.3f}" for ratio in ratios),
                ])  # fmt: skip
                print(rows[-1], flush=True)
                data[f"{name} {per_request}"] = {"rates": rates, "samples": seen}
    engine.close()
    return rows, data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    configure_logging("info", "json", stream=io.StringIO())
    rows, data = asyncio.run(run(rounds))
    header = ["texts", "a request", "engine, texts per CPU-s", "service, texts per CPU-s",
              "engine, texts/s", "service, texts/s", "service / engine, CPU", "service / engine, wall"]  # fmt: skip
    note = (
        f"{MODEL}, {rounds} rounds in turns, medians. The service is fed by its own process, which is part of its CPU time; "
        "its bare engine is tokenizer, packer and executor alone."
    )
    path = write_results(
        f"end-to-end-{machine_kind()}",
        "The service beside its bare engine",
        [note, table(header, rows)],
        data,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()

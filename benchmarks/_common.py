"""What every benchmark here shares: the machine's facts, interleaved rounds, and the results' files.

Who calls it: `benchmarks.engine`, `benchmarks.pipeline`, `benchmarks.load`.
What must stay true: every contestant runs in every round, in an order that changes all the time; a figure is a median over rounds, never the best of them; what other processes took of the machine meanwhile is
measured and written beside it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.device.cores import usable_cores

RESULTS = Path(__file__).parent / "results"


def cores() -> int:
    """Cores that this process may use."""
    return len(usable_cores())


def machine() -> dict[str, str]:
    """CPU, its vector units, memory and versions, as they belong in a results file."""
    listed: dict[str, str] = {}
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            name, _, value = line.partition(":")
            listed[name.strip()] = value.strip()
    except (OSError, subprocess.CalledProcessError):
        listed["Model name"] = platform.processor() or platform.machine()
    units = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
    flags = set(listed.get("Flags", "").split())
    return {
        "cpu": listed.get("Model name", "unknown"),
        "cores": str(cores()),
        "vector units": ", ".join(unit for unit in units if unit in flags) or "none listed",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def machine_kind(facts: Mapping[str, str] | None = None) -> str:
    """The kind of CPU, as results files are named by: vector units and maker, "avx2-amd", "amx-intel".

    facts: of `machine`, of another one than this.
    """
    found = machine() if facts is None else facts
    units = found["vector units"].split(", ")
    order = {"amx_bf16": "amx", "avx512f": "avx512", "avx2": "avx2"}
    best = next((short for unit, short in order.items() if unit in units), platform.machine())
    makers = ("AMD", "Intel", "Ampere", "Apple", "Graviton", "Neoverse")
    maker = next((name for name in makers if name.lower() in found["cpu"].lower()), "other")
    return f"{best}-{maker.lower()}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run. wall_s; cpu_s of this process and its finished children; others: cores' worth of
    CPU that everybody else took meanwhile."""

    wall_s: float
    cpu_s: float
    others: float


def timed(work: Callable[[], Any], pids: Sequence[int] = ()) -> Sample:
    """Run it once. pids: other processes whose CPU time belongs to the work (brokers)."""
    busy, own, started = _busy_s(), _own_s(pids), time.perf_counter()
    work()
    wall = time.perf_counter() - started
    cpu = _own_s(pids) - own
    return Sample(wall, cpu, max(0.0, (_busy_s() - busy - cpu) / wall))


def _own_s(pids: Sequence[int]) -> float:
    me = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = me.ru_utime + me.ru_stime + children.ru_utime + children.ru_stime
    return total + sum(_process_s(pid) for pid in pids)


def _process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    """CPU seconds that all cores together spent on anything since boot; 0 where /proc is absent."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    numbers = [int(n) for n in fields]
    idle = numbers[3] + numbers[4]
    return (sum(numbers[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def interleave(
    contestants: Mapping[str, Sequence[Callable[[], Any]]],
    rounds: int,
    *,
    pids: Sequence[int] = (),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Sample]]:
    """Samples per contestant, one for each round.

    contestants: the parts of each one's work. They take turns part by part, in an order that changes from
        part to part, so that all of them meet the same neighbours on a busy machine.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    order = list(contestants)
    shuffle = random.Random(0)
    for number in range(rounds):
        taken: dict[str, list[Sample]] = {name: [] for name in contestants}
        for part in range(max(len(parts) for parts in contestants.values())):
            shuffle.shuffle(order)
            for name in order:
                taken[name].append(timed(contestants[name][part], pids))
        for name, parts in taken.items():
            samples[name].append(_sum(parts))
            wall, others = samples[name][-1].wall_s, samples[name][-1].others
            say(
                f"round {number + 1}/{rounds}  {name}: {wall:.2f} s, others took {others:.2f} cores"
            )
    return samples


def _sum(parts: Sequence[Sample]) -> Sample:
    wall = sum(part.wall_s for part in parts)
    others = sum(part.others * part.wall_s for part in parts) / wall
    return Sample(wall, sum(part.cpu_s for part in parts), others)


def median(values: Sequence[float]) -> float:
    """0 for nothing."""
    return statistics.median(values) if values else 0.0


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_results(name: str, title: str, sections: Sequence[str], data: Mapping[str, Any]) -> Path:
    """`results/<name>.md` for people and `results/<name>.json` for programs. Returns the first."""
    RESULTS.mkdir(exist_ok=True)
    facts = machine() | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    if hasattr(os, "getloadavg"):
        facts["load average at the end"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    listed = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    body = f"# {title}\n\n{listed}\n\n" + "\n\n".join(sections) + "\n"
    path = RESULTS / f"{name}.md"
    path.write_text(body, "utf-8")
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"machine": facts, **data}, indent=1) + "\n", "utf-8"
    )
    return path

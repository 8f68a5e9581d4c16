"""`bench`: how fast a model or a running service is here, and how late its answers are at a given rate.

Who calls it: `pipeline.cli.commands`.
What must stay true: the same service as `serve`, with nothing remembered between equal texts; what was not
answered is said; figures name the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from gpu.device.cores import n_threads, usable_cores
from pipeline.cli.ask import AskCommand, opened
from pipeline.cli.console import (
    configure_one_off_logging,
    note_error,
    out_console,
    run_async,
    usage_error,
    working,
)
from pipeline.lifecycle import ExitStatus, OperatorError
from schemas.errors import EmbedstreamError
from schemas.headers import MSGPACK
from schemas.results import FailureReply, Reply

if TYPE_CHECKING:
    from gpu.batch import ModelInfo
    from pipeline.bench.load import Ask, Step
    from pipeline.oneoff import InprocService
    from pipeline.whole_file import WholeFile

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of the closed loop's rate, for the open loops."""
WARM_UP_S = 2.0
BUSY = 0.8
"""A share of its time above which a part is what limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """The arguments of `bench`."""

    model: str | None = None
    via: str | None = None
    texts: Path | None = None
    tokens: str | None = None
    rates: Sequence[float] = ()
    seconds: float = 10.0
    timeout_s: float = 30.0
    plot: Path | None = None
    as_json: bool = False
    config: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(slots=True)
class _Findings:
    """Everything that is shown."""

    what: str
    closed: Step | None = None
    steps: list[Step] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    gflops: float | None = None
    ceiling_gflops: float | None = None


def bench(command: BenchCommand) -> int:
    """Measure and show; the exit status is 1 when something was not answered."""
    from pipeline.whole_file import WholeFile

    texts = _texts(command)
    configure_one_off_logging()
    with contextlib.ExitStack() as stack:
        plot = None
        if command.plot is not None:
            plot = stack.enter_context(WholeFile(command.plot, "--plot"))
        found = run_async(_bench(command, texts))
        if plot is not None:
            _write_plot(plot, found)
            plot.keep()
    assert found.closed is not None
    _print_json(found) if command.as_json else _print(found)
    unanswered = [step for step in (found.closed, *found.steps) if step.failed or step.unsent]
    for step in unanswered[:1]:
        note_error(
            f"not all were answered, first: {step.first_failure or 'too many were in flight'}"
        )
    return ExitStatus.ERROR if unanswered else ExitStatus.OK


def _texts(command: BenchCommand) -> Callable[[int], Iterator[str]]:
    """A seed's texts."""
    from pipeline.bench import workload

    if command.texts is not None and command.tokens is not None:
        raise usage_error("--texts and --tokens are two ways to say what is asked: give one")
    try:
        if command.texts is not None:
            texts = workload.texts_of(command.texts)
            return lambda seed: workload.endless(texts, seed)
        return workload.Mix.parse(command.tokens or workload.DEFAULT_MIX).texts
    except (ValueError, OSError) as error:
        option = "--tokens" if command.texts is None else "--texts"
        raise usage_error(f"{option}: {error}") from error


async def _bench(command: BenchCommand, texts: Callable[[int], Iterator[str]]) -> _Findings:
    from pipeline.bench.load import closed_loop, open_loop

    question = AskCommand(
        task="embed",
        texts=(),
        model=command.model,
        via=command.via,
        timeout_s=command.timeout_s,
        config=command.config,
        overrides=(
            *command.overrides,
            "batching.result_cache_bytes=0",
            "batching.result_cache_url=",
        ),
    )
    async with opened(question) as asker:
        ask = _asking(asker, command)
        service: InprocService | None = getattr(asker, "service", None)
        found = _Findings(_named(command, service))
        parts = _Parts(service)
        with working(f"{found.what}: as fast as it goes"):
            await closed_loop(ask, texts(1), min(WARM_UP_S, command.seconds))
            parts.begin()
            found.closed = await closed_loop(ask, texts(2), command.seconds)
            found.busy = parts.shares()
        if service is not None:
            _ceiling(found, next(iter(service.app.models.values())), parts.workers)
        rates = command.rates or [found.closed.texts_per_s * share for share in SHARES]
        for seed, rate in enumerate(rates, 3):
            if rate <= 0:
                continue
            with working(f"{found.what}: {rate:,.1f} texts a second"):
                found.steps.append(await open_loop(ask, texts(seed), rate, command.seconds, seed))
    return found


def _asking(asker: Any, command: BenchCommand) -> Ask:
    run_id, numbers = uuid.uuid4().hex[:8], itertools.count()
    named = {"model": command.model} if command.via is not None and command.model else {}

    async def ask(text: str) -> int:
        request_id = f"bench-{run_id}-{next(numbers)}"
        record = {"id": request_id, "task": "embed", "input": text, "truncate": "right", **named}
        reply = await asker.ask(request_id, msgpack.packb(record), MSGPACK, command.timeout_s)
        error: EmbedstreamError | None
        error = reply.error if isinstance(reply, FailureReply) else reply.items[0].error
        if error is not None:
            raise ValueError(f"{error.code}: {error.message}")
        assert isinstance(reply, Reply)
        return reply.usage.total_tokens

    return ask


def _named(command: BenchCommand, service: InprocService | None) -> str:
    if service is None:
        from pipeline.redact import redact

        return f"the service behind {redact(command.via or '')}"
    return ", ".join(service.app.models)


class _Parts:
    """How busy the parts of a service in this process are: forwards, tokenizer, event loop."""

    def __init__(self, service: InprocService | None) -> None:
        self.workers = 1
        self._spent: dict[str, float] = {"forwards": 0.0, "tokenizer": 0.0}
        self._began = self._loop_s = 0.0
        self._watched = service is not None
        if service is None or service.app.graph is None:
            return
        models = service.app.graph.models
        self.workers = models.executor.width
        for runner in models.runners.values():
            runner.forward = self._timed("forwards", runner.forward)  # type: ignore[method-assign]
            encoder = runner.encoder
            encoder.encode = self._timed("tokenizer", encoder.encode)  # type: ignore[method-assign]

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._spent[part] += time.perf_counter() - started

        return timed

    def begin(self) -> None:
        """From here on."""
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._began, self._loop_s = time.perf_counter(), time.thread_time()

    def shares(self) -> dict[str, float]:
        """Share of the time since `begin` in which each part worked, 0 to 1; empty for another process."""
        if not self._watched:
            return {}
        wall = time.perf_counter() - self._began
        return {
            f"forwards ({self.workers} threads)": self._spent["forwards"] / wall / self.workers,
            "tokenizer": self._spent["tokenizer"] / wall,
            "event loop": (time.thread_time() - self._loop_s) / wall,
        }


def _ceiling(found: _Findings, info: ModelInfo, workers: int) -> None:
    if not info.flops_per_token or info.device != "cpu" or found.closed is None:
        return
    from gpu.device.ceiling import gemm_gflops

    found.gflops = info.flops_per_token * found.closed.tokens_per_s / 1e9
    found.ceiling_gflops = gemm_gflops(workers)


def _limit(busy: dict[str, float]) -> str:
    """What to look at first, in words."""
    if not busy:
        return "not known of another process: look at embedstream_forward_seconds in its /metrics"
    part, share = max(busy.items(), key=lambda item: item[1])
    if share < BUSY:
        return "no part is busy all the time: this machine's cores are shared with something else"
    return f"{part}: busy {share:.0%} of the time"


def _print(found: _Findings) -> None:
    from rich.table import Table

    closed, out = found.closed, out_console()
    assert closed is not None
    out.print(f"{found.what} on {_machine()}")
    out.print(
        f"as fast as it goes: {closed.texts_per_s:,.1f} texts/s, {closed.tokens_per_s:,.0f} tokens/s"
    )
    if found.gflops is not None and found.ceiling_gflops:
        share = found.gflops / found.ceiling_gflops
        out.print(
            f"matrix products: {found.gflops:,.0f} GFLOP/s, {share:.0%} of the {found.ceiling_gflops:,.0f} "
            "that this machine's best product makes"
        )
    out.print(f"what limits: {_limit(found.busy)}")
    table = Table("texts/s asked", "answered", "p50 ms", "p95 ms", "p99 ms", "not answered")
    for step in found.steps:
        latencies = [_ms(step.latency_s(share)) for share in (0.5, 0.95, 0.99)]
        missing = str(step.failed + step.unsent or "")
        table.add_row(f"{step.rate:,.1f}", f"{step.texts_per_s:,.1f}", *latencies, missing)
    out.print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"


def _print_json(found: _Findings) -> None:
    def plain(step: Step) -> dict[str, Any]:
        return {
            "rate": step.rate,
            "texts_per_s": step.texts_per_s,
            "tokens_per_s": step.tokens_per_s,
            "latency_ms": {
                name: None if at is None else 1000 * at
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
                for at in [step.latency_s(share)]
            },
            "not_answered": step.failed + step.unsent,
        }

    assert found.closed is not None
    report = {
        "what": found.what,
        "machine": _machine(),
        "closed_loop": plain(found.closed),
        "open_loops": [plain(step) for step in found.steps],
        "busy": found.busy,
        "gflops": found.gflops,
        "ceiling_gflops": found.ceiling_gflops,
        "limit": _limit(found.busy),
    }
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # only Linux tells it there
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    n = n_threads(len(usable_cores()))
    return f"{cpu}, {n} core{'s' if n > 1 else ''}"


def _write_plot(file: WholeFile, found: _Findings) -> None:
    from pipeline.bench.plot import svg

    try:
        file.write(svg(found.steps, f"{found.what} on {_machine()}").encode())
    except ValueError as error:
        raise OperatorError(f"--plot: {error}") from error

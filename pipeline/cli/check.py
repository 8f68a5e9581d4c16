"""`check` and `config`: what `serve` would do, before it does it.

Who calls it: `pipeline.cli.commands`.
What must stay true: nothing is created and no group joined; every problem of a kind is reported, not
only the first; brokers come before models, and are given up after `REACH_S`; what is wrong is said as
soon as it is known, the plan after it; secrets are masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pipeline.cli.console import (
    configure_one_off_logging,
    console,
    load_settings,
    out_console,
    run_async,
    working,
)
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.redact import redact
from schemas.requests import TASKS

if TYPE_CHECKING:
    from gpu.batch import ModelInfo
    from pipeline.settings.load import RouteSettings, Settings

REACH_S = 5.0
"""For all brokers together: a person waits for the answer."""


@dataclass(slots=True)
class Findings:
    """What was found: problems stop `serve`, notes do not. `tell` hears of each at once."""

    tell: Callable[[str, str], None]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reached: dict[str, bool] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    loads_models: bool = True
    """False once a broker has a problem: models take a while and change nothing about it."""

    def problem(self, text: str) -> None:
        """`serve` would fail."""
        self.problems.append(redact(text))
        self.tell("problem", self.problems[-1])

    def note(self, text: str) -> None:
        """Works, and should be looked at."""
        self.notes.append(redact(text))
        self.tell("note", self.notes[-1])


def check(
    config: Path | None,
    pairs: Sequence[str],
    *,
    verify: bool = False,
    verbose: bool = False,
    as_json: bool = False,
) -> int:
    """Say what is wrong, then print the plan; 0 when `serve` would start, else 1.

    Args:
        verify: ask each model's own library for a second opinion; one that differs is a problem.
        verbose: defaults and honoured keys of model folders, too.
        as_json: one JSON object on stdout and nothing else.
    """
    configure_one_off_logging("error")  # what would be logged is said as a note or a problem
    findings = Findings((lambda kind, text: None) if as_json else _tell)
    settings = None
    try:
        settings = load_settings(config, pairs)
    except OperatorError as error:
        for line in str(error).splitlines():
            findings.problem(line)
    else:
        run_async(_find(settings, findings, verify))
    if as_json:
        _print_json(settings, findings)
    elif settings is not None:
        _print_plan(settings, findings, verbose)
    return ExitStatus.ERROR if findings.problems else ExitStatus.OK


def _tell(kind: str, text: str) -> None:
    """One line on stderr, coloured at a terminal, never wrapped: people copy from it."""
    from rich.text import Text

    sys.stdout.flush()
    style = {"problem": "bold red", "note": "yellow"}[kind]
    console().print(Text.assemble((kind, style), f": {text}"), soft_wrap=True)


async def _find(settings: Settings, findings: Findings, verify: bool) -> None:
    if not settings.routes:
        findings.problem(
            "there is no route: add [[routes]] to the settings file, or pass --source to serve"
        )
    if settings.executor.processes > 1:
        _divide(settings, findings)
    with working("reaching brokers"):
        await _reach_all(settings, findings)
    if not all(findings.reached.values()):
        findings.loads_models = False
        findings.note("no model was loaded: brokers come first")
        return
    for name in settings.models:
        with working(f"loading model {name}"):
            await _load(settings, name, findings, verify)


def _divide(settings: Settings, findings: Findings) -> None:
    from gpu.device.cores import usable_cores
    from pipeline.processes.shares import shares

    try:
        shares(settings, usable_cores())
    except OperatorError as error:
        findings.problem(str(error))


async def _reach_all(settings: Settings, findings: Findings) -> None:
    """Both ends of every route at the same time."""
    for route in settings.routes:
        _import_for(route)  # client libraries take a while, which no broker is to blame for
        findings.reached[route.name] = True
    async with asyncio.TaskGroup() as group:
        for route in settings.routes:
            for reach, url in _ends(settings, route):
                group.create_task(_reach(route, reach, url, findings))


_Reach: TypeAlias = Callable[[str], Coroutine[Any, Any, tuple[str, ...]]]


def _ends(settings: Settings, route: RouteSettings) -> list[tuple[_Reach, str]]:
    """Where requests come from, and where results go unless each request says so."""
    from pipeline.indexing.sinks.registry import is_collection, reach_collection
    from pipeline.settings.load import route_accepts
    from pipeline.transports.registry import (
        REPLY,
        limit_notices,
        parse_url,
        reach,
        reach_destination,
    )

    async def reach_source(url: str) -> tuple[str, ...]:
        notes = await reach(url, exactly_once=route.delivery == "exactly_once")
        return *notes, *await limit_notices(parse_url(url), route_accepts(settings, route))

    ends: list[tuple[_Reach, str]] = [(reach_source, route.source)]
    if is_collection(route.destination):
        ends.append((reach_collection, route.destination))
        if route.report_to is not None:
            ends.append((reach_destination, route.report_to))
    elif route.destination != REPLY:
        ends.append((reach_destination, route.destination))
    return ends


def _import_for(route: RouteSettings) -> None:
    from pipeline.indexing.sinks.registry import is_collection, open_collection
    from pipeline.transports.registry import REPLY, reaching

    reaching(route.source)
    if is_collection(route.destination):
        with contextlib.suppress(ValueError):  # said when it is reached
            open_collection(route.destination)
        if route.report_to is not None:
            reaching(route.report_to)
    elif route.destination != REPLY:
        reaching(route.destination)


async def _reach(route: RouteSettings, reach: _Reach, url: str, findings: Findings) -> None:
    try:
        async with asyncio.timeout(REACH_S):
            notes = await reach(url)
    except TimeoutError:
        findings.problem(
            f"route {route.name}: {redact(url)} did not answer within {REACH_S:g} s: check that it "
            "runs, and the address"
        )
    except (ConnectionError, ValueError) as error:
        findings.problem(f"route {route.name}: {error}")
    else:
        for note in notes:
            findings.note(f"route {route.name}: {note}")
        return
    findings.reached[route.name] = False


async def _load(settings: Settings, name: str, findings: Findings, verify: bool) -> None:
    """Load one model and let it go, so that the pool need not fit into memory at once here."""
    from pipeline.model_pool import load_models

    alone = msgspec.structs.replace(settings, models={name: settings.models[name]}, routes=())
    try:
        loaded = await load_models(alone)
    except OperatorError as error:
        findings.problem(str(error))
        return
    findings.models[name] = loaded.infos[name]
    if verify:
        from gpu.verify import second_opinion

        opinion = await asyncio.to_thread(second_opinion, loaded.runners[name])
        findings.note(f"model {name}: {opinion.told()}")
        if opinion.worst is not None and not opinion.agrees:
            findings.problem(
                f"model {name}: its vectors are not its library's; do not serve it, and report the folder"
            )
    loaded.close()


def _plain(info: ModelInfo) -> dict[str, Any]:
    """Sets in one order, so that two runs print the same."""
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(info).items()}


def _print_plan(settings: Settings, findings: Findings, verbose: bool) -> None:
    """What would run; settings that somebody chose, or all of them."""
    from rich.padding import Padding
    from rich.text import Text

    from pipeline.transports.registry import REPLY

    out = out_console()

    def below(text: str) -> None:
        out.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 2), expand=False))

    for name in settings.models:
        info = findings.models.get(name)
        out.print(Text.assemble("model ", (name, "bold")))
        if info is not None:
            below(_model_plan(info, verbose))
        else:
            below("does not load" if findings.loads_models else "not loaded")
    for route in settings.routes:
        out.print(Text.assemble("route ", (route.name, "bold"), f" ({route.lane})"))
        state = "" if findings.reached.get(route.name) else "  (not reached)"
        below(f"from {redact(route.source)}{state}")
        to = "reply_to of the request" if route.destination == REPLY else redact(route.destination)
        below(f"to {to}")
        if route.report_to is not None:
            below(f"told to {redact(route.report_to)}")
        for model, tasks in _models_of(settings, findings, route).items():
            below(f"{', '.join(tasks)}: {model}")
    out.print("settings" if verbose else "settings that differ from the defaults (all: -v)")
    _print_settings(settings, verbose=verbose, indent="  ")
    n = len(findings.problems)
    verdict = ("serve would start", "bold green") if not n else (_n_problems(n), "bold red")
    out.print(Text(*verdict))


def _n_problems(n: int) -> str:
    return f"serve would not start: {n} problem{'s' if n > 1 else ''}, see above"


def _print_json(settings: Settings | None, findings: Findings) -> None:
    """Findings, plan and every setting as one object; its fields are listed in docs/operations.md."""
    report: dict[str, Any] = {
        "ok": not findings.problems,
        "problems": findings.problems,
        "notes": findings.notes,
    }
    if settings is not None:
        from pipeline.settings.load import explain

        report["models"] = {
            name: _plain(findings.models[name]) if name in findings.models else None
            for name in settings.models
        }
        report["routes"] = [
            {
                "name": route.name,
                "lane": route.lane,
                "source": redact(route.source),
                "destination": redact(route.destination),
                "reached": findings.reached.get(route.name, False),
                "models": _models_of(settings, findings, route),
            }
            for route in settings.routes
        ]
        report["settings"] = {
            row.name: {"value": row.value, "origin": str(row.origin)} for row in explain(settings)
        }
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    sys.stdout.write(text.decode() + "\n")


def _model_plan(info: ModelInfo, verbose: bool) -> str:
    lines = [
        f"{info.architecture}, {', '.join(sorted(info.tasks))}; {info.dtype} on {info.device}; "
        f"fingerprint {info.fingerprint}",
        f"{'packed' if info.packed else 'padded by length'}; attention {info.attention}; "
        f"linears {info.linears}; layers {info.implementation}; pooling {info.pooling or 'none'}"
        + (f"; {info.dimensions} dimensions" if info.dimensions else ""),
        f"max_tokens {info.max_tokens}; max_batch_tokens {info.max_batch_tokens}",
    ]
    if info.outputs:
        others = ", ".join(sorted(info.outputs - set(info.default_outputs)))
        lines.append(
            f"outputs {', '.join(info.default_outputs)}"
            + (f"; on request {others}" if others else "")
        )
    if info.modalities != ("text",):
        lines.append(f"an item may be: {', '.join(info.modalities)}")
    if info.allowed_dimensions is not None:
        lines.append(f"dimensions on request {_sizes(info.allowed_dimensions)}")
    if verbose:
        lines += [f"honoured {line}" for line in _by_file(info.honoured)]
    return "\n".join(lines + [f"note: {note}" for note in info.notes])


def _by_file(honoured: Sequence[str]) -> list[str]:
    """One line for each file of the model folder: its keys that were obeyed."""
    files: dict[str, list[str]] = {}
    for entry in honoured:
        file, _, key = entry.partition(": ")
        files.setdefault(file, []).append(key)
    return [f"{file}: {', '.join(keys)}" for file, keys in files.items()]


def _sizes(allowed: tuple[int, ...]) -> str:
    whole = len(allowed) > 2 and allowed == tuple(range(allowed[0], allowed[-1] + 1))
    return f"{allowed[0]} to {allowed[-1]}" if whole else ", ".join(map(str, allowed))


def _models_of(
    settings: Settings, findings: Findings, route: RouteSettings
) -> dict[str, list[str]]:
    """Model -> tasks, as the service would choose: route, default_for, else the first that can."""
    chosen: dict[str, list[str]] = {}
    for task in TASKS:
        name = settings.model_for(route, task)
        if name is None:
            able = [n for n, info in findings.models.items() if task in info.tasks]
            name = able[0] if able else None
        if name is not None:
            chosen.setdefault(name, []).append(task)
    return chosen


def print_config(config: Path | None, pairs: Sequence[str]) -> int:
    """Every effective setting; 0, or 2 when they are refused."""
    _print_settings(load_settings(config, pairs), verbose=True)
    return ExitStatus.OK


def _print_settings(settings: Settings, *, verbose: bool, indent: str = "") -> None:
    from pipeline.settings.load import explain
    from pipeline.settings.records import DEFAULT_ORIGIN

    rows = [row for row in explain(settings) if verbose or row.origin != DEFAULT_ORIGIN]
    left = [f"{indent}{row.name} = {row.value}" for row in rows]
    width = min(max(map(len, left), default=0), 60)
    out = out_console()
    for text, row in zip(left, rows, strict=True):
        out.out(f"{text:<{width}}  # {row.origin}", highlight=False)

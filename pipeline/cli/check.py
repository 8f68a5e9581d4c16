"""`check` and `config`: what `serve` would do, before it does it.

Who calls it: `pipeline.cli.commands`.
What must stay true: nothing is created and no group joined; every problem is reported, not only the
first; secrets are masked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.cli.console import (
    configure_one_off_logging,
    load_settings,
    note_error,
    out_console,
    run_async,
    working,
)
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.redact import redact
from schemas.requests import TASKS

if TYPE_CHECKING:
    from gpu.batch import ModelInfo
    from pipeline.settings.load import Settings

REACH_TIMEOUT_S = 8.0


@dataclass(slots=True)
class Findings:
    """What was found: problems stop `serve`, notices do not."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    reached: dict[str, bool] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)


def check(config: Path | None, pairs: Sequence[str], *, verify: bool = False) -> int:
    """Print the plan; 0 when `serve` would start, else 1.

    verify: ask each model's own library for a second opinion; one that differs is a problem.
    """
    configure_one_off_logging()
    try:
        settings = load_settings(config, pairs)
    except OperatorError as error:
        note_error(str(error))
        return ExitStatus.ERROR
    findings = run_async(_find(settings, verify))
    _print_plan(settings, findings)
    for notice in findings.notices:
        note_error(f"note: {notice}")
    for problem in findings.problems:
        note_error(problem)
    return ExitStatus.ERROR if findings.problems else ExitStatus.OK


async def _find(settings: Settings, verify: bool) -> Findings:
    findings = Findings()
    if not settings.routes:
        findings.problems.append(
            "there is no route: add [[routes]] to the settings file, or pass --source to serve"
        )
    with working("reaching brokers"):
        await _reach_all(settings, findings)
    for name in settings.models:
        with working(f"loading model {name}"):
            await _load(settings, name, findings, verify)
    return findings


async def _reach_all(settings: Settings, findings: Findings) -> None:
    from pipeline.indexing.sinks.registry import is_collection, reach_collection
    from pipeline.transports.registry import REPLY, reach, reach_destination

    for route in settings.routes:
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                notices = await reach(route.source)
                if is_collection(route.destination):
                    notices += await reach_collection(route.destination)
                elif route.destination != REPLY:
                    notices += await reach_destination(route.destination)
        except TimeoutError:
            findings.problems.append(
                f"route {route.name}: {redact(route.source)} did not answer within "
                f"{REACH_TIMEOUT_S:g} s: check that the broker runs, and the address"
            )
        except (ConnectionError, ValueError) as error:
            findings.problems.append(f"route {route.name}: {error}")
        else:
            findings.reached[route.name] = True
            findings.notices.extend(f"route {route.name}: {notice}" for notice in notices)


async def _load(settings: Settings, name: str, findings: Findings, verify: bool) -> None:
    """Load one model and let it go, so that the pool need not fit into memory at once here."""
    from pipeline.model_pool import load_models

    alone = msgspec.structs.replace(settings, models={name: settings.models[name]}, routes=())
    try:
        loaded = await load_models(alone)
    except OperatorError as error:
        findings.problems.append(str(error))
        return
    findings.models[name] = loaded.infos[name]
    if verify:
        from gpu.verify import second_opinion

        opinion = await asyncio.to_thread(second_opinion, loaded.runners[name])
        findings.notices.append(f"model {name}: {opinion.told()}")
        if opinion.worst is not None and not opinion.agrees:
            findings.problems.append(
                f"model {name}: its vectors are not its library's; do not serve it, and report the folder"
            )
    loaded.close()


def _print_plan(settings: Settings, findings: Findings) -> None:
    from rich.table import Table
    from rich.text import Text

    from pipeline.transports.registry import REPLY

    out = out_console()
    if settings.models:
        table = Table("model", "plan", box=None, pad_edge=False, title_justify="left")
        for name in settings.models:
            info = findings.models.get(name)
            table.add_row(Text(name), Text(_model_plan(info) if info else "does not load"))
        out.print(table)
    if settings.routes:
        out.print()
        table = Table("route", "source", "lane", "models", "to", box=None, pad_edge=False)
        for route in settings.routes:
            state = "" if findings.reached.get(route.name) else "  (not reached)"
            table.add_row(
                Text(route.name),
                Text(redact(route.source) + state, overflow="fold"),
                route.lane,
                Text(_models_of(settings, findings, route.name)),
                "reply_to of the request"
                if route.destination == REPLY
                else redact(route.destination),
            )
        out.print(table)
    out.print()
    _print_settings(settings)


def _model_plan(info: ModelInfo) -> str:
    lines = [
        f"{info.architecture}, {', '.join(sorted(info.tasks))}; {info.dtype} on {info.device}; "
        f"fingerprint {info.fingerprint}",
        f"{'packed' if info.packed else 'padded by length'}; attention {info.attention}; "
        f"linears {info.linears}; pooling {info.pooling or 'none'}"
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


def _models_of(settings: Settings, findings: Findings, route_name: str) -> str:
    """Task -> model as the service would choose: route, default_for, else the first that can."""
    route = next(r for r in settings.routes if r.name == route_name)
    chosen: dict[str, list[str]] = {}
    for task in TASKS:
        name = settings.model_for(route, task)
        if name is None:
            able = [n for n, info in findings.models.items() if task in info.tasks]
            name = able[0] if able else None
        if name is not None:
            chosen.setdefault(name, []).append(task)
    return "\n".join(f"{', '.join(tasks)}: {name}" for name, tasks in chosen.items()) or "none"


def print_config(config: Path | None, pairs: Sequence[str]) -> int:
    """Every effective setting; 0, or 2 when they are refused."""
    _print_settings(load_settings(config, pairs))
    return ExitStatus.OK


def _print_settings(settings: Settings) -> None:
    from pipeline.settings.load import explain

    rows = explain(settings)
    left = [f"{row.name} = {row.value}" for row in rows]
    width = min(max(map(len, left), default=0), 60)
    out = out_console()
    for text, row in zip(left, rows, strict=True):
        out.out(f"{text:<{width}}  # {row.origin}", highlight=False)

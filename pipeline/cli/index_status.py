"""`index status`: what a collection holds, and how far it is behind what fills it.

Who calls it: `pipeline.cli.collections`.
What must stay true: reading only. Lag counts records that are not settled, which means not stored: never
what the ledger has seen, because a later record of another document may be stored before an earlier one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.console import configure_one_off_logging, load_settings, out_console, run_async
from pipeline.cli.index import reading, shown
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.transports.backlog import Backlog

if TYPE_CHECKING:
    from pipeline.indexing.sinks.base import CollectionStatus


@dataclass(frozen=True, slots=True)
class StatusCommand:
    """The arguments of `index status`. sources: what fills it; none: the routes of the settings that do."""

    url: str
    sources: Sequence[str] = ()
    config: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(slots=True)
class Followed:
    """One log as the collection knows it.

    newest: the largest version in the ledger, None when it has none. backlog: what its broker tells, when it
    was asked.
    """

    newest: int | None = None
    backlog: Backlog | None = None


@dataclass(slots=True)
class Lags:
    """By log, as in ``topic/partition``; and why a broker told nothing."""

    logs: dict[str, Followed] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


def status(command: StatusCommand) -> int:
    """Print it; the exit status is 1 when a source that was to be asked did not answer."""
    configure_one_off_logging()
    return run_async(_status(command, _sources(command)))


def _sources(command: StatusCommand) -> Sequence[str]:
    if command.sources or command.config is None:
        return command.sources
    settings = load_settings(command.config, command.overrides, {})
    found = [route.source for route in settings.routes if route.destination == command.url]
    if not found:
        known = ", ".join(sorted({shown(route.destination) for route in settings.routes}))
        raise OperatorError(
            f"no route of {command.config} writes into {shown(command.url)}; there are: {known}",
            exit_status=ExitStatus.USAGE,
        )
    return found


async def _status(command: StatusCommand, sources: Sequence[str]) -> int:
    lags = Lags()
    async with reading(command.url) as collection:
        told = await collection.status()
        if sources:
            async for entry in collection.entries():
                log = lags.logs.setdefault(entry.version.source, Followed())
                log.newest = max(entry.version.number, log.newest or 0)
    await _ask(sources, lags)
    _show(told)
    if sources:
        _show_lags(lags)
    return ExitStatus.ERROR if lags.silent else ExitStatus.OK


async def _ask(sources: Sequence[str], lags: Lags) -> None:
    from pipeline.transports.registry import read_backlog

    for url in sources:
        try:
            found = await read_backlog(url)
        except (ConnectionError, ValueError) as error:
            lags.silent.append(f"{shown(url)}: {error}")
            continue
        for backlog in found:
            lags.logs.setdefault(backlog.source, Followed()).backlog = backlog


def _show(told: CollectionStatus) -> None:
    from rich.table import Table

    identity, changed = told.identity, told.changed_at_ms
    when = "never"
    if changed is not None:
        at = datetime.fromtimestamp(changed / 1000, UTC).isoformat(timespec="seconds")
        when = f"{at}, {age(time.time() - changed / 1000)} ago"
    table = Table(show_header=False)
    for name, value in (
        ("documents", str(told.n_documents)),
        ("chunks", str(told.n_chunks)),
        ("last change", when),
        ("model", identity.model),
        ("fingerprint", identity.fingerprint),
        ("vectors", f"{identity.kind}, compared by {identity.metric}"),
        ("dimensions", str(identity.dimensions)),
        ("prompt", repr(identity.prompt) if identity.prompt else "none"),
        ("chunks are cut", identity.chunking),
    ):
        table.add_row(name, value)
    out_console().print(table)


def _show_lags(lags: Lags) -> None:
    from rich.table import Table

    table = Table("log", "newest stored", "settled to", "end", "lag")
    for name, log in sorted(lags.logs.items()):
        backlog = log.backlog
        cells = ["not asked"] * 3
        if backlog is not None:
            settled = "nothing" if backlog.settled is None else str(backlog.settled)
            cells = [settled, str(backlog.end), str(backlog.lag)]
        newest = "nothing" if log.newest is None else str(log.newest)
        table.add_row(name or "(a field of the document)", newest, *cells)
    console = out_console()
    console.print(table)
    asked = [log.backlog for log in lags.logs.values() if log.backlog is not None]
    if asked:
        n = sum(backlog.lag for backlog in asked)
        console.print(f"{n} records are not stored yet" if n else "everything is stored")
    for line in lags.silent:
        console.print(f"not told: {line}", markup=False)


def age(seconds: float) -> str:
    """A time span in its two largest units."""
    rest = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        n, rest = divmod(rest, length)
        if n or (unit == "s" and not parts):
            parts.append(f"{n} {unit}")
    return " ".join(parts[:2])

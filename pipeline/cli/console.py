"""What every command shares: settings from flags, one-line errors, progress on stderr.

Who calls it: the rooms `pipeline.cli_*`.
What must stay true: results go to stdout, everything else to stderr; no colour and no progress when
stderr is no terminal; imports stay light (no torch, no broker client).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.cli import interrupts
from pipeline.lifecycle import ExitStatus, OperatorError

if TYPE_CHECKING:
    from rich.console import Console

    from gpu.settings import ModelSettings
    from pipeline.demo.fetch import Progress
    from pipeline.settings.load import Settings

T = TypeVar("T")


class State:
    """Set once by `pipeline.cli.commands.main`."""

    debug = False


def say(line: str) -> None:
    """One line for the person at the terminal."""
    sys.stderr.write(line + "\n")


def note_error(message: str) -> None:
    """The one form in which commands report failure, one line per problem."""
    from pipeline.redact import redact

    for line in message.splitlines() or [""]:
        say(f"embedstream: {redact(line)}")


def report_failure(error: Exception) -> int:
    """One line for an error that nobody expected, or that typer raised; the exit status."""
    format_message = getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help, whole
        say(str(error.format_message()))  # type: ignore[attr-defined]
        return ExitStatus.USAGE
    if callable(format_message):  # click's own errors, wherever typer keeps them
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "embedstream")
        note_error(f"{str(format_message()).rstrip('.')}; see `{command} --help`")
        return ExitStatus.USAGE
    if type(error).__name__ == "Abort":
        note_error("interrupted")
        return ExitStatus.FORCED_INT
    if type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", 0))
    if State.debug:
        print_traceback(error)
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    note_error(f"{type(error).__name__}: {first_line}; run it again with --debug for the traceback")
    return ExitStatus.ERROR


def print_traceback(error: BaseException) -> None:
    """For --debug."""
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def usage_error(message: str) -> OperatorError:
    """A wrong argument; exit status 2."""
    return OperatorError(message, exit_status=ExitStatus.USAGE)


def parse_overrides(pairs: Sequence[str]) -> dict[str, str]:
    """`--set table.key=value`, in order; later ones win."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise usage_error(f"--set {pair!r} is no assignment: write --set batching.linger_ms=2")
        overrides[key.strip()] = value
    return overrides


def load_settings(
    config: Path | None,
    pairs: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    default_models: Mapping[str, ModelSettings] | None = None,
) -> Settings:
    """Settings of a command: file, environment, flags, then --set. Raises `SettingsError`.

    default_models: the pool when no source names a model.
    """
    import os

    from pipeline.settings.load import load

    overrides: dict[str, Any] = {k: v for k, v in (flags or {}).items() if v is not None}
    overrides.update(parse_overrides(pairs))
    return load(overrides, os.environ, config, default_models=default_models)


def configure_one_off_logging(level: Literal["warning", "error"] = "warning") -> None:
    """One-off commands are quiet: what is at `level` and above, unless --debug."""
    import logging

    from pipeline.observe.logs import configure_logging

    # What a library logs about a failure, our one line says with the remedy.
    foreign = logging.WARNING if State.debug else logging.CRITICAL
    configure_logging("debug" if State.debug else level, "console", foreign_level=foreign)


class _Threads(ThreadPoolExecutor):
    """Of `asyncio.to_thread`. What is awaited has ended; a cancelled job (an import of torch, a
    download) is left to the exit instead of being waited for."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end; Ctrl-C or SIGTERM cancels it, raised as KeyboardInterrupt."""

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.set_default_executor(_Threads())
        with interrupts.cancels(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await work

    try:
        return asyncio.run(cancellable(), debug=False)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def console() -> Console:
    """Rich on stderr; plain text when stderr is no terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def out_console() -> Console:
    """Rich on stdout, for tables. Wide enough not to cut columns when stdout is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    return Console(highlight=False, width=width, soft_wrap=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner while something takes its time."""
    if not sys.stderr.isatty():
        yield
        return
    with console().status(what):
        yield


@contextmanager
def byte_progress() -> Iterator[Progress]:
    """A bar for downloads and conversions, as `pipeline.demo.fetch` reports them."""
    if not sys.stderr.isatty():
        told: set[str] = set()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in told:
                told.add(stage)
                say(stage)

        yield tell
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total or None)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield show


class ItemProgress:
    """A bar over requests, of a known or unknown number.

    Args:
        shown: False where results go to the same terminal line by line, which a bar would garble.
    """

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        self._what = what
        self._total = total
        self._shown = shown
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> ItemProgress:
        if self._shown and sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._progress = Progress(
                TextColumn(self._what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=console(), transient=True,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=self._total)
        return self

    def advance(self, n: int = 1) -> None:
        """`n` more are done."""
        if self._progress is not None:
            self._progress.advance(self._task, n)

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

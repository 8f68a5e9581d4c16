"""`serve`, `up` and `demo`: the commands that run a whole service.

Who calls it: `pipeline.cli.commands`.
What must stay true: logging is configured before anything logs; signals are watched from the first
moment of the loop; a forced stop leaves the process at once, whatever threads still do.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.console import (
    State,
    configure_one_off_logging,
    load_settings,
    run_async,
    usage_error,
)
from pipeline.lifecycle import ExitStatus, StopSignal, beside, watch_signals

if TYPE_CHECKING:
    from pipeline.app import App
    from pipeline.settings.load import Settings

_FORCED = (ExitStatus.FORCED_INT, ExitStatus.FORCED_TERM)


def serve(
    config: Path | None,
    pairs: Sequence[str],
    sources: Sequence[str],
    models: Sequence[str],
    flags: dict[str, Any],
    member: str | None = None,
) -> int:
    """Run the service until a signal; the exit status.

    member: this is one of several processes; what `pipeline.processes.parent` said to it.
    """
    if member is not None:
        return _serve_as_member(member)
    flags = {**flags, **_routes(sources), **_models(models)}
    settings = load_settings(config, pairs, flags)
    if not settings.routes:
        raise usage_error(
            "there is no route to serve: add [[routes]] to the file of --config, or pass "
            "--source redis://localhost:6379/embedstream.requests"
        )
    _configure_logging(settings)
    several = settings.executor.processes > 1
    status = run_async(_serve_with_others(settings) if several else _serve(settings))
    leave_if_forced(status)
    return status


def _serve_as_member(text: str) -> int:
    from pipeline.processes.member import join

    member, settings, listener = join(text)
    _configure_logging(settings, member.number)
    status = run_async(_serve(settings, listener))
    leave_if_forced(status)
    return status


def _configure_logging(settings: Settings, process: int | None = None) -> None:
    from pipeline.observe.logs import configure_logging

    level = "debug" if State.debug else settings.log.level
    configure_logging(level, settings.log.format, process=process)


def leave_if_forced(status: int) -> None:
    """After a second signal: end the process without waiting for threads that sit in native code."""
    if status in _FORCED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _serve_with_others(settings: Settings) -> ExitStatus:
    import structlog

    from pipeline.processes.parent import Parent, again
    from pipeline.settings.load import redacted

    log = structlog.get_logger(__name__)
    stop = StopSignal(settings.lifecycle.drain_budget_s)

    def on_action(action: str, signum: int) -> None:
        log.info("signal", action=action, signum=signum)

    with watch_signals(stop, on_action=on_action):
        log.info("starting", settings=redacted(settings))
        command = [*again(), "--debug"] if State.debug else again()
        return await Parent(settings, command).run(stop)


async def _serve(settings: Settings, listener: socket.socket | None = None) -> ExitStatus:
    import structlog

    from pipeline.app import App
    from pipeline.observe.metrics import PrometheusMetrics
    from pipeline.settings.load import redacted

    log = structlog.get_logger(__name__)
    stop = StopSignal(settings.lifecycle.drain_budget_s)

    def on_action(action: str, signum: int) -> None:
        log.info("signal", action=action, signum=signum)

    with watch_signals(stop, on_action=on_action):
        if listener is None:  # else the parent has said it
            log.info("starting", settings=redacted(settings))
        app = App(
            settings, metrics=PrometheusMetrics(), serve_health=True, health_listener=listener
        )
        async with beside(_hear_libraries_once_ready(app)):
            return await app.run(stop)


async def _hear_libraries_once_ready(app: App) -> None:
    """Until the service stands, what a library logs about a failure is said by our one line."""
    root = logging.getLogger()
    level = root.level
    if level > logging.DEBUG and not State.debug:
        root.setLevel(logging.CRITICAL)
    await app.ready.wait()
    root.setLevel(level)


def _routes(sources: Sequence[str]) -> dict[str, str]:
    """--source URL becomes a route named after its transport: redis, redis-2, kafka."""
    flags: dict[str, str] = {}
    for source in sources:
        first = name = _route_name(source)
        number = 1
        while f"routes.{name}.source" in flags:
            number += 1
            name = f"{first}-{number}"
        flags[f"routes.{name}.source"] = source
    return flags


def _route_name(source: str) -> str:
    from pipeline.transports.registry import kind_of

    if source == "-":
        return "stdin"
    try:
        return kind_of(source).name
    except ValueError:
        return "route"  # settings refuse it, with all else that is wrong


def _models(models: Sequence[str]) -> dict[str, str]:
    """--model NAME|DIR becomes a model named after the last part of its path."""
    flags: dict[str, str] = {}
    for model in models:
        name = Path(model).name or model
        # a dot would nest; the name is what requests say
        key = f"models.{name.replace('.', '-')}.path"
        if key in flags:
            raise usage_error(
                f"two models are called {name}: name them in the file of --config instead"
            )
        flags[key] = model
    return flags


def up(
    config: Path | None,
    pairs: Sequence[str],
    ports: dict[str, int],
    kafka_home: Path | None,
    ready_file: Path | None,
    stop_with_parent: bool,
) -> int:
    """Brokers and service on this machine until a signal; the exit status."""
    for name, port in ports.items():
        if not 0 <= port <= 65_535:
            raise usage_error(f"--{name.replace('_', '-')} {port} is no port: give 0 to 65535")
    from pipeline.demo.catalog import demo_models

    settings = load_settings(config, pairs, default_models=demo_models())
    if settings.executor.processes > 1:
        raise usage_error(
            f"executor.processes is {settings.executor.processes}, and up is one process: set it to 1, "
            "or run `embedstream serve`"
        )
    configure_one_off_logging()
    from pipeline.local.up import UpOptions, run_up
    from pipeline.observe.metrics import PrometheusMetrics

    options = UpOptions(
        **ports,
        kafka_home=kafka_home,
        ready_file=ready_file,
        stop_with_parent=stop_with_parent,
    )
    status = run_async(run_up(options, settings=settings, metrics=PrometheusMetrics()))
    leave_if_forced(status)
    return status


def demo(documents: int, in_process: bool, no_prompt: bool) -> int:
    """The demo; the exit status."""
    configure_one_off_logging()
    from pipeline.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        documents=documents,
        in_process=in_process,
        prompt=False if no_prompt else None,
        has_kafka=bool(os.environ.get("KAFKA_HOME")),
    )
    return run_async(run_demo(options))

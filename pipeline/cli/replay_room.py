"""`embedstream replay`: a part of a topic through a route of the settings file once more.

Who calls it: `pipeline.cli.replay`.
What must stay true: it runs the same service as `serve`, with that one route; whatever ends it, every
partition is told with the command that goes on from there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.ports import NoMetrics, SystemClock
from pipeline.cli import interrupts
from pipeline.cli.console import (
    ItemProgress,
    configure_one_off_logging,
    load_settings,
    run_async,
    say,
    usage_error,
)
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal
from pipeline.transports.span import Replaying, Span, Stretch, read_point

if TYPE_CHECKING:
    from pipeline.settings.load import RouteSettings, Settings
    from pipeline.transports.options import Options

_STOP_S = 0.5
"""For what is being computed when a signal comes: after `interrupts.GRACE_S` the process is gone."""
_TELL_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """The arguments of `replay`."""

    topic: str
    begin: str
    end: str
    partitions: tuple[int, ...]
    route: str | None
    config: Path | None
    overrides: Sequence[str]


def replay(command: ReplayCommand) -> int:
    """The exit status: 0 when every record has its outcome."""
    try:
        begin, end = read_point(command.begin), read_point(command.end)
    except ValueError as error:
        raise usage_error(str(error)) from None
    span = Span(command.topic, begin, end, tuple(dict.fromkeys(command.partitions)))
    if problem := span.problem():
        raise usage_error(problem)
    configure_one_off_logging()
    settings = load_settings(command.config, command.overrides)
    route = _route_of(settings, command)
    options = _options(settings, route, span)
    # Nothing is committed, so that there is nothing for a transaction to hold together.
    alone = msgspec.structs.replace(route, delivery="at_least_once")
    settings = msgspec.structs.replace(
        settings, routes=(alone,), health=msgspec.structs.replace(settings.health, port=0)
    )
    return run_async(_replay(settings, options, span))


def _route_of(settings: Settings, command: ReplayCommand) -> RouteSettings:
    """The one that was named, else the one that reads the topic."""
    from pipeline.transports.registry import kind_of, parse_url

    able = [route for route in settings.routes if kind_of(route.source).replays]
    if command.route is not None:
        found = [route for route in able if route.name == command.route]
    else:
        found = [r for r in able if _reads(parse_url(r.source), command.topic)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(route.name for route in found or able) or "none"
    if found:
        raise usage_error(f"several routes read {command.topic}: name one of {names} with --route")
    what = f"is called {command.route}" if command.route else f"reads {command.topic}"
    raise usage_error(f"no Kafka route {what}: name one with --route, there are: {names}")


def _reads(options: Options, topic: str) -> bool:
    there = options.place_at(topic)
    return any(place.same(there) for place in options.consumes())


def _options(settings: Settings, route: RouteSettings, span: Span) -> Options:
    """Of the route, which takes no answer for a request."""
    from pipeline.settings.load import route_options

    options = route_options(settings, route)
    there = options.place_at(span.topic)
    written = [place for place in options.writes() if place.same(there)]
    if written:
        raise usage_error(
            f"{span.topic} is the {written[0].option} of route {route.name}: answers would become requests"
        )
    return options.refusing([there])


class _Outcomes(NoMetrics):
    """Counts what the last line tells."""

    def __init__(self, progress: ItemProgress) -> None:
        self.found: Counter[str] = Counter()
        self.letters = 0
        self._progress = progress

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Requests by outcome, and dead letters."""
        if name == "requests_total":
            self.found[labels["outcome"]] += int(value)
            self._progress.advance(int(value))
        elif name == "dead_letters_total":
            self.letters += int(value)


async def _replay(settings: Settings, options: Options, span: Span) -> int:
    from pipeline.app import App
    from pipeline.indexing.sinks.registry import is_collection
    from pipeline.transports.registry import REPLY, open_transport

    (route,) = settings.routes
    clock = SystemClock()
    with ItemProgress("records") as progress:
        outcomes = _Outcomes(progress)
        try:
            transport = await open_transport(
                options,
                destination=REPLY if is_collection(route.destination) else route.destination,
                replay=span,
                clock=clock,
                metrics=outcomes,
            )
        except (ConnectionError, ValueError) as error:
            raise OperatorError(f"route {route.name}: {error}") from error
        source = transport.source
        assert isinstance(source, Replaying)
        app = App(settings, metrics=outcomes, clock=clock, transports={route.name: transport})
        told = False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                _tell(source.stretches(), outcomes, route.name)

        stop, loop = StopSignal(_STOP_S), asyncio.get_running_loop()

        def on_signal() -> None:
            loop.call_soon_threadsafe(stop.request, "signal")
            # A broker that is gone holds up the end until the process is put an end to.
            loop.call_soon_threadsafe(loop.call_later, _TELL_AFTER_S, tell)

        try:
            with interrupts.cancels(on_signal):
                status = await app.run(stop)
        finally:
            await transport.source.aclose()
            await transport.sink.aclose()
            tell()
    if stop.reason == "signal":
        raise KeyboardInterrupt
    done = all(stretch.is_done for stretch in source.stretches())
    return status if status is not ExitStatus.OK else ExitStatus.OK if done else ExitStatus.ERROR


def _tell(stretches: Sequence[Stretch], outcomes: _Outcomes, route: str) -> None:
    for one in stretches:
        line = f"{one.topic}-{one.partition}: {one.n_settled} records of offsets {one.begin} to {one.end}"
        if one.n_gone:
            line += f"; {one.n_gone} offsets before them are gone from the log"
        if not one.is_done:
            line += (
                f"; not done, go on with --topic {one.topic} --partition {one.partition} "
                f"--from {one.next} --to {one.end} --route {route}"
            )
        say(line)
    found = ", ".join(f"{n} {name}" for name, n in sorted(outcomes.found.items())) or "nothing"
    letters = f"; dead letters: {outcomes.letters}" if outcomes.letters else ""
    say(f"{sum(one.n_settled for one in stretches)} records with an outcome: {found}{letters}")

"""Contradictions between settings that are each fine alone.

Who calls it: `pipeline.settings.load.load`, after every value has its type and range.
What must stay true: pure; a contradiction names both settings and both remedies; nothing here
touches a disk, a network or a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.redact import redact
from pipeline.settings.records import RouteSettings, Settings
from pipeline.settings.sources import Problem
from pipeline.transports.options import FileOptions, KafkaOptions, RedisOptions
from pipeline.transports.urls import parse_url
from schemas.requests import LANES, TASKS


def contradictions(settings: Settings) -> list[Problem]:
    """Every contradiction, in the order of the settings."""
    options = list(_options_of_routes(settings))
    found = [problem for _, problem in options if isinstance(problem, Problem)]
    found += _model_problems(settings)
    found += _route_problems(settings)
    parsed = [(i, o) for i, o in options if not isinstance(o, Problem)]
    found += _source_problems(settings, parsed)
    found += _budget_problems(settings)
    return [
        Problem(p.setting, p.message, p.remedy, p.origin or settings.origins.get(p.setting))
        for p in found
    ]


def _options_of_routes(settings: Settings) -> Iterator[tuple[int, Any]]:
    for i, route in enumerate(settings.routes):
        try:
            yield i, parse_url(route.source)
        except ValueError as error:
            yield (
                i,
                Problem(
                    f"routes.{i}.source",
                    redact(str(error)),
                    "correct the address; docs/settings.md lists the forms",
                ),
            )


def _model_problems(settings: Settings) -> Iterator[Problem]:
    for task in TASKS:
        defaults = [name for name, model in settings.models.items() if task in model.default_for]
        if len(defaults) > 1:
            first, second = defaults[:2]
            yield Problem(
                f"models.{second}.default_for",
                f"names {task!r}, and so does models.{first}.default_for",
                "remove it from one of the two",
            )
    for name, model in settings.models.items():
        if isinstance(model.max_tokens, int):
            for lane in LANES:
                budget = settings.admission.lane(lane).max_in_flight_tokens
                if model.max_tokens > budget:
                    yield Problem(
                        f"models.{name}.max_tokens",
                        f"({model.max_tokens}) exceeds admission.{lane}.max_in_flight_tokens "
                        f"({budget}): such an item would never be admitted",
                        "lower the one or raise the other",
                    )


def _route_problems(settings: Settings) -> Iterator[Problem]:
    if settings.routes and not settings.models:
        yield Problem(
            "models",
            "is empty, but there are routes",
            "add [models.NAME] with a path, or pass --model; `embedstream models list` shows packaged ones",
        )
    seen: dict[str, int] = {}
    for i, route in enumerate(settings.routes):
        if route.name in seen:
            yield Problem(
                f"routes.{i}.name",
                f"({route.name}) is also routes.{seen[route.name]}.name",
                "rename one of the two",
            )
        seen.setdefault(route.name, i)
        if route.destination != "reply":
            yield Problem(
                f"routes.{i}.destination",
                f"({redact(route.destination)[:60]}) is not supported by this version",
                'write "reply"; a file source names its output as ?replies=PATH in its address',
            )
        yield from _named_models(settings, i, route)


def _named_models(settings: Settings, i: int, route: RouteSettings) -> Iterator[Problem]:
    for key in ("model", "rerank_model", "classify_model"):
        name = getattr(route, key)
        if settings.models and name is not None and name not in settings.models:
            yield Problem(
                f"routes.{i}.{key}",
                f"({name[:60]}) names no model",
                f"add [models.{name[:60]}], or choose one of {', '.join(sorted(settings.models))}",
            )


def _source_problems(settings: Settings, options: list[tuple[int, Any]]) -> Iterator[Problem]:
    taken: dict[tuple[str, ...], int] = {}
    for i, option in options:
        for place in _places(option):
            if place in taken:
                yield Problem(
                    f"routes.{i}.source",
                    f"reads {place[1]} as the group of routes.{taken[place]}.source: "
                    "each would get a part of the requests",
                    "give one of them another group or topic, or remove one route",
                )
            taken.setdefault(place, i)
    yield from _loops(options)
    budget_s = settings.lifecycle.drain_budget_s
    for i, option in options:
        if isinstance(option, KafkaOptions) and budget_s * 1000 >= option.max_poll_interval_ms:
            yield Problem(
                "lifecycle.drain_budget_s",
                f"({budget_s:g} s) is not below max_poll_interval_ms "
                f"({option.max_poll_interval_ms}) of routes.{i}.source: the broker would give the "
                "partitions away during the drain",
                "lower drain_budget_s or raise max_poll_interval_ms in the address",
            )


def _places(option: Any) -> list[tuple[str, ...]]:
    """What a source consumes, as comparable values."""
    if isinstance(option, KafkaOptions):
        return [(option.bootstrap, f"topic {t}", option.group) for t in option.topics]
    if isinstance(option, RedisOptions):
        return [(f"{option.address}/{option.db}", f"stream {option.stream}", option.group)]
    if isinstance(option, FileOptions):
        return [("file", option.path, "")]
    return [("inproc", option.name, "")]


def _loops(options: list[tuple[int, Any]]) -> Iterator[Problem]:
    """Replies or dead letters of one route that are requests of another."""
    for i, option in options:
        for j, other in options:
            if i == j:
                continue
            if (
                isinstance(option, KafkaOptions)
                and isinstance(other, KafkaOptions)
                and option.bootstrap == other.bootstrap
            ):
                for name in ("reply_topic", "dead_letter_topic"):
                    topic = getattr(option, name)
                    if topic in other.topics:
                        yield Problem(
                            f"routes.{i}.source",
                            f"writes {name}={topic}, which routes.{j}.source reads: answers "
                            "would become requests",
                            f"change {name} of the one or the topic of the other",
                        )
            if (
                isinstance(option, RedisOptions)
                and isinstance(other, RedisOptions)
                and (option.address, option.db) == (other.address, other.db)
                and option.dead_letter_stream == other.stream
            ):
                yield Problem(
                    f"routes.{i}.source",
                    f"writes dead_letter_stream={other.stream}, which routes.{j}.source reads",
                    "change dead_letter_stream of the one or the stream of the other",
                )


def _budget_problems(settings: Settings) -> Iterator[Problem]:
    publish = settings.publish
    if publish.backoff_ms > publish.max_backoff_ms:
        yield Problem(
            "publish.backoff_ms",
            f"({publish.backoff_ms:g}) exceeds publish.max_backoff_ms ({publish.max_backoff_ms:g})",
            "lower the one or raise the other",
        )
    records = [("limits", settings.limits)]
    records += [
        (f"routes.{i}.limits", settings.limits_for(route))
        for i, route in enumerate(settings.routes)
        if route.limits.max_record_bytes is not None
    ]
    for name, limits in records:
        for lane in LANES:
            budget = settings.admission.lane(lane).max_in_flight_bytes
            if limits.max_record_bytes > budget:
                yield Problem(
                    f"{name}.max_record_bytes",
                    f"({limits.max_record_bytes}) exceeds admission.{lane}.max_in_flight_bytes "
                    f"({budget}): such a record would never be admitted",
                    "lower the one or raise the other",
                )

"""Settings: read once, checked before anything starts, printed without secrets.

    defaults < TOML file < environment EMBEDSTREAM_TABLE__KEY < flags and --set table.key=value

Who calls it: the CLI calls `load` once; everything else gets the frozen `Settings` it returns.
What must stay true: no other module reads the environment; `load` reports every problem at once;
a setting that is not understood is refused, never ignored; no print shows a secret.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpu.settings import ModelSettings
from pipeline.redact import MASK, is_secret_name, redact
from pipeline.settings.build import Builder
from pipeline.settings.contradictions import contradictions
from pipeline.settings.records import (
    DEFAULT_ORIGIN,
    AdmissionSettings,
    AttemptsSettings,
    BatchingSettings,
    ExecutorSettings,
    HealthSettings,
    LaneAdmission,
    LifecycleSettings,
    LimitsOverride,
    LogSettings,
    Origin,
    PublishSettings,
    RouteSettings,
    Settings,
)
from pipeline.settings.sources import Problem, SettingsError, read_sources
from pipeline.transports.options import Accepts, Options, Place
from pipeline.transports.registry import kind_of, parse_url

__all__ = [
    "AdmissionSettings",
    "AttemptsSettings",
    "BatchingSettings",
    "Effective",
    "ExecutorSettings",
    "HealthSettings",
    "LaneAdmission",
    "LifecycleSettings",
    "LimitsOverride",
    "LogSettings",
    "ModelSettings",
    "Origin",
    "Problem",
    "PublishSettings",
    "RouteSettings",
    "Settings",
    "SettingsError",
    "explain",
    "load",
    "redacted",
    "route_accepts",
    "route_options",
]


def load(
    argv_overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None,
    *,
    default_models: Mapping[str, ModelSettings] | None = None,
) -> Settings:
    """The effective settings.

    Args:
        argv_overrides: dotted setting name -> text (parsed by the setting's type) or value.
        environ: the process environment; only names with our prefix are read.
        file: TOML file, or None.
        default_models: the pool to use when no source names a model.

    Raises:
        SettingsError: with every problem found, each naming setting, origin and remedy.
    """
    sources = read_sources(argv_overrides, environ, file)
    builder = Builder()
    settings = builder.settings(sources.tree)
    problems = sources.problems + builder.problems
    if settings is None or problems:
        raise SettingsError(problems)
    settings = _with_derived_defaults(settings, default_models or {})
    problems = contradictions(settings)
    if problems:
        raise SettingsError(problems)
    return settings


def _with_derived_defaults(
    settings: Settings, default_models: Mapping[str, ModelSettings]
) -> Settings:
    """Defaults that depend on other settings: the pool of a command that has one, the lane of a source."""
    origins = dict(settings.origins)
    routes = []
    for i, route in enumerate(settings.routes):
        if f"routes.{i}.lane" not in origins:
            # A wrong address is told later, with all other problems.
            with contextlib.suppress(ValueError):
                kind = kind_of(route.source)
                if kind.lane != route.lane:
                    route = msgspec.structs.replace(route, lane=kind.lane)
                    origins[f"routes.{i}.lane"] = Origin("default", f"default for {kind.name}://")
        routes.append(route)
    return msgspec.structs.replace(
        settings,
        models=settings.models or dict(default_models),
        routes=tuple(routes),
        origins=origins,
    )


def route_options(settings: Settings, route: RouteSettings) -> Options:
    """The transport options of a route's address, knowing about the other routes.

    What other routes read on the same broker is no reply destination here: a reply must never
    become a request of another route.
    """
    options = parse_url(route.source)
    ours = options.consumes()
    refused: list[Place] = []
    for other in settings.routes:
        beside = parse_url(other.source)
        theirs = [*beside.consumes(), *(p for p in beside.writes() if p.is_dead_letters)]
        refused += [place for place in theirs if any(place.beside(our) for our in ours)]
    return options.refusing(refused)


def route_accepts(settings: Settings, route: RouteSettings) -> Accepts:
    """What a route's limits let through."""
    limits, i = settings.limits_for(route), settings.routes.index(route)
    named = (f"routes.{i}.limits.max_record_bytes", "limits.max_record_bytes")
    return Accepts(
        limits.max_record_bytes,
        any(name in settings.origins for name in named),
        limits.max_metadata_bytes + limits.max_id_bytes,
    )


class Effective(NamedTuple):
    """One effective setting, fit for printing."""

    name: str
    value: str
    origin: Origin


def explain(settings: Settings) -> list[Effective]:
    """Every effective value, secrets masked, with where it came from."""
    return [
        Effective(name, _printed(name, value), settings.origins.get(name, DEFAULT_ORIGIN))
        for name, value in _leaves(settings, "")
    ]


def redacted(settings: Settings) -> dict[str, Any]:
    """The settings as nested plain values, secrets masked: for logs and `/statistics`."""

    def clean(name: str, value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return {
                field: clean(f"{name}.{field}", getattr(value, field))
                for field in value.__struct_fields__
                if field != "origins"
            }
        if isinstance(value, Mapping):
            return {key: clean(f"{name}.{key}", inner) for key, inner in value.items()}
        if isinstance(value, tuple):
            return [clean(name, inner) for inner in value]
        if isinstance(value, str):
            return MASK if is_secret_name(name) else redact(value)
        return value

    plain: dict[str, Any] = clean("", settings)
    return plain


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    def under(key: str) -> str:
        return f"{name}.{key}" if name else key

    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            if field != "origins":
                yield from _leaves(getattr(value, field), under(field))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, under(str(key)))
    elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        for i, inner in enumerate(value):
            yield from _leaves(inner, under(str(i)))
    else:
        yield name, value


def _printed(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "(not set)"
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value) or "(none)"
    if isinstance(value, str):
        shown = MASK if is_secret_name(name) else redact(value)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)  # one line each
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Looking into a running app: readiness and statistics, as plain values.

Who calls it: `pipeline.app` hands them to the health server; the demo and tests read them.
What must stay true: reading changes nothing and never waits; nothing here passes the queues, so a
busy service never looks like a dead one (bug log G05).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu.batch import ModelInfo
from pipeline.observe.http import HealthViews, Readiness, ReadinessInputs, readiness
from pipeline.observe.metrics import PrometheusMetrics

if TYPE_CHECKING:
    from pipeline.app import App


def health_views(app: App) -> HealthViews:
    """What the HTTP port shows of `app`."""
    metrics = app.metrics
    exposition = metrics.exposition if isinstance(metrics, PrometheusMetrics) else bytes
    return HealthViews(app.readiness, app.statistics, exposition)


def app_readiness(app: App) -> Readiness:
    """The verdict of `/ready`: phase, executor, sources, loop."""
    fatal = app.supervisor.fatal if app.supervisor is not None else None
    inputs = ReadinessInputs(
        phase=app.phase,
        executors={} if app.executor is None else {"executor": app.executor.health()},
        sources={route.name: route.source.status() for route in app.routes},
        loop_lag_s=0.0 if app.housekeeping is None else app.housekeeping.loop_lag_s,
        fatal=None if fatal is None else f"{type(fatal).__name__}: {fatal}",
    )
    return readiness(inputs, app.clock.monotonic(), app.settings.health)


def app_statistics(app: App) -> dict[str, Any]:
    """The answer of `/statistics`."""
    routes = {}
    for route in app.routes:
        status = route.source.status()
        routes[route.name] = {
            "connected": status.connected,
            "detail": status.detail,
            "in_flight": status.in_flight,
            "buffered": status.buffered,
        }
    lag_s = idle_s = 0.0
    if app.housekeeping is not None:
        lag_s, idle_s = app.housekeeping.loop_lag_s, app.housekeeping.idle_with_work_s
    return {
        "phase": app.phase,
        "in_flight": len(app.table) if app.table is not None else 0,
        "routes": routes,
        "queued_tokens": app.coalescer.statistics() if app.coalescer is not None else {},
        "executor": app.dispatcher.statistics() if app.dispatcher is not None else {},
        "loop_lag_s": lag_s,
        "idle_with_work_s": idle_s,
        "restarts": dict(app.supervisor.restarts) if app.supervisor is not None else {},
        "models": {name: _model(info) for name, info in app.models.items()},
    }


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "fingerprint": info.fingerprint,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "tasks": sorted(info.tasks),
        "max_tokens": info.max_tokens,
        "max_batch_tokens": info.max_batch_tokens,
        "dimensions": info.dimensions,
        "allowed_dimensions": info.allowed_dimensions,
        "outputs": sorted(info.outputs),
        "pooling": info.pooling,
        "packed": info.packed,
        "attention": info.attention,
        "linears": info.linears,
        "notes": list(info.notes),
    }

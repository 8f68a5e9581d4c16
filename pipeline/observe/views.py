"""Looking into a running service: what readiness judges and what statistics show, as plain values.

Who calls it: `pipeline.app`, for the health server, the demo and tests.
What must stay true: reading changes nothing and never waits; nothing here passes the queues, so a
busy service never looks like a dead one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.ports import Metrics, SourceStatus
from actors.supervisor import Supervisor
from gpu.batch import ModelInfo
from pipeline.graph import Graph
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.observe.readiness import ReadinessInputs


def exposition_of(metrics: Metrics) -> Callable[[], bytes]:
    """What `/metrics` answers."""
    return metrics.exposition if isinstance(metrics, PrometheusMetrics) else bytes


def readiness_inputs(phase: str, graph: Graph | None, supervisor: Supervisor) -> ReadinessInputs:
    """What the verdict of `/ready` depends on: phase, executor, both ends of every route, loop."""
    fatal = supervisor.fatal
    reason = None if fatal is None else f"{type(fatal).__name__}: {fatal}"
    if graph is None:
        return ReadinessInputs(phase=phase, fatal=reason)
    return ReadinessInputs(
        phase=phase,
        executors={"executor": graph.models.executor.health()},
        sources={route.name: route.source.status() for route in graph.routes},
        destinations={route.name: route.destination.problem() for route in graph.routes},
        loop_lag_s=graph.housekeeping.loop_lag_s,
        fatal=reason,
    )


def statistics(phase: str, graph: Graph | None, supervisor: Supervisor) -> dict[str, Any]:
    """The answer of `/statistics`."""
    shown: dict[str, Any] = {
        "phase": phase,
        "in_flight": 0,
        "routes": {},
        "queued_tokens": {},
        "executor": {},
        "loop_lag_s": 0.0,
        "idle_with_work_s": 0.0,
        "restarts": dict(supervisor.restarts),
        "models": {},
    }
    if graph is None:
        return shown
    return shown | {
        "in_flight": len(graph.table),
        "routes": {route.name: _status(route.source.status()) for route in graph.routes},
        "queued_tokens": graph.coalescer.statistics(),
        "executor": graph.dispatcher.statistics(),
        "loop_lag_s": graph.housekeeping.loop_lag_s,
        "idle_with_work_s": graph.housekeeping.idle_with_work_s,
        "models": {name: _model(info) for name, info in graph.models.infos.items()},
    }


def _status(status: SourceStatus) -> dict[str, Any]:
    return {
        "connected": status.connected,
        "detail": status.detail,
        "in_flight": status.in_flight,
        "buffered": status.buffered,
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
        "implementation": info.implementation,
        "notes": list(info.notes),
    }

"""May requests come, and why not. Pure.

Who calls it: `pipeline.app`, for `/ready`, with what `pipeline.observe.views` read.
What must stay true: busy is not down; every reason is told, not only the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.ports import SourceStatus
from gpu.batch import ExecutorHealth
from pipeline.settings.records import HealthSettings

READY_PHASE = "ready"
"""The one phase in which a service can be ready."""


@dataclass(frozen=True, slots=True)
class ReadinessInputs:
    """What readiness depends on, as plain values.

    phase: what the service is doing: "starting", "loading models", "connecting", "ready",
        "draining", ...
    executors: one entry per device.
    sources: route name -> state of its source.
    destinations: route name -> why its destination cannot be written, or None.
    loop_lag_s: how late the event loop was at the last tick.
    fatal: why the service is about to end, or None.
    """

    phase: str
    executors: Mapping[str, ExecutorHealth] = field(default_factory=dict)
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    destinations: Mapping[str, str | None] = field(default_factory=dict)
    loop_lag_s: float = 0.0
    fatal: str | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests may come, and every reason why not."""

    ready: bool
    phase: str
    reasons: tuple[str, ...] = ()


def readiness(inputs: ReadinessInputs, now: float, settings: HealthSettings) -> Readiness:
    """The verdict of /ready.

    Busy is not down: queue depth plays no part, and a long forward counts only when nothing else
    succeeded meanwhile. Disconnected sources count at once.

    Args:
        now: `time.monotonic()`.
    """
    reasons: list[str] = []
    if inputs.fatal is not None:
        reasons.append(f"fatal: {inputs.fatal}")
    if inputs.phase != READY_PHASE:
        reasons.append(f"phase: {inputs.phase}")
    for name, health in inputs.executors.items():
        reasons.extend(f"executor {name}: {why}" for why in _executor_faults(health, now, settings))
    for route, status in inputs.sources.items():
        if not status.connected:
            detail = f" ({status.detail})" if status.detail else ""
            reasons.append(f"route {route}: source disconnected{detail}")
    for route, problem in inputs.destinations.items():
        if problem is not None:
            reasons.append(f"route {route}: destination: {problem}")
    if inputs.loop_lag_s > settings.max_loop_lag_s:
        reasons.append(f"event loop {inputs.loop_lag_s:.1f} s late")
    return Readiness(ready=not reasons, phase=inputs.phase, reasons=tuple(reasons))


def _executor_faults(health: ExecutorHealth, now: float, settings: HealthSettings) -> list[str]:
    if health.fatal is not None:
        return [health.fatal]
    if not health.alive:
        return ["a thread has ended"]
    faults = []
    if health.consecutive_failures >= settings.max_failed_forwards:
        faults.append(f"{health.consecutive_failures} forwards failed in a row")
    if health.oldest_running_s is not None:
        running_for_s = now - health.oldest_running_s
        since_success_s = now - max(
            health.oldest_running_s, health.last_success_s or health.oldest_running_s
        )
        if min(running_for_s, since_success_s) > settings.stuck_after_s:
            faults.append(f"a forward has been running for {running_for_s:.0f} s")
    return faults

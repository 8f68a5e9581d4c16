"""Metrics: what the service counts, in its own Prometheus registry.

Who calls it: the CLI makes one `PrometheusMetrics` and hands it to `pipeline.app`; actors see it as
`actors.ports.Metrics`; /metrics exposes it.
What must stay true: no metric call ever raises into its caller, and a broken metric is logged once;
the number of series is bounded whatever the label values are; gauges are never negative.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import prometheus_client as prometheus
import structlog

from pipeline.observe.histogram import Histogram
from pipeline.observe.metric_table import BY_NAME, METRICS, PREFIX, MetricSpec

CONTENT_TYPE = prometheus.CONTENT_TYPE_PLAIN_0_0_4
MAX_SERIES_PER_METRIC = 512
"""Label sets one metric may have. More means that a label holds request data: memory would grow with
the traffic. Far above routes x models x codes of a real service."""
OVERFLOW = "other"

log = structlog.get_logger(__name__)


class PrometheusMetrics:
    """`actors.ports.Metrics` on prometheus_client. Thread-safe."""

    def __init__(self, specs: Iterable[MetricSpec] = METRICS) -> None:
        # a second series per series, which nobody reads
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry(auto_describe=True)
        prometheus.ProcessCollector(registry=self.registry)
        self._specs = {spec.name: spec for spec in specs}
        self._metrics: dict[str, Any] = {s.name: _make(s, self.registry) for s in specs}
        self._series: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        self._children: dict[tuple[Any, ...], Any] = {}
        self._reported: set[str] = set()

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add `value` (>= 0) to a counter."""
        try:
            self._child(name, labels).inc(value)
        except Exception as error:  # noqa: BLE001  boundary: counting never stops an answer
            self._report(name, error)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; what is negative or not finite becomes 0 and is reported."""
        try:
            child = self._child(name, labels)
            if not math.isfinite(value) or value < 0:
                child.set(0)
                raise ValueError("a gauge was set below zero; this is a bug")
            child.set(value)
        except Exception as error:  # noqa: BLE001  boundary: counting never stops an answer
            self._report(name, error)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        try:
            if value != value:
                raise ValueError("an observation was NaN; this is a bug")
            self._child(name, labels).observe(value)
        except Exception as error:  # noqa: BLE001  boundary: counting never stops an answer
            self._report(name, error)

    def observe_all(self, name: str, values: Sequence[float], **labels: str) -> None:
        """Add observations to one series of a histogram."""
        try:
            total = sum(values)
            if total != total and any(value != value for value in values):
                raise ValueError("an observation was NaN; this is a bug")
            self._child(name, labels).observe_all(values)
        except Exception as error:  # noqa: BLE001  boundary: counting never stops an answer
            self._report(name, error)

    def exposition(self) -> bytes:
        """The Prometheus text format, type `CONTENT_TYPE`."""
        return prometheus.generate_latest(self.registry)

    def _child(self, name: str, labels: dict[str, str]) -> Any:
        # Checking and looking up a series costs more than counting in it; a known one is found at once.
        key = (name, *labels.items())
        child = self._children.get(key)
        return self._new_child(key, name, labels) if child is None else child

    def _new_child(self, key: tuple[Any, ...], name: str, labels: dict[str, str]) -> Any:
        metric = self._metrics[name]
        expected = self._specs[name].labels
        if not expected and not labels:
            return metric
        if set(labels) != set(expected):
            raise ValueError(f"labels are {sorted(labels)}, expected {sorted(expected)}")
        values = tuple(str(labels[key]) for key in expected)
        known = self._series[name]
        if values not in known:
            if len(known) >= MAX_SERIES_PER_METRIC:
                self._report(name, ValueError("too many label sets; the rest is counted as other"))
                return metric.labels(*(OVERFLOW,) * len(expected))
            known.add(values)
        child = self._children[key] = metric.labels(*values)
        return child

    def _report(self, name: str, error: Exception) -> None:
        """Say once per metric that it is broken; never raise."""
        if name in self._reported or len(self._reported) > 1000:
            return
        self._reported.add(name)
        reason = "unknown metric" if name not in BY_NAME else str(error)
        try:
            log.error("metric_failed", metric=name, error_type=type(error).__name__, reason=reason)
        except Exception:  # noqa: BLE001  boundary: neither may the log stop an answer
            return


def _make(spec: MetricSpec, registry: prometheus.CollectorRegistry) -> Any:
    name = PREFIX + spec.name
    if spec.kind == "counter":
        return prometheus.Counter(name, spec.help, spec.labels, registry=registry)
    if spec.kind == "gauge":
        return prometheus.Gauge(name, spec.help, spec.labels, registry=registry)
    return Histogram(name, spec.help, spec.labels, registry=registry, bounds=spec.buckets)

"""A histogram that costs one search and one addition an observation.

Who calls it: `pipeline.observe.metrics` makes one for each row of kind histogram.
What must stay true: it exposes what prometheus_client's own would (that one takes three locks and ten calls
an observation, a tenth of what the service does for a short request); no observation is lost between threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from threading import Lock

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Series:
    """The observations of one set of labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = Lock()

    def observe(self, value: float) -> None:
        """Add one; a bound belongs to the bucket below it."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Add several at once."""
        with self._lock:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
                self._sum += value

    def snapshot(self) -> tuple[list[int], float]:
        """Observations in each bucket, and their sum."""
        with self._lock:
            return list(self._counts), self._sum


class Histogram:
    """A metric of Prometheus' kind histogram. `bounds`: ascending, without +Inf."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        *,
        registry: CollectorRegistry,
        bounds: Sequence[float],
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = tuple(bounds)
        self._edges = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these values, one for each label."""
        return self._series.setdefault(values, Series(self._bounds))

    def observe(self, value: float) -> None:
        """Add one, where there are no labels."""
        self._series[()].observe(value)

    def observe_all(self, values: Sequence[float]) -> None:
        """Add several, where there are no labels."""
        self._series[()].observe_all(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, series in list(self._series.items()):
            counts, total = series.snapshot()
            below, buckets = 0, []
            for edge, count in zip(self._edges, counts, strict=True):
                below += count
                buckets.append((edge, float(below)))
            family.add_metric(values, buckets, total)
        yield family

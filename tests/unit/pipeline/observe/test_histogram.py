"""Our histogram beside prometheus_client's."""

from __future__ import annotations

import random
import threading

import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client import Histogram as Reference

from pipeline.observe.histogram import Histogram

BOUNDS = (0.001, 0.5, 1.0, 30.0)


@pytest.mark.parametrize("labels", [(), ("route", "task")])
def test_it_exposes_what_the_librarys_own_does(labels: tuple[str, ...]) -> None:
    """Also bounds themselves, infinities, and before the first observation."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as the service does
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    mine = Histogram("some_seconds", "Of something.", labels, registry=ours, bounds=BOUNDS)
    reference = Reference("some_seconds", "Of something.", labels, registry=theirs, buckets=BOUNDS)
    assert generate_latest(ours) == generate_latest(theirs)
    draw = random.Random(7)
    values = [*BOUNDS, 0.0, -1.0, float("inf"), *(draw.expovariate(1.0) for _ in range(500))]
    for value in values:
        for histogram in (mine, reference):
            series = histogram.labels("r", "t\n") if labels else histogram
            series.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_no_observation_is_lost_between_threads() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("n", "N.", (), registry=registry, bounds=BOUNDS)
    threads = [
        threading.Thread(target=lambda: [histogram.observe(0.25) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("n_count") == 20000
    assert registry.get_sample_value("n_sum") == 5000.0

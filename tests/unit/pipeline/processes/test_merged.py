"""Metrics of several processes as one exposition, read by the reference parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pipeline.observe.metrics import PrometheusMetrics
from pipeline.processes.merged import merge_metrics


def test_samples_keep_their_values_and_get_the_process() -> None:
    told = []
    for number in (1, 2):
        metrics = PrometheusMetrics()
        metrics.count("requests_total", 3.0 * number, route='a"b}', task="embed", outcome="ok")
        metrics.count("publish_retries_total", number)
        metrics.observe("batch_items", 3.0, model="m {x}")
        told.append((str(number), metrics.exposition()))
    merged = merge_metrics(told).decode()
    families = list(text_string_to_metric_families(merged))
    assert len({family.name for family in families}) == len(families), "each family is told once"
    one_alone = {f.name: f for f in text_string_to_metric_families(told[0][1].decode())}
    assert {f.name: (f.documentation, f.type) for f in families} == {
        name: (f.documentation, f.type) for name, f in one_alone.items()
    }
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    for number, text in told:
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                labels = frozenset({**sample.labels, "process": number}.items())
                assert samples.pop((sample.name, labels)) == sample.value
    assert not samples


def test_what_names_its_process_is_left_alone() -> None:
    text = b'# HELP up x\n# TYPE up gauge\nup{process="2"} 1.0\nheld 2.0\n'
    merged = merge_metrics([("parent", text)])
    assert b'up{process="2"} 1.0\n' in merged and b'held{process="parent"} 2.0' in merged

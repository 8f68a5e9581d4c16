"""Metrics and logs: nothing raises, nothing leaks."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from redis.exceptions import ResponseError

from pipeline.observe.logs import _ForeignHandler, configure_logging
from pipeline.observe.metric_table import BY_NAME, METRICS, PREFIX
from pipeline.observe.metrics import MAX_SERIES_PER_METRIC, PrometheusMetrics
from pipeline.redact import redact
from pipeline.settings.load import SettingsError, load
from schemas.errors import InvalidRequest

ROOT = Path(__file__).parents[4]


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    """What one series of a metric stands at."""
    return metrics.registry.get_sample_value(PREFIX + name, labels)


MARKER = "MARKER-what-a-user-wrote-7c1"


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    level = logging.getLogger().level
    configure_logging("info", "json", stream=stream)
    yield stream
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _ForeignHandler)]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


def events(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# --- metrics ---------------------------------------------------------------------------------------


class Broken:
    def labels(self, *values: str) -> Broken:
        raise RuntimeError("the metrics library is broken")

    inc = set = observe = labels


def test_a_broken_metric_never_reaches_the_caller_and_is_logged_once(
    log_lines: io.StringIO,
) -> None:
    """I03: every kind of failure, three times each; one line per metric."""
    metrics = PrometheusMetrics()
    metrics._metrics["batch_items"] = Broken()
    for _ in range(3):
        metrics.observe("batch_items", 3, model="m")
        metrics.count("no_such_metric")
        metrics.count("requests_total", route="r")  # labels are missing
        metrics.count("publish_retries_total", -1)
        metrics.observe("publish_seconds", float("nan"))
        metrics.gauge("in_flight", float("inf"))
    failed = [e["metric"] for e in events(log_lines) if e["event"] == "metric_failed"]
    assert sorted(failed) == sorted(
        ["batch_items", "no_such_metric", "requests_total", "publish_retries_total",
         "publish_seconds", "in_flight"]
    )  # fmt: skip


def test_not_even_a_broken_log_reaches_the_caller() -> None:
    """I03."""

    def explode(*args: object) -> object:
        raise RuntimeError("logging is broken")

    structlog.configure(processors=[explode])  # type: ignore[list-item]
    try:
        PrometheusMetrics().count("no_such_metric")
    finally:
        structlog.reset_defaults()


def test_a_gauge_rises_and_returns_to_zero_and_is_never_negative(
    log_lines: io.StringIO,
) -> None:
    """I01"""
    metrics = PrometheusMetrics()
    for depth in (1, 200, 50, 0):
        metrics.gauge("queue_requests", depth, lane="bulk")
        assert value(metrics, "queue_requests", lane="bulk") == depth
    metrics.gauge("queue_requests", -2, lane="bulk")
    assert value(metrics, "queue_requests", lane="bulk") == 0
    assert "below zero" in log_lines.getvalue()


def test_the_series_of_every_station_exist() -> None:
    """I02: queue wait, batch items, batch tokens, forward time, publish time, end to end."""
    for name in ("queue_wait_seconds", "batch_items", "batch_tokens", "forward_seconds",
                 "publish_seconds", "tokenize_seconds", "request_seconds"):  # fmt: skip
        assert BY_NAME[name].kind == "histogram"


def test_series_are_bounded_whatever_the_labels_are(log_lines: io.StringIO) -> None:
    metrics = PrometheusMetrics()
    for i in range(MAX_SERIES_PER_METRIC + 500):
        metrics.count("item_errors_total", code=f"code-{i}")
    exposed = metrics.exposition().decode().splitlines()
    series = [line for line in exposed if line.startswith("embedstream_item_errors_total{")]
    assert len(series) == MAX_SERIES_PER_METRIC + 1
    assert value(metrics, "item_errors_total", code="other") == 500


def test_two_registries_do_not_meet() -> None:
    first, second = PrometheusMetrics(), PrometheusMetrics()
    first.count("publish_retries_total")
    assert value(second, "publish_retries_total") == 0
    assert b"embedstream_publish_retries_total 1.0" in first.exposition()


def test_every_metric_that_the_sources_use_is_in_the_table() -> None:
    call = re.compile(r"metrics\.(count|gauge|observe)(?:_all)?\(\s*\"([a-z_]+)\"([^)]*)")
    kinds = {"count": "counter", "gauge": "gauge", "observe": "histogram"}
    seen = set()
    for folder in ("actors", "pipeline", "gpu"):
        for path in (ROOT / folder).rglob("*.py"):
            for verb, name, _ in call.findall(path.read_text()):
                seen.add(name)
                assert name in BY_NAME, f"{path.name} uses {name}, which METRICS lacks"
                assert BY_NAME[name].kind == kinds[verb], name
    assert len(seen) >= 15
    assert {spec.name for spec in METRICS} == seen, "a metric that nothing sets"


# --- logs ------------------------------------------------------------------------------------------


def test_no_user_text_in_any_line(log_lines: io.StringIO) -> None:
    """I05: named fields, exceptions, other libraries, tasks that died: the marker is nowhere."""
    log = structlog.get_logger("test")
    log.warning("odd", text=MARKER, input=[MARKER], nested={"query": MARKER}, body=MARKER.encode())
    log.info("vector", embedding=[0.1, 0.2])
    error = ValueError(f"cannot tokenize {MARKER}")
    log.error("failed", error=error)
    try:
        raise error
    except ValueError:
        log.exception("failed")
        logging.getLogger("some.library").exception("library failed")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", MARKER)
    text = log_lines.getvalue()
    assert MARKER not in text
    assert "0.1" not in text
    lines = events(log_lines)
    assert len(lines) == 6
    assert lines[3]["error"] == "ValueError" and lines[3]["frames"]


def test_refused_requests_and_settings_do_not_quote_values(log_lines: io.StringIO) -> None:
    """I05: our own errors carry codes, paths and numbers."""
    log = structlog.get_logger("test")
    log.warning("refused", error=InvalidRequest("must be a text", path="$.input[3]"))
    assert events(log_lines)[0]["error"] == "InvalidRequest: must be a text"
    with pytest.raises(SettingsError) as caught:
        load({"routes.a.source": f"redis://:{MARKER}@h/q?x=1", "models.m.path": "x"}, {}, None)
    log.error("settings_refused", error=caught.value)
    assert MARKER not in log_lines.getvalue()


def test_secrets_are_masked_and_long_values_cut(log_lines: io.StringIO) -> None:
    log = structlog.get_logger("test")
    log.info("x", url="kafka://h/t?sasl_password=hunter2&a=1", sasl_password="hunter2", n_tokens=3)
    log.info("y", detail="a" * 10_000, blob=b"123", many=list(range(10_000)))
    first, second = events(log_lines)
    assert "hunter2" not in log_lines.getvalue()
    assert first["url"] == "kafka://h/t?sasl_password=***&a=1" and first["n_tokens"] == 3
    assert len(str(second["detail"])) < 600 and second["blob"] == "<3 bytes>"
    assert len(second["many"]) == 100  # type: ignore[arg-type]


def test_request_id_is_bound_by_context(log_lines: io.StringIO) -> None:
    log = structlog.get_logger("pipeline.test")
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        log.info("inside")
    log.info("outside")
    inside, outside = events(log_lines)
    assert inside["request_id"] == "r-1" and "request_id" not in outside
    assert inside["logger"] == "pipeline.test" and inside["level"] == "info"


def test_a_closed_stream_loses_lines_and_nothing_else(log_lines: io.StringIO) -> None:
    log_lines.close()
    structlog.get_logger("test").error("nobody reads this")
    logging.getLogger("x").error("nor this")
    configure_logging("info", "json", stream=io.StringIO())


def test_levels_and_console_format() -> None:
    stream = io.StringIO()
    configure_logging("warning", "auto", stream=stream)  # no terminal: JSON
    try:
        structlog.get_logger("a").info("hidden")
        structlog.get_logger("a").warning("seen")
        logging.getLogger("lib").info("hidden")
        assert [e["event"] for e in events(stream)] == ["seen"]
        console = io.StringIO()
        configure_logging("info", "console", stream=console)
        structlog.get_logger("a").info("seen", text=MARKER)
        assert "seen" in console.getvalue() and "\x1b" not in console.getvalue()
        assert MARKER not in console.getvalue()
    finally:
        structlog.reset_defaults()
        root = logging.getLogger()
        for handler in [h for h in root.handlers if isinstance(h, _ForeignHandler)]:
            root.removeHandler(handler)
        logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://u:p@h:1/q", "redis://u:***@h:1/q"),
        ("redis://:p@ss@h:1/q", "redis://:***@h:1/q"),
        ("rediss://:pa/ss?x@h/q", "rediss://:***@h/q"),
        ("kafka://h:1/t?sasl_password=a%20b&group=g", "kafka://h:1/t?sasl_password=***&group=g"),
        ("kafka://h:1/t?max_tokens=3", "kafka://h:1/t?max_tokens=3"),
        ("redis://h:6379/q?group=g", "redis://h:6379/q?group=g"),
        ("redis:/user:pw@host:1/x", "redis:/user:***@host:1/x"),
        ("redis:/pw@host:1/x", "redis:/***@host:1/x"),
        ("user:p:w@host", "user:***@host"),
        ("no address", "no address"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


async def test_metrics_are_safe_from_threads() -> None:
    metrics = PrometheusMetrics()

    def work() -> None:
        for _ in range(500):
            metrics.count("items_total", task="embed")
            metrics.observe("batch_items", 2, model="m")

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
    assert value(metrics, "items_total", task="embed") == 2000
    assert value(metrics, "batch_items_count", model="m") == 2000


def test_no_level_logs_what_a_brokers_client_says(log_lines: io.StringIO) -> None:
    """K40: its errors quote whole commands, and with them records."""
    configure_logging("debug", "json", stream=log_lines)
    error = ResponseError("Command # 1 (XADD s * data XYZZY) of pipeline caused error: NOPERM")
    structlog.get_logger("test").error("failed", exc_info=error)
    structlog.get_logger("test").error("failed", exc_info=LookupError("a plain one"))
    assert [event["error"] for event in events(log_lines)] == [
        "ResponseError",
        "LookupError: a plain one",
    ]

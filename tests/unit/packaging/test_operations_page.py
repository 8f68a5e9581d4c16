"""docs/operations.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.lifecycle import ExitStatus
from pipeline.observe.metric_table import markdown
from pipeline.observe.metrics import MAX_SERIES_PER_METRIC
from pipeline.settings.load import HealthSettings, LifecycleSettings

DOCUMENT = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def test_the_metrics_table_is_the_code() -> None:
    table = DOCUMENT.split("a test compares -->\n", 1)[1].split("<!-- end of metrics -->", 1)[0]
    assert table == markdown(), "run: python -m pipeline.observe.metric_table"


def test_the_exit_statuses_are_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| ", DOCUMENT, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(s.value, s.name) for s in ExitStatus}


def test_the_figures_are_the_defaults() -> None:
    health = HealthSettings()
    assert f"`{health.host}:{health.port}`" in DOCUMENT
    assert f"the budget's default is {LifecycleSettings().drain_budget_s:g}" in DOCUMENT
    assert f"at most {MAX_SERIES_PER_METRIC} label sets" in DOCUMENT


def test_the_settings_it_names_exist() -> None:
    from pipeline.settings.load import Settings, explain

    names = {effective.name for effective in explain(Settings())}
    tables = {name.split(".")[0] for name in names}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", DOCUMENT):
        if name.split(".")[0] in tables:
            assert name in names, name

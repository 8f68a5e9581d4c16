"""A library that repeats itself is heard, and does not fill the log."""

from __future__ import annotations

import io
import json
import logging

import pytest

from pipeline.observe.logs import Repeats, configure_logging


def test_a_line_is_written_once_in_a_while_with_how_often_it_came() -> None:
    repeats = Repeats(every_s=10, max_lines=2)
    assert [repeats.held_back("a", at) for at in (0, 0.1, 9.9)] == [0, None, None]
    assert repeats.held_back("b", 5) == 0, "another line is not held back for this one's sake"
    assert repeats.held_back("a", 10) == 2
    assert repeats.held_back("a", 20.5) == 0
    assert repeats.held_back("c", 20.6) == 0 and repeats.held_back("b", 20.7) == 0, (
        "b was forgotten"
    )


def test_other_libraries_repeat_themselves_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging("info", "json", stream=out)
        client = logging.getLogger("some.client")
        for number in range(50):
            client.error("no leader for %s", number)
        client.error("another line")
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
        root.setLevel(level)
        logging.captureWarnings(False)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["no leader for 0", "another line"]

"""Where a replay begins and ends: what is read, and what makes no sense."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.transports.span import Span, read_point

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("start", "start"),
        ("end", "end"),
        ("0", 0),
        ("9223372036854775807", 2**63 - 1),
        ("2026-03-01T12:00:00Z", NOON),
        ("2026-03-01T13:00:00+01:00", NOON),
    ],
)
def test_points_are_read(text: str, point: Any) -> None:
    assert read_point(text) == point


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "1.5",
        "9223372036854775808",
        "\u0661",
        "2026-03-01",
        "2026-03-01T12:00:00",
        "begin",
    ],
)
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="start, end, an offset"):
        read_point(text)


@pytest.mark.parametrize(
    ("begin", "end", "partitions", "words"),
    [
        (5, "end", (), "--partition"),
        ("start", 5, (0, 1), "--partition"),
        (5, 5, (0,), "not below"),
        ("end", "end", (), "before"),
        ("start", "start", (), "before"),
        (NOON, NOON, (), "not before"),
    ],
)
def test_what_is_empty_or_of_no_partition_is_refused(
    begin: Any, end: Any, partitions: tuple[int, ...], words: str
) -> None:
    problem = Span("t", begin, end, partitions).problem()
    assert problem is not None and words in problem


@pytest.mark.parametrize(
    ("begin", "end", "partitions"),
    [
        ("start", "end", ()),
        (5, 6, (0,)),
        (5, NOON, (0,)),
        (NOON, "end", (1, 2)),
        ("start", 6, (0,)),
    ],
)
def test_spans_that_make_sense(begin: Any, end: Any, partitions: tuple[int, ...]) -> None:
    assert Span("t", begin, end, partitions).problem() is None

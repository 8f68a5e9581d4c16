"""Latency over load as an SVG: small enough to mail, and no plotting library to install.

Who calls it: `pipeline.cli.bench`.
What must stay true: both axes start at what was measured, the latency axis is logarithmic and labelled in
milliseconds; a rate at which something was not answered is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from pipeline.bench.load import Step

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
LINES = ((0.50, "#1b7837", "p50"), (0.95, "#2166ac", "p95"), (0.99, "#b2182b", "p99"))


def svg(steps: Sequence[Step], title: str) -> str:
    """The plot of open-loop steps. Raises `ValueError` when there is nothing to draw."""
    points = {
        share: [(step.rate or 0.0, 1000 * at) for step in steps if (at := step.latency_s(share))]
        for share, _, _ in LINES
    }
    every = [ms for line in points.values() for _, ms in line]
    if not every:
        raise ValueError("no request was answered: there is nothing to draw")
    most = max(step.rate or 0.0 for step in steps)
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)

    def x(rate: float) -> float:
        return LEFT + rate / most * (WIDTH - LEFT - RIGHT)

    def y(ms: float) -> float:
        share = (math.log10(ms) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, title, anchor="middle", size=15),
        _text(WIDTH / 2, HEIGHT - 16, "texts per second asked for", anchor="middle"),
        _text(LEFT - 10, TOP - 12, "ms", anchor="end"),
        *_grid(x, y, low, high, most),
    ]
    for share, colour, name in LINES:
        line = points[share]
        path = " ".join(f"{x(rate):.1f},{y(ms):.1f}" for rate, ms in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(r):.1f}" cy="{y(ms):.1f}" r="3" fill="{colour}"/>' for r, ms in line
        ]
        at = LEFT + 12 + 60 * [one for one, _, _ in LINES].index(share)
        parts.append(_text(at, TOP + 6, name, colour=colour, size=13))
    for step in steps:
        if step.failed or step.unsent:
            parts.append(
                _text(
                    x(step.rate or 0.0),
                    TOP - 12,
                    "not all answered",
                    anchor="end",
                    colour="#b2182b",
                )
            )
    return "\n".join([*parts, "</svg>\n"])


def _grid(
    x: Callable[[float], float], y: Callable[[float], float], low: int, high: int, most: float
) -> list[str]:
    parts = []
    for decade in range(low, high + 1):
        at = y(10**decade)
        parts.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 10, at + 4, f"{10**decade:g}", anchor="end"))
    for tick in range(5):
        rate = most * tick / 4
        parts.append(_text(x(rate), HEIGHT - BOTTOM + 18, f"{rate:,.0f}", anchor="middle"))
    base = HEIGHT - BOTTOM
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#333"/>')
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{escape(text)}</text>"
    )

"""What several processes say of themselves, as one answer. Pure, but for the asking.

Who calls it: `pipeline.processes.parent`.
What must stay true: a sample keeps its name and labels and gets `process`; each family is told once,
with all its samples behind it, as the text format wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.observe.readiness import Readiness

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process answered. at_s: by the monotonic clock."""

    at_s: float
    readiness: Readiness
    statistics: dict[str, Any]
    metrics: bytes


async def ask(port: int, at_s: float) -> Seen:
    """All three answers of the process behind a loopback port. Raises `OSError` or `ValueError`."""
    return Seen(
        at_s,
        msgspec.json.decode(await _get(port, "/ready"), type=Readiness),
        msgspec.json.decode(await _get(port, "/statistics")),
        await _get(port, "/metrics"),
    )


async def _get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        head, end, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not end or not head.startswith(b"HTTP/1.1 "):
        raise ValueError("no answer of a health server")
    return body


def merge_metrics(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """One exposition of several, each with the value of its label `process`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, text in expositions:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known and len(known) < 2:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, process))
    lines = [
        line for family in heads for line in (*heads[family], *samples.get(family, ()))
    ]  # fmt: skip
    return "\n".join(lines).encode() + b"\n"


def _labelled(sample: str, process: str) -> str:
    """`name{a="b"} 1` with one label more in front; one that has it already is left alone."""
    name, brace, rest = sample.partition("{")
    if not brace or " " in name:
        name, _, rest = sample.partition(" ")
        return f'{name}{{process="{process}"}} {rest}'
    if rest.startswith('process="'):
        return sample
    return f'{name}{{process="{process}",{rest}'

"""What the commit metadata of a partition remembers beside the offset. Pure.

Who calls it: `watermark.PartitionWatermark` writes and reads it with every commit.
What must stay true: it is a memory, never a claim on offsets: text that is foreign, damaged, or cut by
another version means "nothing known", and work resumes *at* the committed offset; its size is
bounded (brokers take 4,096 bytes by default), and what does not fit is only done again.

    embedstream1:<base64 of zlib of JSON>:<crc32>
    JSON: [handed_out - offset, [gap, run, gap, run, ...], {offset - base: attempts}]; behind them a tag,
    where a commit has to be told from every other one
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

PREFIX = "embedstream1:"
MAX_BYTES = 3_500
_MAX_JSON_BYTES = 200_000  # of a foreign writer: ours are far smaller


@dataclass(frozen=True, slots=True)
class Progress:
    """Beside a committed offset:

    handed_out  offsets below it may have been handed out: to a process that may have died of one
    done        offsets at or above the committed one whose work is finished
    attempts    steps that took a record in and have not come back, by offset
    """

    handed_out: int = -1
    done: frozenset[int] = frozenset()
    attempts: Mapping[int, int] = field(default_factory=dict)


NOTHING = Progress()


def dump(
    offset: int,
    handed_out: int,
    done: Collection[int],
    attempts: Mapping[int, int],
    tag: str = "",
) -> str:
    """The text to commit with `offset`. Of `done` the highest are left out when it gets too long."""
    ordered = sorted(done)
    while True:
        text = _text(offset, handed_out, ordered, attempts, tag)
        if len(text) <= MAX_BYTES or not ordered:
            return text if len(text) <= MAX_BYTES else _text(offset, handed_out, [], {}, tag)
        ordered = ordered[: len(ordered) // 2]


def _text(
    offset: int, handed_out: int, done: list[int], attempts: Mapping[int, int], tag: str
) -> str:
    if handed_out <= offset and not done and not attempts and not tag:
        return ""
    runs: list[int] = []
    at = offset
    for one in done:
        if runs and one == at:
            runs[-1] += 1
        else:
            runs += [one - at, 1]
        at = one + 1
    counts = {str(one - offset): count for one, count in attempts.items() if count}
    known = [handed_out - offset, runs, counts, *([tag] if tag else [])]
    data = json.dumps(known, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(data, 9))
    return f"{PREFIX}{packed.decode()}:{zlib.crc32(packed):08x}"


def parse(offset: int, text: str | None) -> Progress:
    """What `dump` wrote for this offset; `NOTHING` for whatever else stands there."""
    if not text or not text.startswith(PREFIX):
        return NOTHING
    packed, _, checksum = text.removeprefix(PREFIX).rpartition(":")
    try:
        if f"{zlib.crc32(packed.encode()):08x}" != checksum:
            return NOTHING
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(packed, validate=True), _MAX_JSON_BYTES)
        ahead, runs, counts, *_ = json.loads(data)
        done: set[int] = set()
        at = offset
        for gap, run in zip(runs[::2], runs[1::2], strict=True):
            if not 0 <= gap <= 10**9 or not 0 < run <= 1_000_000:
                return NOTHING
            done.update(range(at + gap, at + gap + run))
            at += gap + run
        attempts = {offset + int(key): int(count) for key, count in counts.items()}
        return Progress(offset + int(ahead), frozenset(done), attempts)
    except (ValueError, TypeError, AttributeError, zlib.error, binascii.Error, RecursionError):
        return NOTHING

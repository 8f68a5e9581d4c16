"""`dead-letters list|show|replay|purge`.

Who calls it: `pipeline.cli.letters`.
What must stay true: what a sender wrote reaches a terminal only as printable text, and a payload only when
it is asked for; one letter that cannot be sent again is told and holds up no other.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pipeline.cli.console import configure_one_off_logging, note_error, run_async, say, usage_error
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.transports.letters import CannotReplay, DeadLetter, Letters
from pipeline.transports.registry import open_letters
from schemas import headers as names

_LONGEST_ID = 40


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Letters]:
    try:
        letters = await open_letters(url)
        try:
            yield letters
        finally:
            await letters.aclose()
    except CannotReplay:
        raise
    except ValueError as error:
        raise usage_error(str(error)) from None
    except ConnectionError as error:
        raise OperatorError(str(error)) from None


def list_(url: str, kind: str, as_json: bool) -> int:
    """Every letter on a line; exit status 0 though there be none."""
    configure_one_off_logging()

    async def run() -> int:
        n = 0
        async with _opened(url) as letters:
            async for letter in letters.read(again=True):
                if kind in ("any", letter.kind):
                    n += 1
                    sys.stdout.write((_json(letter) if as_json else _line(letter)) + "\n")
        return n

    n = run_async(run())
    if not as_json:
        say(f"{n} dead letter{'' if n == 1 else 's'}")
    return ExitStatus.OK


def show(url: str, position: str, payload: bool) -> int:
    """Reason and origin of one letter, or its bytes."""
    configure_one_off_logging()

    async def run() -> DeadLetter:
        async with _opened(url) as letters:
            async for letter in letters.read(again=True):
                if letter.position == position:
                    return letter
        raise OperatorError(f"no dead letter {position[:60]!r} there: `list` shows the positions")

    letter = run_async(run())
    if payload:
        sys.stdout.buffer.write(letter.body)
        sys.stdout.buffer.flush()
        return ExitStatus.OK
    rows = {
        "position": letter.position,
        "id": letter.id,
        "kind": letter.kind or "no dead letter of this service",
        "code": letter.code,
        "reason": letter.said(names.DEAD_LETTER_MESSAGE),
        "attempts": letter.said(names.DEAD_LETTER_ATTEMPTS),
        "origin": letter.said(names.DEAD_LETTER_ORIGIN),
        "key": letter.original_key,
        "payload": f"{len(letter.body)} bytes (--payload writes them to stdout)",
    }
    rows |= {f"header {name}": f"{len(v)} bytes" for name, v in letter.original_headers.items()}
    for name, value in rows.items():
        sys.stdout.write(f"{_printable(name):<12} {_printable(value)}\n")
    return ExitStatus.OK


def replay(url: str, positions: Sequence[str], all_: bool, kind: str, to: str | None) -> int:
    """Send letters again; status 1 when one of those that were named could not be."""
    if bool(positions) == all_:
        raise usage_error("name the positions to replay, or give --all")
    configure_one_off_logging()

    async def run() -> tuple[int, int, set[str]]:
        n_sent, n_failed, missing = 0, 0, set(positions)
        async with _opened(url) as letters:
            async for letter in letters.read(again=not all_):
                wanted = kind in ("any", letter.kind) if all_ else letter.position in missing
                if not wanted:
                    continue
                missing.discard(letter.position)
                try:
                    place = await letters.send_again(letter, to)
                except CannotReplay as error:
                    n_failed += 1
                    note_error(_printable(str(error)))
                else:
                    n_sent += 1
                    say(f"{letter.position} -> {_printable(place)}")
            if n_sent and not letters.forgets:
                say("the letters stay where they are: another replay would send them once more")
        return n_sent, n_failed, missing

    n_sent, n_failed, missing = run_async(run())
    for position in sorted(missing):
        note_error(f"no dead letter {position[:60]!r} there: `list` shows the positions")
    say(f"{n_sent} sent again, {n_failed} not")
    return ExitStatus.ERROR if n_failed or missing else ExitStatus.OK


def purge(url: str, yes: bool) -> int:
    """Throw them away, once somebody has said so."""
    if not yes:
        if not sys.stdin.isatty():
            raise usage_error("purge throws records away for good: confirm it with --yes")
        say("This throws all dead letters there away for good. Type yes to go on:")
        if sys.stdin.readline().strip().lower() != "yes":
            say("nothing was changed")
            return ExitStatus.ERROR
    configure_one_off_logging()

    async def run() -> int:
        async with _opened(url) as letters:
            return await letters.purge()

    say(f"{run_async(run())} dead letters thrown away")
    return ExitStatus.OK


def _line(letter: DeadLetter) -> str:
    origin = " ".join(
        f"{name}={value}" for name, value in letter.origin.items() if name != "transport"
    )
    shown_id = letter.id if len(letter.id) <= _LONGEST_ID else letter.id[: _LONGEST_ID - 3] + "..."
    attempts = letter.said(names.DEAD_LETTER_ATTEMPTS) or "?"
    return _printable(
        f"{letter.position:<18} {letter.kind or '?':<13} {letter.code or '?':<20} attempts {attempts:<3} "
        f"{_age(letter):>6} {len(letter.body):>9} bytes  id {shown_id}  from {origin or '?'}"
    )


def _json(letter: DeadLetter) -> str:
    return json.dumps(
        {
            "position": letter.position,
            "id": letter.id,
            "kind": letter.kind,
            "code": letter.code,
            "reason": letter.said(names.DEAD_LETTER_MESSAGE),
            "attempts": letter.said(names.DEAD_LETTER_ATTEMPTS),
            "origin": letter.origin,
            "size_bytes": len(letter.body),
            "written_ms": letter.written_ms,
        }
    )


def _age(letter: DeadLetter) -> str:
    if letter.written_ms is None:
        return "-"
    seconds = max(0, int(time.time() - letter.written_ms / 1000))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)

"""Dead letters in a JSONL file, as `files/sink.py` writes it.

Who calls it: the registry, for `embedstream dead-letters file:///...`.
What must stay true: a service may append while we read; nothing that was not counted is thrown away; a
line that is no dead letter is shown as one that cannot be sent again, never left out.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pipeline.transports.files.options import FileOptions
from pipeline.transports.letters import CannotReplay, DeadLetter


class FileLetters:
    """`letters.Letters` of one file."""

    forgets = False

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, *, again: bool = False) -> AsyncIterator[DeadLetter]:
        """See `Letters`."""
        for letter in await asyncio.to_thread(lambda: list(self._letters())):
            yield letter

    def _letters(self) -> Iterator[DeadLetter]:
        try:
            with self._path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _letter(str(number), line)
        except OSError as error:
            raise ConnectionError(f"{self._path} cannot be read ({error.strerror})") from None

    async def send_again(self, letter: DeadLetter, to: str | None) -> str:
        """See `Letters`."""
        letter.check()
        if to is None:
            raise CannotReplay("records of a file are appended to another file: name it with --to")

        def append() -> None:
            if Path(to).resolve() == self._path.resolve():
                raise CannotReplay(
                    "--to is the file of the dead letters: it would only lie there again"
                )
            with open(to, "ab") as out:
                out.write(letter.body + b"\n")
                out.flush()
                os.fsync(out.fileno())

        try:
            await asyncio.to_thread(append)
        except OSError as error:
            raise ConnectionError(f"{to} cannot be written ({error.strerror})") from None
        return to

    async def purge(self) -> int:
        """See `Letters`."""

        def truncate() -> int:
            size = self._path.stat().st_size
            n = sum(1 for _ in self._letters())
            if self._path.stat().st_size != size:
                raise ConnectionError(f"{self._path} is being written to: try again")
            os.truncate(self._path, 0)  # its writer appends, wherever the end is
            return n

        return await asyncio.to_thread(truncate)

    async def aclose(self) -> None:
        """Nothing is open."""


def _letter(position: str, line: bytes) -> DeadLetter:
    try:
        record = json.loads(line)
        body = record.get("body")
        raw = base64.b64decode(record["body_base64"]) if body is None else body.encode()
        headers = {name: value.encode() for name, value in record["headers"].items()}
        return DeadLetter(position, record["id"], raw, headers)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return DeadLetter(position, "", line, {})


async def open_letters(options: FileOptions, place: str) -> FileLetters:
    """The file must be there. Raises `ConnectionError`."""
    path = Path(options.replies)
    if not await asyncio.to_thread(path.is_file):
        raise ConnectionError(f"{path} is no file: name the one in dead_letters=")
    return FileLetters(path)

"""Chunks of bytes -> lines of bounded length.

Who calls it: `source.py`. Pure.
"""

from __future__ import annotations


class LineSplitter:
    """Chunks in, lines out. Pure. Holds at most `max_line_bytes` + 1 bytes of an unfinished line.

    A longer line comes out cut to `max_line_bytes` + 1 bytes: one too many, so that whoever checks
    the limit sees that it is exceeded.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._keep = max_line_bytes + 1
        self._held = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Lines that end in this chunk, without their line ends."""
        lines = []
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._append(piece)
            lines.append(self._take())
        self._append(rest)
        return lines

    def end(self) -> list[bytes]:
        """The last line, when the input does not end with a line end."""
        return [self._take()] if self._held else []

    def _append(self, piece: bytes) -> None:
        self._held += piece[: self._keep - len(self._held)]

    def _take(self) -> bytes:
        line = bytes(self._held)
        self._held.clear()
        return line.removesuffix(b"\r")

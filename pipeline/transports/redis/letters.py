"""Dead letters in a Redis stream.

Who calls it: the registry, for `embedstream dead-letters redis://...`.
What must stay true: an entry is deleted only after its record is in the stream that it came from; a stream
that is not there is not made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import RedisError

from pipeline.transports.letters import CannotReplay, DeadLetter
from pipeline.transports.redis.connect import close_client, make_client
from pipeline.transports.redis.errors import describe
from pipeline.transports.redis.options import DATA_FIELD, LIST_PREFIX, STREAM_PREFIX, RedisOptions

_PAGE = 100


class RedisLetters:
    """`letters.Letters` of one stream."""

    forgets = True

    def __init__(self, options: RedisOptions, stream: str) -> None:
        self._options = options
        self._stream = stream
        self._client: Any = make_client(options, connections=2)

    async def _ask(self, *command: Any) -> Any:
        try:
            return await self._client.execute_command(*command)
        except (RedisError, OSError, TimeoutError) as error:
            raise ConnectionError(
                f"Redis at {self._options.address}: {describe(error)}: check that it runs, its address, and "
                f"that {self._stream} is the stream of the dead letters"
            ) from None

    async def read(self, *, again: bool = False) -> AsyncIterator[DeadLetter]:
        """See `Letters`."""
        newest = await self._ask("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        start = "-"
        while newest:
            last = _text(newest[0][0])
            page = await self._ask("XRANGE", self._stream, start, last, "COUNT", _PAGE)
            for entry, fields in page:
                found = dict(zip(map(_text, fields[::2]), fields[1::2], strict=True))
                body = found.pop(DATA_FIELD, b"")
                name = _text(entry)
                yield DeadLetter(
                    position=name,
                    id=_text(found.get("request-id", b"")),
                    body=body,
                    headers=found,
                    written_ms=int(name.partition("-")[0]),
                )
            if len(page) < _PAGE:
                return
            start = f"({_text(page[-1][0])}"

    async def send_again(self, letter: DeadLetter, to: str | None) -> str:
        """See `Letters`."""
        letter.check()
        stream = (to or str(letter.origin.get("stream", ""))).removeprefix(STREAM_PREFIX)
        if not stream or stream.startswith(LIST_PREFIX):
            raise CannotReplay(
                f"{letter.position} does not say where it came from: name a stream with --to"
            )
        if stream == self._stream:
            raise CannotReplay(
                "--to is the stream of the dead letters: it would only lie there again"
            )
        fields: list[str | bytes] = [DATA_FIELD, letter.body]
        for header, value in letter.original_headers.items():
            fields += [header, value]
        if await self._ask("XADD", stream, "NOMKSTREAM", "*", *fields) is None:
            raise CannotReplay(
                f"stream {stream} does not exist: start the service first, or use --to"
            )
        await self._ask("XDEL", self._stream, letter.position)
        return stream

    async def purge(self) -> int:
        """See `Letters`."""
        positions = [letter.position async for letter in self.read()]
        for start in range(0, len(positions), _PAGE):
            await self._ask("XDEL", self._stream, *positions[start : start + _PAGE])
        return len(positions)

    async def aclose(self) -> None:
        """See `Letters`."""
        await close_client(self._client, self._options.close_timeout_s)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


async def open_letters(options: RedisOptions, place: str) -> RedisLetters:
    """Not yet connected: the first question does that. Raises `ConnectionError`."""
    if place.startswith(LIST_PREFIX):
        raise ConnectionError(
            "dead letters are kept in streams: write redis://host:port/stream:NAME"
        )
    return RedisLetters(options, place.removeprefix(STREAM_PREFIX))

"""How commands are packed for the connections of ours."""

from __future__ import annotations

import pytest
from redis.asyncio import Connection

from pipeline.transports.redis.connect import _PlainConnection


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("XADD", "s", "*", "data", b"\x00\r\n$3\r\n", "n", 3),
        ("EVALSHA", "ab" * 20, 2, "k1", "ключ", "list", "named", 300, 10_000, b"x" * 9000, b""),
        ("BLMOVE", "a", "b", "LEFT", "RIGHT", 0.5),
        ("CLIENT SETINFO", "LIB-NAME", "embedstream"),
        (b"CLIENT LIST",),
    ],
)
def test_a_command_has_the_bytes_that_redis_py_would_send(command: tuple[object, ...]) -> None:
    ours, theirs = _PlainConnection(), Connection()
    assert b"".join(ours.pack_command(*command)) == b"".join(theirs.pack_command(*command))  # type: ignore[arg-type]
    both = [command, ("PING",)]
    assert b"".join(ours.pack_commands(both)) == b"".join(theirs.pack_commands(both))  # type: ignore[arg-type]


@pytest.mark.parametrize("word", [None, memoryview(b"x"), ["x"]])
def test_a_word_that_is_no_text_bytes_or_number_is_refused(word: object) -> None:
    with pytest.raises(TypeError, match="a word of a command"):
        _PlainConnection().pack_command("SET", "k", word)

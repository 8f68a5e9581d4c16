"""Names on brokers: the defaults, what may be a name, and which of them a request may have its reply at.

Who calls it: the options and sinks of the transports, `up`, the CLI.
What must stay true: pure; a reply can never be written to a source or to the dead letters (it would
become a request, or hide a failure), nor to any key or topic outside the allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable

REQUESTS = "embedstream.requests"
REPLIES = "embedstream.replies"
DEAD_LETTERS = "embedstream.dead-letters"
GROUP = "embedstream"
REPLY_PREFIXES = ("embedstream.",)

MAX_NAME_CHARS = 249
"""Longest topic name that Kafka takes; the same bound serves Redis keys and groups."""


def name_error(value: str, what: str) -> str | None:
    """Why `value` cannot name a key, stream or group; None when it can."""
    if not value:
        return f"{what} is empty"
    if len(value) > MAX_NAME_CHARS:
        return f"{what} has {len(value)} characters, at most {MAX_NAME_CHARS} are taken"
    if any(
        ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in value
    ):
        return f"{what} holds a control character"
    return None


def prefix_problems(prefixes: Iterable[str]) -> list[str]:
    """What is wrong with `reply_prefixes`."""
    found = list(prefixes)
    if not found:
        return [
            "reply_prefixes is empty: no request could name a reply_to; give at least one prefix"
        ]
    return [f"reply_prefixes: {error}" for p in found if (error := name_error(p, "a prefix"))]


def reply_to_error(
    name: str, *, prefixes: Iterable[str], sources: Iterable[str], dead_letters: str
) -> str | None:
    """Why no request may have its reply written to `name`; None when it may."""
    error = name_error(name, "reply_to")
    if error is not None:
        return error
    # The default name too: another service on the broker reads it.
    if name in sources or name == REQUESTS:
        return "reply_to names a place where requests are read: a reply would become a request"
    if name in (dead_letters, DEAD_LETTERS):
        return "reply_to names the dead letters"
    allowed = tuple(prefixes)
    if not name.startswith(allowed):
        return f"reply_to must start with one of: {', '.join(allowed)}"
    return None

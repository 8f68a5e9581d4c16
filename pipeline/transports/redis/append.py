"""One write of the sink: append to a list or stream, bound its length, and let it expire if it is ours.

Who calls it: `redis/sink.py`.
What must stay true: looking at the key and writing to it is one step on the server; a key that somebody
else made never gets our time to live, and nothing is appended to one that a request chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pipeline.transports.redis.options import DATA_FIELD, LIST_PREFIX

MAX_FIELDS = 1000
"""Fields of one entry. A script can hand on some 7,900 words (Lua's stack); a request has a few."""

SCRIPT = """
local kind, append, chosen = redis.call('TYPE', KEYS[1]).ok, ARGV[1], ARGV[2] == 'chosen'
local ttl_s, length = tonumber(ARGV[3]), tonumber(ARGV[4])
if append == 'nothing' then return kind end
local ours = kind == 'none'
if not ours then
  if kind ~= append then return 'type' end
  local left_ms = redis.call('PTTL', KEYS[1])
  ours = left_ms >= 0 and left_ms <= ttl_s * 1000
  if chosen and not ours then return 'ttl' end
end
if append == 'list' then
  redis.call('RPUSH', KEYS[1], ARGV[5])
  redis.call('LTRIM', KEYS[1], -length, -1)
else
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', length, '*', unpack(ARGV, 5))
end
if ours then redis.call('EXPIRE', KEYS[1], ttl_s) end
return 'ok'
"""
"""KEYS: the key. ARGV: `list`, `stream` or `nothing` (only look); `chosen` by a request or `named` by
the settings; time to live in seconds; length; then the element, or fields and values.
"""
SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

REFUSALS = {
    b"type": "the key holds another type",
    b"ttl": (
        "the key exists and is not one that a reply made: it has no time to live, or more than "
        "reply_ttl_s"
    ),
}
"""What the script answers when it changed nothing, and why."""


def append(
    kind: str, name: str, items: list[str | bytes], *, chosen: bool, ttl_s: int, length: int
) -> tuple[Any, ...]:
    """What follows the script in EVAL: number of keys, key and arguments."""
    what = "list" if kind == LIST_PREFIX else "stream"
    return (1, name, what, "chosen" if chosen else "named", ttl_s, length, *items)


def only_look(name: str) -> tuple[Any, ...]:
    """As `append`, writing nothing: whether this user may run the script on such a key."""
    return (1, name, "nothing", "chosen", 0, 0)


def entry(key: str, body: bytes, headers: Mapping[str, bytes]) -> list[str | bytes]:
    """Fields and values of a stream entry: the record, its request id and its headers."""
    fields: list[str | bytes] = [DATA_FIELD, body]
    if "request-id" not in headers:
        fields += ["request-id", key]
    for header, value in headers.items():
        if header != DATA_FIELD:
            fields += [header, value]
    return fields

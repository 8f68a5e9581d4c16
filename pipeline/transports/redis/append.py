"""Writes of the sink: append to a list or stream, bound its length, and let it expire if it is ours.

Who calls it: `redis/sink.py`.
What must stay true: looking at the key and writing to it is one step on the server; a key that somebody
else made never gets our time to live, and nothing is appended to one that a request chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.transports.redis.options import DATA_FIELD, LIST_PREFIX

MAX_FIELDS = 1000
"""Fields of one entry. A script can hand on some 7,900 words (Lua's stack); a request has a few."""

SCRIPT = """
local append, chosen = ARGV[1], ARGV[2] == 'chosen'
local ttl_s, length = tonumber(ARGV[3]), tonumber(ARGV[4])
local function write(key, from, to)
  local kind = redis.pcall('TYPE', key)
  if kind.err then return kind end
  local ours = kind.ok == 'none'
  if not ours then
    if kind.ok ~= append then return 'type' end
    local left_ms = redis.pcall('PTTL', key)
    if type(left_ms) == 'table' then return left_ms end
    ours = left_ms >= 0 and left_ms <= ttl_s * 1000
    if chosen and not ours then return 'ttl' end
  end
  local done
  if append == 'list' then
    done = redis.pcall('RPUSH', key, ARGV[from])
    if type(done) == 'number' and done > length then done = redis.pcall('LTRIM', key, -length, -1) end
  else
    done = redis.pcall('XADD', key, 'MAXLEN', '~', length, '*', unpack(ARGV, from, to))
  end
  if type(done) == 'table' and done.err then return done end
  if ours then done = redis.pcall('EXPIRE', key, ttl_s) end
  if type(done) == 'table' and done.err then return done end
  return 'ok'
end
if append == 'nothing' then return redis.call('TYPE', KEYS[1]).ok end
local at, answers = 5, {}
for i, key in ipairs(KEYS) do
  local n = 1
  if append == 'stream' then
    n = tonumber(ARGV[at])
    at = at + 1
  end
  answers[i] = write(key, at, at + n - 1)
  at = at + n
end
return answers
"""
"""KEYS: the key of each record, one may come twice. ARGV: `list`, `stream` or `nothing` (only look); `chosen`
by a request or `named` by the settings; time to live in seconds; length; then for each key the element, or
how many fields and values and these. One answer for each key: an error of one is no matter of the others.
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


class Append(msgspec.Struct, frozen=True, gc=False):
    """One record to write. `head`: what the script does to all keys of a call."""

    head: tuple[str, str, int, int]
    key: str
    words: Sequence[str | bytes | int]


def append(
    kind: str, name: str, items: Sequence[str | bytes], *, chosen: bool, ttl_s: int, length: int
) -> Append:
    """`items`: the element of a list, or the fields and values of a stream's entry."""
    what = "list" if kind == LIST_PREFIX else "stream"
    words = items if what == "list" else [len(items), *items]
    return Append((what, "chosen" if chosen else "named", ttl_s, length), name, words)


def call_of(records: Sequence[Append]) -> list[Any]:
    """What follows the script in EVAL for records of one head: number of keys, keys and arguments."""
    words: list[Any] = [len(records)]
    words += [record.key for record in records]
    words += records[0].head
    for record in records:
        words += record.words
    return words


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

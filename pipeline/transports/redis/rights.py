"""Which commands a user of the transport needs, and which of them the server would refuse.

Who calls it: the checks at open and of `check`, in `redis/client.py`.
What must stay true: asking leaves no trace; docs/delivery.md shows the ACL that grants exactly these.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pipeline.transports.redis.options import REPLY_LIST, RedisOptions, RedisQueueOptions

# Since Redis 7.0; before, a missing right shows at its first use.
_MISSING = """
if not redis.acl_check_cmd then return {} end
local missing = {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '[^\\n]+') do words[#words + 1] = word end
  if not redis.acl_check_cmd(unpack(words)) then missing[#missing + 1] = i - 1 end
end
return missing
"""


Need: TypeAlias = tuple[str, str, tuple[str, ...]]
"""(what is needed, key or empty, the rest of the command as it would be sent)."""


def stream_commands(options: RedisOptions) -> list[Need]:
    """What a stream source does."""
    stream, group, me = options.stream, options.group, "me"
    return [
        ("xreadgroup", stream, ("GROUP", group, me, "STREAMS", stream, ">")),
        ("xack", stream, (stream, group, "0-1")),
        ("xdel", stream, (stream, "0-1")),
        ("xclaim", stream, (stream, group, me, "0", "0-1")),
        ("xautoclaim", stream, (stream, group, me, "0", "0")),
        ("xpending", stream, (stream, group)),
        ("xrange", stream, (stream, "-", "+")),
        ("xgroup|create", stream, (stream, group, "0", "MKSTREAM")),
        ("xgroup|createconsumer", stream, (stream, group, me)),
        ("xgroup|delconsumer", stream, (stream, group, me)),
        ("xinfo|consumers", stream, (stream, group)),
        ("xinfo|groups", stream, (stream,)),
        ("xlen", stream, (stream,)),
    ]


def list_commands(key: str, ours: str, consumers: str, attempts: str) -> list[Need]:
    """What a list source does: the list, a processing list, who takes from it, what was tried."""
    return [
        ("lmove", key, (key, ours, "RIGHT", "LEFT")),
        ("blmove", key, (key, ours, "RIGHT", "LEFT", "1")),
        ("llen", key, (key,)),
        ("lrange", ours, (ours, "0", "-1")),
        ("lrem", ours, (ours, "-1", "x")),
        ("zadd", consumers, (consumers, "0", "me")),
        ("zrange", consumers, (consumers, "0", "-1")),
        ("zrangebyscore", consumers, (consumers, "0", "1")),
        ("zscore", consumers, (consumers, "me")),
        ("zrem", consumers, (consumers, "me")),
        ("hget", attempts, (attempts, "x")),
        ("hmget", attempts, (attempts, "x")),
        ("hset", attempts, (attempts, "x", "1")),
        ("hdel", attempts, (attempts, "x")),
        ("time", "", ()),
    ]


def sink_commands(options: RedisQueueOptions) -> list[Need]:
    """What the sink beside either does."""
    reply, letters = f"{REPLY_LIST}any", options.dead_letter_stream
    commands: list[Need] = [
        ("rpush", reply, (reply, "x")),
        ("ltrim", reply, (reply, "0", "1")),
        ("xadd", letters, (letters, "*", "data", "x")),
        ("multi", "", ()),
        ("exec", "", ()),
        ("evalsha", "", ("0" * 40, "0")),
        ("type", options.requests, (options.requests,)),
    ]
    for key in (reply, letters):
        commands += [("type", key, (key,)), ("pttl", key, (key,)), ("expire", key, (key, "1"))]
    return commands


async def missing_rights(client: Any, wanted: list[Need]) -> list[str]:
    """``xack on embedstream.requests`` for each; empty when none is missing, or before Redis 7.0.

    Raises `RedisError` (NOPERM: eval itself is not granted), `OSError`.
    """
    lines = ["\n".join((*name.split("|"), *rest)) for name, _, rest in wanted]
    missing = await client.execute_command("EVAL", _MISSING, 0, *lines)
    return [f"{name} on {key}" if key else name for name, key, _ in (wanted[i] for i in missing)]

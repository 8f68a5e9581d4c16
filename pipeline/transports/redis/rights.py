"""Which commands a user of the transport needs, and which of them the server would refuse.

Who calls it: the checks at open and of `check`, in `redis/client.py`.
What must stay true: asking leaves no trace; docs/delivery.md shows the ACL that grants exactly these.
"""

from __future__ import annotations

from typing import Any

from pipeline.transports.redis.options import REPLY_LIST, RedisOptions

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


def needed(options: RedisOptions) -> list[tuple[str, str, tuple[str, ...]]]:
    """(what is needed, key or empty, the command as it would be sent)."""
    stream, group, me = options.stream, options.group, "me"
    commands = [
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
    reply, letters = f"{REPLY_LIST}any", options.dead_letter_stream
    commands += [("rpush", reply, (reply, "x")), ("ltrim", reply, (reply, "0", "1"))]
    commands += [("xadd", letters, (letters, "*", "data", "x"))]
    for key in (reply, letters):
        commands += [("type", key, (key,)), ("pttl", key, (key,)), ("expire", key, (key, "1"))]
    commands += [("multi", "", ()), ("exec", "", ()), ("evalsha", "", ("0" * 40, "0"))]
    return [(name, key, (*name.split("|"), *rest)) for name, key, rest in commands]


async def missing_rights(client: Any, options: RedisOptions) -> list[str]:
    """``xack on embedstream.requests`` for each; empty when none is missing, or before Redis 7.0.

    Raises `RedisError` (NOPERM: eval itself is not granted), `OSError`.
    """
    wanted = needed(options)
    lines = ["\n".join(command) for _, _, command in wanted]
    missing = await client.execute_command("EVAL", _MISSING, 0, *lines)
    return [f"{name} on {key}" if key else name for name, key, _ in (wanted[i] for i in missing)]

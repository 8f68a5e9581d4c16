"""Every topic, key, prefix and time to live that the transports use, in one place.

Who calls it: the transports, their options, the CLI when it asks a running service.
What must stay true: no other module spells one of these names; each is only a default of a setting
in `options.py` unless it says "fixed".
"""

from __future__ import annotations

REQUEST_TOPIC = "embedstream.requests"
REPLY_TOPIC = "embedstream.replies"
DEAD_LETTERS = "embedstream.dead-letters"
GROUP = "embedstream"
REPLY_PREFIXES = ("embedstream.",)

REDIS_REPLY_LIST = "embedstream.reply."
"""Prefix of the list that holds the reply of one request: `list:embedstream.reply.<request id>`."""
REDIS_DATA_FIELD = "data"
"""Fixed: the field of a stream entry that carries the record; every other field is a header."""
REDIS_STREAM_PREFIX = "stream:"
"""Fixed: how a destination names a stream."""
REDIS_LIST_PREFIX = "list:"
"""Fixed: how a destination names a list."""
REPLY_TTL_S = 300
DEAD_LETTER_TTL_S = 14 * 24 * 3600

INPROC_PREFIX = "inproc:"
"""Fixed: how a destination names a reply box of an in-process broker."""
FILE_REPLIES = "file:replies"
FILE_DEAD_LETTERS = "file:dead-letters"

MAX_NAME_CHARS = 249
"""Longest topic name that Kafka takes; the same bound serves Redis keys and groups."""

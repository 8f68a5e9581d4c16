"""A script that runs on the server, called by the hash of its text.

Who calls it: whatever needs several commands to be one step.
What must stay true: every key that a script touches is in `keys`, so that a cluster finds its node; a
server that does not know the script yet (restarted, promoted) is sent the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError


class Script:
    """`text` in Lua, and `sha`, by which the server knows it once it has run."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """Its answer, as the server sends it. Raises `RedisError`, `OSError`, `TimeoutError`."""
        words = (len(keys), *keys, *args)
        try:
            return await client.execute_command("EVALSHA", self.sha, *words)
        except NoScriptError:
            return await client.execute_command("EVAL", self.text, *words)

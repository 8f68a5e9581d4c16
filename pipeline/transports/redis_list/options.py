"""Options of the Redis list source, and the keys that it keeps beside the list.

Who calls it: the registry; everything in this folder reads `RedisListOptions`.
What must stay true: as in `pipeline.transports.options`; all keys of one list lie in one hash slot.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult

from pipeline.transports.broker_names import REQUESTS
from pipeline.transports.options import Place, says
from pipeline.transports.redis.options import RedisQueueOptions

_TAG = re.compile(r"\{([^}]+)\}")


class RedisListOptions(RedisQueueOptions, frozen=True, kw_only=True):
    """A Redis (>= 6.2) or Valkey list that producers push requests to, and the sink beside it."""

    path_option, key_type = "key", "list"

    key: Annotated[str, says("The list that requests are pushed to.")] = REQUESTS
    take_from: Annotated[
        Literal["right", "left"],
        says("The end where the oldest request is: `right` after LPUSH, `left` after RPUSH."),
    ] = "right"

    @classmethod
    def destination_values(cls, parts: SplitResult) -> tuple[dict[str, Any], str]:
        raise ValueError("a destination is written redis://host/list:NAME")

    @property
    def address(self) -> str:
        return super().address.replace("://", "-list://")

    @property
    def own_prefix(self) -> str:
        """`{KEY}:`, or `{TAG}:KEY:` where the name of the list has a hash tag."""
        tag = _TAG.search(self.key)
        return f"{{{self.key}}}:" if tag is None else f"{{{tag[1]}}}:{self.key}:"

    def processing(self, consumer: str) -> str:
        """The list of what `consumer` has taken and not settled, the oldest on the right."""
        return f"{self.own_prefix}processing:{consumer}"

    @property
    def consumers(self) -> str:
        """Sorted set: consumer -> when its lease ends, in milliseconds of the server's clock."""
        return f"{self.own_prefix}consumers"

    @property
    def attempts(self) -> str:
        """Hash: SHA-1 of a request -> number of its next attempt, once one did not come back."""
        return f"{self.own_prefix}attempts"

    def consumes(self) -> tuple[Place, ...]:
        return (self._place(self.key, option="key"),)

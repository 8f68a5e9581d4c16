"""What of a sender's words may stand in a log line: names of the contract, and nothing else.

Who calls it: ingress, for every record that it refuses.
What must stay true: a path is logged up to the first name that the contract does not know.
"""

from __future__ import annotations

import re

from schemas.headers import REQUEST_HEADERS
from schemas.validation import ALL_FIELDS

_KNOWN = "|".join(map(re.escape, {*ALL_FIELDS, *REQUEST_HEADERS, "text", "image", "id"}))
_KNOWN_PATH = re.compile(rf"(\$|headers)(\.({_KNOWN})(?=[.\[]|$)|\[\d+\])*")


def loggable_path(path: str | None) -> str | None:
    """`path` up to where a name begins that the contract does not know: the sender wrote that one."""
    if path is None:
        return None
    known = _KNOWN_PATH.match(path)
    if known is None:
        return "<withheld>"
    return path if known.end() == len(path) else f"{known[0]}.<withheld>"

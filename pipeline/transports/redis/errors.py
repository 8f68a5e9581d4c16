"""What an error of the server or of the client library means, in words that quote nothing.

Who calls it: everything in this folder that catches such an error.
What must stay true: a message of the library is never repeated (it may quote the command, and with it
what a sender wrote): the type, the server's own code and the system's reason are all that leaves here.
"""

from __future__ import annotations

import re

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)

WRONG_SERVER = frozenset(
    {
        "READONLY", "MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "MASTERDOWN", "NOREPLICAS",
        "NOAUTH", "WRONGPASS",
    }
)  # fmt: skip
"""Codes that say nothing about the command: not this server, not now, or not with this login."""
_OF_PIPELINE = "of pipeline caused error: ("
"""Before it the library quotes the command, at most 100 characters of it."""
_BY_TYPE: tuple[tuple[type[Exception], str], ...] = (
    (NoPermissionError, "NOPERM"),
    (OutOfMemoryError, "OOM"),
    (ReadOnlyError, "READONLY"),
    (BusyLoadingError, "LOADING"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (MovedError, "MOVED"),
)
"""The library takes the codes that it knows off the text; before release 7 only the type is left."""
_CODE = re.compile(r"""['"]?-?([A-Z]{3,}) """)
_IN_SCRIPT = re.compile(r"user_script: ?\d+: -?([A-Z]{3,}) ")
_RIGHT_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")


def code_of(error: BaseException) -> str:
    """The first word of the server's answer (`READONLY`, `WRONGTYPE`); empty when there is none.

    An error inside a script has the code of the command that failed there: Redis 6.2 names it after
    the line, 7.0 and Valkey in front, and a missing right only in words.
    """
    for kind, code in _BY_TYPE:
        if isinstance(error, kind):
            return code
    text = str(error).rpartition(_OF_PIPELINE)[2]
    if any(words in text for words in _RIGHT_IN_SCRIPT):
        return "NOPERM"
    if found := _IN_SCRIPT.search(text):
        return found[1]
    known = getattr(error, "status_code", None)
    if isinstance(error, AuthenticationError):
        return "NOAUTH" if known == "NOAUTH" else "WRONGPASS"
    if known:
        return str(known)
    found = _CODE.match(text)
    return found[1] if found else ""


def describe(error: BaseException) -> str:
    """Type, code and the system's reason: ``ConnectionError (Connection refused)``."""
    words = code_of(error) or _reason(error)
    return f"{type(error).__name__} ({words})" if words else type(error).__name__


def _reason(error: BaseException) -> str:
    """What the system said underneath: one of its fixed texts."""
    under: BaseException | None = error
    while under is not None:
        if isinstance(under, OSError):
            return str(getattr(under, "reason", None) or under.strerror or "")
        under = under.__cause__ or under.__context__
    return ""

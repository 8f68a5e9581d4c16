"""Which `reply_to` a request may name: one rule for Kafka and Redis.

Who calls it: the sinks' `check_destination`. Pure.
What must stay true: a reply can never be written to a source or to the dead letters (it would become
a request, or hide a failure), nor to any key or topic outside the allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.transports import names
from pipeline.transports.options import name_error


def forbidden(
    name: str, *, prefixes: Iterable[str], sources: Iterable[str], dead_letters: str
) -> str | None:
    """Why no request may have its reply written to `name`; None when it may."""
    error = name_error(name, "reply_to")
    if error is not None:
        return error
    # The default name too: another service on the broker reads it, and on Redis a reply would give
    # its stream a time to live.
    if name in sources or name == names.REQUEST_TOPIC:
        return "reply_to names a place where requests are read: a reply would become a request"
    if name in (dead_letters, names.DEAD_LETTERS):
        return "reply_to names the dead letters"
    allowed = tuple(prefixes)
    if not name.startswith(allowed):
        return f"reply_to must start with one of: {', '.join(allowed)}"
    return None

"""Every error that a call may raise. All are `EmbedstreamError`s with `code` and `retryable`.

The service's own errors come as they stand in the reply: `code`, `message`, `path`, `items` (indexes of
the items concerned), `limit` and `given`. The client adds five of its own:

    EmbedstreamError
    |- NoReply        no_reply     (retryable) nothing came within the time-out; also a TimeoutError
    |- Unreachable    unreachable  the broker cannot be used; also a ConnectionError
    |- BadReply       bad_reply    a reply came that does not fit its request
    |- ClientClosed   closed       the client was closed while the call waited
    `- ClientFull     client_full  (retryable) more calls at once than `max_pending`
"""

from __future__ import annotations

from collections.abc import Iterable

from ._wire.errors import (
    Cancelled,
    EmbedstreamError,
    EmptyInput,
    Expired,
    ForbiddenDestination,
    Internal,
    InvalidDimensions,
    InvalidRequest,
    ItemTooLarge,
    ModelError,
    NonFinite,
    OutOfMemory,
    Overloaded,
    RecordTooLarge,
    TooDeep,
    TooLong,
    TooManyItems,
    UndecodableRecord,
    UnknownModel,
    Unsupported,
)
from ._wire.results import ItemReply

__all__ = [
    "BadReply",
    "Cancelled",
    "ClientClosed",
    "ClientFull",
    "EmbedstreamError",
    "EmptyInput",
    "Expired",
    "ForbiddenDestination",
    "Internal",
    "InvalidDimensions",
    "InvalidRequest",
    "ItemTooLarge",
    "ModelError",
    "NoReply",
    "NonFinite",
    "OutOfMemory",
    "Overloaded",
    "RecordTooLarge",
    "TooDeep",
    "TooLong",
    "TooManyItems",
    "UndecodableRecord",
    "UnknownModel",
    "Unreachable",
    "Unsupported",
]


class NoReply(EmbedstreamError, TimeoutError):
    """The time-out passed without a whole reply; the message says what to look at."""

    code = "no_reply"
    retryable = True


class Unreachable(EmbedstreamError, ConnectionError):
    """The broker cannot be reached, or refuses this client. `retryable` unless rights are missing."""

    code = "unreachable"
    retryable = True


class BadReply(EmbedstreamError):
    """A reply carries our request's id and does not fit it: another service, or a broken one."""

    code = "bad_reply"


class ClientClosed(EmbedstreamError):
    """`aclose` or `close` was called while the call waited, or before it."""

    code = "closed"


class ClientFull(EmbedstreamError):
    """`max_pending` calls of this client wait for their replies already."""

    code = "client_full"
    retryable = True


def of_items(failed: Iterable[ItemReply]) -> EmbedstreamError:
    """One error for the failed items of a reply: the first one's, with the indexes of all items that
    failed the same way in `items`."""
    by_index = sorted((item for item in failed if item.error is not None), key=lambda i: i.index)
    first = by_index[0].error
    assert first is not None
    first.items = tuple(
        item.index for item in by_index if item.error is not None and item.error.code == first.code
    )
    return first

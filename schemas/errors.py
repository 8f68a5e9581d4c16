"""The error tree: what may go wrong with a request, typed by what its sender should do.

    EmbedstreamError                 code, retryable, message, path, items, limit, given
    |- InvalidRequest                invalid_request        fix the request
    |  |- UndecodableRecord          invalid_request        fix the producer; the bytes are no record at all
    |- TooLong                       too_long               shorten, or ask for truncation
    |- ItemTooLarge                  item_too_large         one item exceeds the byte limit
    |- TooManyItems                  too_many_items         split the request
    |- TooDeep                       too_deep               flatten the record
    |- RecordTooLarge                record_too_large       split the record
    |- Unsupported                   unsupported            the model or service cannot do this
    |- UnknownModel                  unknown_model          name one of the loaded models
    |- InvalidDimensions             invalid_dimensions     ask for an allowed size
    |- EmptyInput                    empty_input            send text
    |- ForbiddenDestination          forbidden_destination  reply_to is not on the allow-list
    |- Expired                       expired                (retryable) deadline passed before the forward
    |- Cancelled                     cancelled              (retryable) withdrawn before the forward
    |- Overloaded                    overloaded             (retryable) try again later
    |- NonFinite                     non_finite             the model gave NaN or infinity for this item
    |  |- ZeroVector                 zero_vector            the vector is all zeros, which has no direction
    |- ModelError                    model_error            the forward failed for this item alone
    |- OutOfMemory                   out_of_memory          this item alone exhausts device memory
    |- Internal                      internal               (retryable) a fault of the service

Who calls it: every layer raises these; `schemas.results` maps them to the wire, once.
What must stay true: messages never carry user text; numbers live in fields, not in prose only.

An error raised while a request is decoded also says what could still be read of that request
(`request_id`, `reply_to`, `content_type`, `metadata`), so that ingress can answer the right place
in the right encoding. `None` means: could not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

MAX_MESSAGE_BYTES = 2048
ContentType: TypeAlias = Literal["application/msgpack", "application/json"]


class EmbedstreamError(Exception):
    """Base of every error that may reach the sender of a request.

    Args:
        message: plain text for a person, at most 2 KiB once encoded; never user text.
        path: where in the record, such as ``$.input[3].text``.
        items: indexes of the items concerned, when only some are.
        limit: the limit that was exceeded, in the unit the message names.
        given: what was given instead.
    """

    code: str = "internal"
    retryable: bool = False
    request_id: str | None = None
    reply_to: str | None = None
    content_type: ContentType | None = None
    metadata: dict[str, Any] | None = None

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        items: Sequence[int] = (),
        limit: int | None = None,
        given: int | None = None,
    ) -> None:
        encoded = message.encode("utf-8", "replace")
        if len(encoded) > MAX_MESSAGE_BYTES:
            message = encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."
        super().__init__(message)
        self.message = message
        self.path = path
        self.items = tuple(items)
        self.limit = limit
        self.given = given

    def to_wire(self) -> dict[str, Any]:
        """The ``error`` map of the wire contract; absent fields are left out."""
        wire: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
        }
        if self.path is not None:
            wire["path"] = self.path
        if self.items:
            wire["items"] = list(self.items)
        if self.limit is not None:
            wire["limit"] = self.limit
        if self.given is not None:
            wire["given"] = self.given
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> EmbedstreamError:
        """The typed error for a received ``error`` map.

        A code from a newer service becomes `Internal` that keeps the code and `retryable` it came
        with. Fields of the wrong type are left out rather than failing the reader.
        """
        code = str(wire.get("code"))
        items = wire.get("items")
        error = BY_CODE.get(code, Internal)(
            str(wire.get("message", "")),
            path=wire["path"] if isinstance(wire.get("path"), str) else None,
            items=[i for i in items if type(i) is int] if isinstance(items, list) else (),
            limit=wire["limit"] if type(wire.get("limit")) is int else None,
            given=wire["given"] if type(wire.get("given")) is int else None,
        )
        if code not in BY_CODE:
            error.code = code
            error.retryable = wire.get("retryable") is True
        return error


class InvalidRequest(EmbedstreamError):
    """The record breaks the wire contract; `path` says where."""

    code = "invalid_request"


class UndecodableRecord(InvalidRequest):
    """The bytes are neither a msgpack map nor a JSON object: dead-lettered as `unprocessable`."""


class TooLong(EmbedstreamError):
    """An item has more tokens than the model takes and `truncate` is `error`."""

    code = "too_long"


class ItemTooLarge(EmbedstreamError):
    """An item has more bytes than the service's byte limit, whatever its token count."""

    code = "item_too_large"


class TooManyItems(EmbedstreamError):
    """More items than one request may hold."""

    code = "too_many_items"


class TooDeep(EmbedstreamError):
    """The record nests deeper than allowed."""

    code = "too_deep"


class RecordTooLarge(EmbedstreamError):
    """The record, or the reply it would need, exceeds a byte limit."""

    code = "record_too_large"


class Unsupported(EmbedstreamError):
    """The model has no such output, task, prompt or input kind."""

    code = "unsupported"


class UnknownModel(EmbedstreamError):
    """No loaded model has that name."""

    code = "unknown_model"


class InvalidDimensions(EmbedstreamError):
    """`dimensions` is not one of the sizes this model can be cut to."""

    code = "invalid_dimensions"


class EmptyInput(EmbedstreamError):
    """An item holds no token to embed."""

    code = "empty_input"


class ForbiddenDestination(EmbedstreamError):
    """`reply_to` is not on the allow-list."""

    code = "forbidden_destination"


class Expired(EmbedstreamError):
    """`deadline_ms` passed before the forward; nothing was computed."""

    code = "expired"
    retryable = True


class Cancelled(EmbedstreamError):
    """The request was withdrawn before the forward."""

    code = "cancelled"
    retryable = True


class Overloaded(EmbedstreamError):
    """A budget is full; the same request may pass later."""

    code = "overloaded"
    retryable = True


class NonFinite(EmbedstreamError):
    """The model produced NaN or infinity for this item."""

    code = "non_finite"


class ZeroVector(NonFinite):
    """The model gave a vector of zeros, which cannot be brought to length 1."""

    code = "zero_vector"


class ModelError(EmbedstreamError):
    """The forward failed for this item even when it ran alone."""

    code = "model_error"


class OutOfMemory(EmbedstreamError):
    """This item exhausts the device's memory even when it runs alone."""

    code = "out_of_memory"


class Internal(EmbedstreamError):
    """A fault of the service."""

    code = "internal"
    retryable = True


ALL_ERRORS: tuple[type[EmbedstreamError], ...] = (
    InvalidRequest, TooLong, ItemTooLarge, TooManyItems, TooDeep, RecordTooLarge, Unsupported,
    UnknownModel, InvalidDimensions, EmptyInput, ForbiddenDestination, Expired, Cancelled,
    Overloaded, NonFinite, ZeroVector, ModelError, OutOfMemory, Internal,
)  # fmt: skip
BY_CODE: dict[str, type[EmbedstreamError]] = {cls.code: cls for cls in ALL_ERRORS}

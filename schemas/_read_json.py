"""JSON bytes -> named fields.

Who calls it: `schemas.codec.decode_request`.
What must stay true: the standard library's parser is used because it alone shows repeated names (a
faster parser without that was measured; see docs/wire-format.md); it has no declared lengths, so
memory is bounded by a multiple of the record; its recursion is bounded by the interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import msgspec

from ._record import (
    MAX_FIELDS,
    check_metadata_bytes,
    raise_too_deep,
    raise_too_many_fields,
    repair,
)
from .errors import ContentType, UndecodableRecord
from .headers import JSON
from .requests import Limits

_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_MAYBE_LONE: Final = re.compile(f"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}")
_ESCAPES: Final = re.compile(rf"{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.", re.DOTALL)


class _RepeatedName(Exception):
    """Raised inside the JSON parser, which cannot say where it stands."""


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedName
    return found


def _refuse_constant(literal: str) -> NoReturn:
    raise UndecodableRecord("malformed JSON: NaN and Infinity are not JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=_refuse_repeated, parse_constant=_refuse_constant)
_JSON_TOLERANT: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_text(body: bytes) -> str:
    """The source text, with everything that is no valid text replaced by U+FFFD."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        try:
            text = repair(body.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise UndecodableRecord(f"malformed JSON: byte {error.start} is not UTF-8") from None
    if ("\\ud" in text or "\\uD" in text) and _MAYBE_LONE.search(text):
        # Taken whole, from the left: a backslash that is itself escaped begins no escape.
        text = _ESCAPES.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    return text


class JsonRecord:
    """A JSON object, parsed whole."""

    content_type: ContentType = JSON
    newer = False

    def __init__(self, body: bytes, limits: Limits) -> None:
        self.n_bytes = len(body)
        self.repeated = False
        self._limits = limits
        text = _json_text(body)
        try:
            try:
                self._fields: dict[str, Any] = _JSON.decode(text)
            except _RepeatedName:
                self.repeated = True
                self._fields = _JSON_TOLERANT.decode(text)
        except json.JSONDecodeError as error:
            raise UndecodableRecord(
                f"malformed JSON: {error.msg.lower()} (character {error.pos})"
            ) from None
        except ValueError:
            raise UndecodableRecord("malformed JSON: a number has too many digits") from None
        except RecursionError:
            raise_too_deep(limits)
        if len(self._fields) > MAX_FIELDS:
            raise_too_many_fields(len(self._fields))
        self.names: Iterable[str] = self._fields

    def value(self, name: str) -> Any:
        """See `schemas._record.Record`."""
        return self._fields[name]

    def metadata(self) -> Any:
        """See `schemas._record.Record`."""
        value = self._fields["metadata"]
        try:
            n_bytes = len(msgspec.json.encode(value))
        except RecursionError:
            raise_too_deep(self._limits, "$.metadata")
        check_metadata_bytes(n_bytes, self._limits)
        return value

"""Records in, changes of documents out: id, text and metadata by a route's `document` table. Pure.

Who calls it: the intake of an indexing route, once per record; the file readers of a backfill.
What must stay true: what cannot be mapped is an `InvalidRequest` with the path and no text of the
sender; an absent body is a delete, an empty one is a mistake; what comes out can be stored anywhere
(no NUL, no lone surrogate, no NaN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pipeline.indexing.options import DocumentOptions
from pipeline.indexing.paths import ABSENT, Template, lookup
from pipeline.indexing.records import Change, Version
from schemas.errors import InvalidRequest, ItemTooLarge

MAX_ID_BYTES = 512
"""The smallest limit of all stores (OpenSearch refuses a whole request for one longer id)."""
MAX_METADATA_BYTES = 64 * 1024
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Raw:
    """One record as its source holds it. `version` is the source's own."""

    key: str | None
    body: bytes | None
    version: Version


class DocumentMapping:
    """Maps the records of one route.

    Raises:
        ValueError: options that contradict each other, with their names.
    """

    def __init__(self, options: DocumentOptions) -> None:
        self.options = options
        if (options.format == "text") == bool(options.text):
            raise ValueError(
                "document.text is needed, such as '{title}\\n\\n{body}'"
                if not options.text
                else "document.text has nothing to read where document.format is 'text'"
            )
        if options.format == "text" and (options.metadata or options.id != "key"):
            raise ValueError(
                "document.format 'text' has no fields: leave document.metadata out and "
                "document.id at 'key'"
            )
        try:
            self._template = Template(options.text)
        except ValueError as error:
            raise ValueError(f"document.text: {error}") from error

    def change(self, raw: Raw) -> Change | None:
        """The change that a record tells; None when it tells none (a Debezium message or heartbeat).

        Raises:
            InvalidRequest: the record cannot be mapped; `path` says where.
        """
        if raw.body is None:
            return Change(self._key_id(raw), raw.version, None)
        if self.options.format == "text":
            try:
                text = raw.body.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}") from None
            return Change(self._key_id(raw), raw.version, clean_text(text))
        try:
            value = msgspec.json.decode(raw.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = (
                str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8 or too deep"
            )
            raise InvalidRequest(f"the body is not JSON: {reason}", path="$") from None
        if self.options.format == "debezium":
            op, document = unwrap_event(value)
            if op is None:
                return None
            return self._mapped(raw, document, deleted=op == "delete")
        return self._mapped(raw, value, deleted=False)

    def mapped(self, document: Any, *, key: str | None, version: Version) -> Change:
        """The change of a document that is decoded already (a row of a file)."""
        return self._mapped(Raw(key, None, version), document, deleted=False)

    def _mapped(self, raw: Raw, document: Any, *, deleted: bool) -> Change:
        if not isinstance(document, dict):
            raise InvalidRequest("the document is not a JSON object", path="$")
        document_id = self._document_id(raw, document)
        version = self._version(raw, document)
        if deleted:
            return Change(document_id, version, None)
        text = clean_text(self._template.render(document))
        return Change(document_id, version, text, self._metadata(document))

    def _key_id(self, raw: Raw) -> str:
        """The id of a record that has nothing but its key."""
        name = self.options.id
        if name != "key" and not name.startswith("key."):
            # The key of a compacted topic is the document's id, whatever field repeats it.
            name = "key"
        return self._document_id(raw, {}, name)

    def _document_id(self, raw: Raw, document: Any, name: str | None = None) -> str:
        name = name or self.options.id
        if name == "key":
            if raw.key is None:
                raise InvalidRequest(
                    "the record has no key: set document.id to a field", path="key"
                )
            return checked_id(raw.key, "key")
        if name.startswith("key."):
            try:
                value = lookup(msgspec.json.decode(raw.key or ""), name.removeprefix("key."))
            except msgspec.DecodeError:
                raise InvalidRequest("the record's key is not JSON", path="key") from None
            return checked_id(value, name)
        path = name.removeprefix("$.")
        return checked_id(lookup(document, path), f"$.{path}")

    def _version(self, raw: Raw, document: Any) -> Version:
        name = self.options.version
        if name is None:
            return raw.version
        number = lookup(document, name)
        if isinstance(number, bool) or not isinstance(number, int) or abs(number) >= _INT64:
            raise InvalidRequest(f"$.{name} is no whole number of 64 bits", path=f"$.{name}")
        return Version("", number)

    def _metadata(self, document: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for path in self.options.metadata:
            if path == "*":
                chosen.update(document)
            elif (value := lookup(document, path)) is not ABSENT:
                chosen[path] = value
        chosen = {name: clean_json(value, f"$.{name}") for name, value in chosen.items()}
        n_bytes = len(msgspec.json.encode(chosen)) if chosen else 0
        if n_bytes > MAX_METADATA_BYTES:
            raise ItemTooLarge(
                "the metadata is too large: name fewer fields in document.metadata",
                limit=MAX_METADATA_BYTES,
                given=n_bytes,
            )
        return chosen


def unwrap_event(value: Any) -> tuple[Literal["put", "delete"] | None, Any]:
    """What a Debezium change event tells: the operation and the row it concerns.

    Events come with or without their ``schema`` and ``payload`` wrapper. Create, snapshot read and
    update give the row after, delete the row before. A message (``m``) tells nothing.

    Raises:
        InvalidRequest: not such an event, or a truncate, which names no rows.
    """
    if isinstance(value, dict) and isinstance(value.get("payload"), dict) and "op" not in value:
        value = value["payload"]
    op = value.get("op") if isinstance(value, dict) else None
    if op in ("c", "r", "u"):
        if not isinstance(value.get("after"), dict):
            raise InvalidRequest("the event has no row after the change", path="$.after")
        return "put", value["after"]
    if op == "d":
        if not isinstance(value.get("before"), dict):
            raise InvalidRequest(
                "the delete has no row before it: set REPLICA IDENTITY so that the key is there",
                path="$.before",
            )
        return "delete", value["before"]
    if op == "m":
        return None, None
    if op == "t":
        raise InvalidRequest("a truncate names no documents: rebuild the collection", path="$.op")
    raise InvalidRequest("not a Debezium change event: no op of c, r, u, d", path="$.op")


def checked_id(value: Any, path: str) -> str:
    """A document id: text of 1 to 512 bytes without control characters, or a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        what = "missing" if value is ABSENT else "neither text nor a whole number"
        raise InvalidRequest(f"the document id at {path} is {what}", path=path)
    text = str(value)
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"the document id at {path} is no valid text", path=path) from None
    if not text:
        raise InvalidRequest(f"the document id at {path} is empty", path=path)
    if n_bytes > MAX_ID_BYTES:
        raise InvalidRequest(
            f"the document id at {path} is too long", path=path, limit=MAX_ID_BYTES, given=n_bytes
        )
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise InvalidRequest(f"the document id at {path} holds a control character", path=path)
    return text


def clean_text(text: str) -> str:
    """A text that every store takes: NUL and lone surrogates become U+FFFD."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def clean_json(value: Any, path: str) -> Any:
    """A JSON value that every store takes. Raises `InvalidRequest` for NaN and infinity."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(k)): clean_json(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [clean_json(v, path) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path} is not a finite number", path=path)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INT64:
        return str(value)  # stores have no larger integers
    return value

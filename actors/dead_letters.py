"""Dead letters: the original record plus why it was given up. Pure.

Who calls it: egress, when a record can never be answered or was tried too often.
What must stay true: body and headers are the original's, so that a dead letter can be replayed as it
is; our own headers come beside them and never carry user text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from actors.ports import Delivery
from schemas import headers as record_headers
from schemas.errors import EmbedstreamError

ORIGINAL_BYTES = "embedstream-original-bytes"
"""Header of a dead letter whose body was cut because the broker takes no larger one."""

ORIGINAL_KEY = "embedstream-key"
"""Header of a dead letter whose record had a key: the letter's own is the request id."""


def cut_to_fit(
    delivery: Delivery, headers: Mapping[str, bytes], limit_bytes: int
) -> tuple[bytes, dict[str, bytes]]:
    """A body and headers well below `limit_bytes`: the body's beginning takes half of it at most,
    the original's headers a quarter, small ones first; ours stay whole."""
    body = delivery.body or b""
    kept, room = dict(headers), limit_bytes // 4
    foreign = [name for name in headers if name not in record_headers.DEAD_LETTER_HEADERS]
    for name in sorted(foreign, key=lambda name: len(name) + len(headers[name])):
        room -= len(name) + len(headers[name])
        if room < 0:
            del kept[name]
    if len(body) > limit_bytes // 2:
        kept[ORIGINAL_BYTES] = str(len(body)).encode()
        body = body[: limit_bytes // 2]
    return body, kept


def dead_letter_headers(
    delivery: Delivery, error: EmbedstreamError, kind: record_headers.DeadLetterKind
) -> dict[str, bytes]:
    """Original headers, then code, message, origin (JSON), attempts, kind, and the key if there was one."""
    ours: dict[str, str] = {
        record_headers.DEAD_LETTER_CODE: error.code,
        record_headers.DEAD_LETTER_MESSAGE: error.message,
        record_headers.DEAD_LETTER_ORIGIN: json.dumps(dict(delivery.origin), separators=(",", ":")),
        record_headers.DEAD_LETTER_ATTEMPTS: str(delivery.attempt),
        record_headers.DEAD_LETTER_KIND: kind,
    }
    if delivery.key is not None:
        ours |= {ORIGINAL_KEY: delivery.key}
    return {**delivery.headers, **{name: value.encode() for name, value in ours.items()}}

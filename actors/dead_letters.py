"""Dead letters: the original record plus why it was given up. Pure.

Who calls it: egress, when a record can never be answered or was tried too often.
What must stay true: body and headers are the original's, so that a dead letter can be replayed as it
is; our own headers come beside them and never carry user text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from actors.ports import Delivery
from schemas import headers
from schemas.errors import EmbedstreamError

ORIGINAL_BYTES = "embedstream-original-bytes"
"""Header of a dead letter whose body was cut because the broker takes no larger one."""


def dead_letter_headers(
    delivery: Delivery, error: EmbedstreamError, kind: headers.DeadLetterKind
) -> dict[str, bytes]:
    """Original headers, then code, message, origin (JSON), attempts and kind of the dead letter."""
    ours: Mapping[str, str] = {
        headers.DEAD_LETTER_CODE: error.code,
        headers.DEAD_LETTER_MESSAGE: error.message,
        headers.DEAD_LETTER_ORIGIN: json.dumps(dict(delivery.origin), separators=(",", ":")),
        headers.DEAD_LETTER_ATTEMPTS: str(delivery.attempt),
        headers.DEAD_LETTER_KIND: kind,
    }
    return {**delivery.headers, **{name: value.encode() for name, value in ours.items()}}

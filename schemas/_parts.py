"""Replies that are larger than one record may be: cut into numbered parts, and joined again.

Who calls it: egress cuts (`split_reply`) when a broker limits the record; clients join.
What must stay true: the cut depends on the results alone, never on `timings`, so that a reply sent
again after a crash is cut at the same places and its parts fit the ones already sent; every part is
a whole record within the limit; an item that fits no record becomes that item's error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ._encode import checked_encoding, dump, encode_reply, item_to_wire
from .errors import ContentType, InvalidRequest, RecordTooLarge
from .requests import Encoding
from .results import ItemReply, Reply, Timings

_WIDEST_MS: Final = -1.2345678901234567e-300  # as many bytes as any float takes
WIDENING_BYTES: Final = 256
"""More than the widest timings and part numbers add: three floats of 24 characters in JSON instead of at
least 3, and `,"part":` and `,"parts":` with a number each, are under 120."""


def split_reply(
    reply: Reply,
    max_body_bytes: int,
    *,
    content_type: ContentType = "application/msgpack",
    encoding: Encoding | None = None,
) -> list[bytes]:
    """One record body when the reply fits, else the bodies of its parts, in order.

    Parts repeat everything but the items; `part` counts from 0, `parts` says how many there are and
    `n` stays the number of results over all of them. `timings` are counted at their widest, so a
    reply within ~60 bytes of the limit may be cut although it would just have fitted.

    Raises:
        RecordTooLarge: not even an empty reply with this id and metadata fits.
        NonFinite, InvalidRequest: as `encode_reply`.
    """
    chosen = checked_encoding(content_type, encoding)
    n = len(reply.items)
    unsplit = msgspec.structs.replace(reply, part=None, parts=None)
    body = encode_reply(unsplit, content_type=content_type, encoding=chosen)
    if len(body) + WIDENING_BYTES <= max_body_bytes:
        return [body]  # the usual case, and the exact sum below would say the same
    widest = msgspec.structs.replace(
        reply,
        items=[],
        part=max(n, 1),
        parts=max(n, 1),
        timings=None
        if reply.timings is None
        else Timings(queue_ms=_WIDEST_MS, forward_ms=_WIDEST_MS, total_ms=_WIDEST_MS),
    )
    envelope_bytes = len(encode_reply(widest, content_type=content_type, encoding=chosen))
    own = encode_reply(
        msgspec.structs.replace(unsplit, items=[]), content_type=content_type, encoding=chosen
    )
    if len(body) - len(own) + envelope_bytes <= max_body_bytes:
        return [body]
    room = max_body_bytes - envelope_bytes
    if room < 0:
        raise RecordTooLarge(
            "the reply does not fit one record even without results; send less metadata",
            limit=max_body_bytes,
            given=envelope_bytes,
        )
    items, sizes = [], []
    for item in reply.items:
        fitted, n_bytes = _fit(item, reply, room, max_body_bytes, content_type, chosen)
        items.append(fitted)
        sizes.append(n_bytes)
    groups = _groups(items, sizes, room)
    if len(groups) == 1:
        whole = msgspec.structs.replace(unsplit, items=items)
        return [encode_reply(whole, content_type=content_type, encoding=chosen)]
    return [
        encode_reply(
            msgspec.structs.replace(reply, items=group, part=part, parts=len(groups)),
            content_type=content_type,
            encoding=chosen,
        )
        for part, group in enumerate(groups)
    ]


def _fit(
    item: ItemReply,
    reply: Reply,
    room: int,
    max_body_bytes: int,
    content_type: ContentType,
    encoding: Encoding,
) -> tuple[ItemReply, int]:
    """The item, or the error that stands in for it, and its bytes.

    One byte is added for JSON's comma; in msgpack it makes up for the longer header of a longer
    list (2 or 4 bytes more, from 16 items on).
    """
    n_bytes = len(dump(item_to_wire(item, reply, content_type, encoding), content_type)) + 1
    if n_bytes <= room:
        return item, n_bytes
    overhead = max_body_bytes - room
    error = RecordTooLarge(
        "this result does not fit one record; ask for fewer outputs, a smaller dtype or base64",
        items=[item.index],
        limit=max_body_bytes,
        given=n_bytes + overhead,
    )
    stand_in = ItemReply(index=item.index, id=item.id, error=error)
    n_bytes = len(dump(item_to_wire(stand_in, reply, content_type, encoding), content_type)) + 1
    if n_bytes > room:
        raise RecordTooLarge(
            "the record limit leaves no room for even an item's error",
            limit=max_body_bytes,
            given=n_bytes + overhead,
        )
    return stand_in, n_bytes


def _groups(items: list[ItemReply], sizes: list[int], room: int) -> list[list[ItemReply]]:
    groups: list[list[ItemReply]] = [[]]
    used = 0
    for item, n_bytes in zip(items, sizes, strict=True):
        if used + n_bytes > room and groups[-1]:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += n_bytes
    return groups


def join_parts(replies: Sequence[Reply]) -> Reply:
    """The whole reply from its parts, in any order; a part that came twice counts once.

    Raises:
        InvalidRequest: parts are missing, belong to different replies, or do not add up to `n`.
    """
    if not replies:
        raise InvalidRequest("there is no part to join")
    first = replies[0]
    if any(reply.id != first.id for reply in replies):
        raise InvalidRequest("the parts belong to different requests", path="$.id")
    if any((reply.parts, reply.n) != (first.parts, first.n) for reply in replies):
        raise InvalidRequest("the parts belong to different replies", path="$.parts")
    by_part = {reply.part or 0: reply for reply in replies}
    expected = first.parts or 1
    if len(by_part) != expected or sorted(by_part) != list(range(expected)):
        raise InvalidRequest("parts are missing", path="$.part", limit=expected, given=len(by_part))
    items = [item for part in range(expected) for item in by_part[part].items]
    if len({item.index for item in items}) != len(items):
        raise InvalidRequest("two results have the same index", path="$.index")
    if len(items) != first.n:
        raise InvalidRequest(
            "the parts do not hold as many results as announced",
            path="$.n",
            limit=first.n,
            given=len(items),
        )
    return msgspec.structs.replace(by_part[0], items=items, part=None, parts=None)

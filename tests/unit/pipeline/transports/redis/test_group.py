"""Reply shapes of different Redis versions."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from pipeline.transports.redis.client import is_nogroup, version_of
from pipeline.transports.redis.group import Entry, parse_claim, parse_read

RAW = [b"1-0", [b"Data", b"x", b"H", b"\xff"]]
ENTRY = Entry("1-0", {"data": b"x", "h": b"\xff"})


@pytest.mark.parametrize("removed", [[], [[b"9-9"]]])
def test_claim_reply_of_two_and_three_elements(removed: list[list[bytes]]) -> None:
    """F04: Redis 6.2 answers two elements, 7 and Valkey three; a nil entry was deleted."""
    gone = ["9-9"] if removed else []
    assert parse_claim([b"5-0", [b"1-0", None], *removed]) == ("5-0", ["1-0"], gone)


def test_read_reply_shapes() -> None:
    assert parse_read(None) == []
    assert parse_read([]) == []
    assert parse_read([[b"s", [RAW, [b"2-0", None]]]]) == [ENTRY, Entry("2-0", None)]
    assert parse_read({b"s": [RAW]}) == [ENTRY]


def test_versions() -> None:
    """F16: compared as numbers, not as text."""
    assert version_of("6.2.14") == (6, 2)
    assert version_of("10.0.1") > version_of("6.2")
    assert version_of("unknown") == (0, 0)


def test_nogroup_texts() -> None:
    """F02: what servers say when stream or group is gone."""
    assert is_nogroup(ResponseError("NOGROUP No such key 's' or consumer group 'g'"))
    assert is_nogroup(ResponseError("UNBLOCKED the stream key no longer exists"))
    assert not is_nogroup(ResponseError("WRONGTYPE"))

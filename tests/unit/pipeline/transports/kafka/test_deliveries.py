"""Record keys and request ids: each key its own id, each id back to its key."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.transports.kafka.deliveries import KEY_ID_PREFIX, id_of_key, key_of_id


@given(st.binary(max_size=64))
@example((200).to_bytes(8, "big"))
@example(KEY_ID_PREFIX.encode() + b"00")
@example(KEY_ID_PREFIX.encode() + b"zz")
@example("žluť".encode())
def test_an_id_made_from_a_key_gives_the_key_back(key: bytes) -> None:
    """K03: so two keys never share an id."""
    assert key_of_id(id_of_key(key)) == key


def test_text_keys_stay_text() -> None:
    assert id_of_key("žluť".encode()) == "žluť"
    assert id_of_key((200).to_bytes(8, "big")) == "key-hex:00000000000000c8"


@given(st.text(max_size=32))
def test_an_id_that_no_key_gives_is_its_own_text(request_id: str) -> None:
    key = key_of_id(request_id)
    assert id_of_key(key) == request_id or key == request_id.encode("utf-8", "replace")


def test_an_id_that_only_looks_like_one_is_text() -> None:
    for request_id in ("key-hex:0", "key-hex:AB", "key-hex:6162", "key-hex:zz"):
        assert key_of_id(request_id) == request_id.encode()

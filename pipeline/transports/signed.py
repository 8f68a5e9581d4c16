"""Reply destinations that their owner may name and nobody else: signed by whoever holds the key.

Who calls it: the registry, around the sink of a route with `reply_key_file`; `embedstream sign`.
What must stay true: a broker tells a consumer nothing about who wrote a record, so the right to name
a destination stands in its name; a signature is compared in constant time and is in no log line.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.ports import ListSink, Record, Sink, Told

_MARK = "?sig="
_DOMAIN = b"embedstream reply_to\0"
MIN_KEY_BYTES = 16


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, one per line; the first signs, any of them proves.

    Raises `ConnectionError`, as for every file that a route needs at start.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConnectionError(
            f"reply_key_file {path} cannot be read ({type(error).__name__}): check its path and "
            "its permissions"
        ) from None
    keys = tuple(stripped for line in lines if (stripped := line.strip()))
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        raise ConnectionError(
            f"reply_key_file {path} needs one key per line, each of {MIN_KEY_BYTES} bytes or more: "
            "make one with `openssl rand -hex 32`"
        )
    return keys


def sign(destination: str, key: bytes) -> str:
    """`destination` as its owner gives it in `reply_to`: HMAC-SHA-256 (RFC 2104), in hex."""
    return f"{destination}{_MARK}{_signature(destination, key)}"


def _signature(destination: str, key: bytes) -> str:
    return hmac.new(key, _DOMAIN + destination.encode(), "sha256").hexdigest()


def _plain(destination: str) -> str:
    return destination.rpartition(_MARK)[0] if _MARK in destination else destination


class SignedDestinations:
    """`actors.ports.Sink`: `sink`, where a request names only destinations signed with one of `keys`."""

    def __init__(self, sink: Sink, keys: Sequence[bytes]) -> None:
        self._sink = sink
        self._keys = tuple(keys)
        self.max_record_bytes = sink.max_record_bytes
        self.dead_letter_destination = sink.dead_letter_destination
        if isinstance(sink, ListSink):
            self._lists = sink
            self.publish_all = self._publish_all  # only then are we a `ListSink`

    def default_destination(self, request_id: str) -> str:
        """See `Sink`."""
        return self._sink.default_destination(request_id)

    def check_destination(self, destination: str) -> str | None:
        """See `Sink`."""
        name, mark, given = destination.rpartition(_MARK)
        if not mark:
            return "reply_to must be signed here: NAME?sig=..., as the operator gave it to you"
        # Lone surrogates cannot be signed, and no broker takes them.
        bare, proof = name.encode("utf-8", "replace").decode(), given.encode("utf-8", "replace")
        signatures = [_signature(bare, key).encode() for key in self._keys]
        if not any(hmac.compare_digest(proof, known) for known in signatures):
            return "reply_to has a signature that is not valid for it"
        return self._sink.check_destination(name)

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        """See `Sink`."""
        await self._sink.publish(_plain(destination), key, body, headers, order_key=order_key)

    async def _publish_all(self, records: Sequence[Record], tell: Told) -> None:
        """See `ListSink`."""
        bare = [Record(_plain(one.destination), one.key, one.body, one.headers) for one in records]
        await self._lists.publish_all(bare, tell)

    async def aclose(self) -> None:
        """See `Sink`."""
        await self._sink.aclose()

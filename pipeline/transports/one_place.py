"""Replies of a route to one place, wherever its requests come from; dead letters stay with the source.

Who calls it: the registry, for a route whose `destination` is an address.
What must stay true: no request chooses where its reply goes; both sinks close.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.ports import ListSink, Sink


class OnePlace:
    """`actors.ports.Sink` of two: `replies` is written at `place` alone, the rest goes to `beside`."""

    def __init__(self, replies: Sink, place: str, *, beside: Sink) -> None:
        self._replies = replies
        self._place = place
        self._beside = beside
        self.max_record_bytes = replies.max_record_bytes
        # Prefixed, because the place of replies on another broker may have the same name.
        self.dead_letter_destination = f"dead-letters:{beside.dead_letter_destination}"
        if isinstance(replies, ListSink):
            self.publish_all = (
                replies.publish_all
            )  # lists hold replies; only then are we a `ListSink`

    def default_destination(self, request_id: str) -> str:
        """See `Sink`."""
        return self._place

    def check_destination(self, destination: str) -> str | None:
        """See `Sink`."""
        if destination == self._place:
            return None
        return "replies of this route go to its one destination: leave reply_to away"

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
        if destination == self.dead_letter_destination:
            await self._beside.publish(self._beside.dead_letter_destination, key, body, headers)
        else:
            await self._replies.publish(destination, key, body, headers, order_key=order_key)

    async def aclose(self) -> None:
        """Disconnect both."""
        try:
            await self._replies.aclose()
        finally:
            await self._beside.aclose()

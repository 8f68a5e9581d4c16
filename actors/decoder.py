"""Records of the wire contract in, requests out.

Who calls it: the ingress of a request/reply route.
What must stay true: nothing is decoded twice; a large record never holds up the event loop.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from actors.ports import Delivery
from actors.route import Decoded, Decoder
from schemas.codec import decode_request
from schemas.requests import Limits

OFF_LOOP_BYTES = 128 * 1024
"""Records above this are decoded in a thread: 1 MB of JSON takes some 10 ms, and the event loop
also sends Kafka's heartbeats."""


class WireDecoder(Decoder):
    """Decodes requests and cancel records. A tombstone has nothing to delete here."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="request-decoder")

    async def decode(self, delivery: Delivery) -> Decoded | None:
        """See `Decoder`."""
        if delivery.body is None:
            return None
        if len(delivery.body) > OFF_LOOP_BYTES:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._decoded, delivery, delivery.body)
        return self._decoded(delivery, delivery.body)

    def _decoded(self, delivery: Delivery, body: bytes) -> Decoded:
        return Decoded(
            decode_request(
                body, delivery.headers, default_id=delivery.default_id, limits=self._limits
            )
        )

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

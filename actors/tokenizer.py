"""The tokenizer actor: admitted requests in, encoded items out; one thread per model owns it.

Who calls it: ingress puts `InFlight`s, this actor hands `Entry`s to the coalescer.
What must stay true: tokenization never runs on the event loop; one batched call serves many
requests; a large request is encoded slice by slice, so that an interactive one waits
for a slice at most and packing starts with the first; expired and ended requests are not encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog

from actors.attempts import Attempts, apart
from actors.coalescer import Coalescer
from actors.line import Line
from actors.messages import Entry, InFlight
from actors.ports import Clock, Metrics
from actors.result_cache import ResultCache, SharedResults, key_of
from gpu.batch import EncodedItem, EncodedRequest, Encoder, ItemOutcome
from schemas.errors import EmbedstreamError, Expired, Internal
from schemas.requests import LANES, AnyRequest, ClassifyRequest, EmbedRequest, Lane

log = structlog.get_logger(__name__)

SLICE_ITEMS = 64
"""Items per encoder call. Larger slices keep an interactive request waiting longer (about 0.2 ms of
CPU per text of 100 tokens); smaller ones lose the tokenizer's batching."""
SHORT_ITEMS, SHORT_BYTES = 256, 16 * 1024
"""Small requests share a call up to so many items while their records are short together: less than a slice of
long texts, and a hand-over to the thread costs what tokenizing a hundred short ones does."""


class Tokenizer:
    """Encodes requests of one model.

    Args:
        encoder: owned by this actor's single thread from now on.
        charge_tokens: charges the lane's token budget once the tokens are known.
        complete, fail: where outcomes of items and of whole requests go.
        results: of items computed before; None: every item is computed. maker: who computes, for
            their keys; None: the model's name.
    """

    def __init__(
        self,
        model: str,
        encoder: Encoder,
        coalescer: Coalescer,
        *,
        attempts: Attempts,
        charge_tokens: Callable[[InFlight, int], None],
        complete: Callable[[InFlight, int, ItemOutcome], None],
        fail: Callable[[InFlight, EmbedstreamError], None],
        clock: Clock,
        metrics: Metrics,
        max_waiting: int = 1024,
        results: ResultCache | None = None,
        maker: str | None = None,
    ) -> None:
        self.model = model
        self._maker = model if maker is None else maker
        self._encoder = encoder
        self._coalescer = coalescer
        self._attempts = attempts
        self._charge_tokens = charge_tokens
        self._complete = complete
        self._fail = fail
        self._clock = clock
        self._metrics = metrics
        self._results = results if results is not None and results.enabled else None
        self._queues: dict[Lane, Line[InFlight]] = {lane: Line(max_waiting) for lane in LANES}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer-{model}")

    def has_room(self, lane: Lane) -> bool:
        """Would `put` return at once?"""
        return not self._queues[lane].full()

    def put_nowait(self, in_flight: InFlight) -> None:
        """As `put`, where there is room."""
        self._queues[in_flight.lane].put_nowait(in_flight)

    async def put(self, in_flight: InFlight) -> None:
        """Hand over an admitted request; waits while its lane's queue is full."""
        await self._queues[in_flight.lane].put(in_flight)

    async def run(self, lane: Lane) -> None:
        """Encode requests of one lane for ever; the thread is shared by both lanes."""
        queue = self._queues[lane]
        while True:
            waiting = await queue.some()
            group: list[InFlight] = []
            n_items = n_bytes = 0
            while waiting and (
                n_items < SLICE_ITEMS or (n_items < SHORT_ITEMS and n_bytes < SHORT_BYTES)
            ):
                one = waiting.popleft()
                group.append(one)
                n_items += len(one.outcomes)
                n_bytes += one.cost_bytes
            queue.taken()
            epoch_ms = self._clock.epoch_ms()
            live = [one for one in group if self._is_live(one, epoch_ms)]
            small = [one for one in live if len(one.outcomes) <= SLICE_ITEMS]
            for together in apart(small):
                await self._encode([(one, 0, one.request) for one in together], lane)
            for one in live if len(small) < len(live) else ():
                if len(one.outcomes) > SLICE_ITEMS:
                    for start in range(0, len(one.outcomes), SLICE_ITEMS):
                        if not self._is_live(one, self._clock.epoch_ms()):
                            break
                        await self._encode([(one, start, _slice_of(one.request, start))], lane)

    def _is_live(self, in_flight: InFlight, epoch_ms: int) -> bool:
        if in_flight.closed:
            return False
        if in_flight.expired(epoch_ms):
            self._fail(
                in_flight,
                Expired(
                    "deadline_ms passed before tokenization; nothing was computed",
                    limit=in_flight.request.deadline_ms,
                ),
            )
            return False
        return True

    async def _encode(self, parts: list[tuple[InFlight, int, AnyRequest]], lane: Lane) -> None:
        """Encode (slices of) requests and queue their items; whatever goes wrong ends in a failure."""
        try:
            entries = await self._entries(parts)
        except Exception as error:  # noqa: BLE001  boundary: one bad request must not end the actor
            log.error("tokenization_failed", model=self.model, error_type=type(error).__name__)
            for in_flight, _, _ in parts:
                self._fail(in_flight, Internal("tokenization failed; this is a bug"))
            return
        if lane == "bulk" and self._results is not None and self._results.shared is not None:
            # A question to another process; who waits for an answer has it computed sooner.
            entries = await self._not_shared(entries, self._results, self._results.shared)
        if entries:
            await self._coalescer.put(self.model, entries, lane)

    async def _not_shared(
        self, entries: list[Entry], results: ResultCache, shared: SharedResults
    ) -> list[Entry]:
        """Complete those whose result is found; the others."""
        found = await shared.get_many([entry.key for entry in entries if entry.key is not None])
        new = []
        for entry in entries:
            known = None if entry.key is None else found.get(entry.key)
            if entry.key is None or known is None:
                new.append(entry)
            else:
                results.hold(entry.key, known)
                self._metrics.count("items_reused_total", model=self.model)
                self._complete(entry.owner, entry.index, known)
        return new

    async def _entries(self, parts: list[tuple[InFlight, int, AnyRequest]]) -> list[Entry]:
        started = self._clock.monotonic()
        loop = asyncio.get_running_loop()
        requests = [request for _, _, request in parts]
        async with self._attempts.counted(in_flight for in_flight, _, _ in parts):
            encoded = await loop.run_in_executor(self._thread, self._encoder.encode, requests)
        self._metrics.observe(
            "tokenize_seconds", self._clock.monotonic() - started, model=self.model
        )
        entries: list[Entry] = []
        for (in_flight, offset, request), result in zip(parts, encoded, strict=True):
            if isinstance(result, EmbedstreamError):
                self._fail(in_flight, result)
            else:
                # An item that is left out would keep its request open for ever.
                assert len(result.items) == request.n_items, "one entry per item"
                entries.extend(self._entries_of(in_flight, offset, result))
        return entries

    def _entries_of(self, in_flight: InFlight, offset: int, encoded: EncodedRequest) -> list[Entry]:
        in_flight.prompt = encoded.prompt
        now, items = self._clock.monotonic(), encoded.items
        entries = []
        for index, item in enumerate(items, offset):
            if not isinstance(item, EncodedItem):
                if offset and item.items:
                    item.items = tuple(i + offset for i in item.items)
                self._complete(in_flight, index, item)
                continue
            n_tokens = in_flight.tokens[index] = len(item.input_ids)
            in_flight.truncated[index] = item.truncated
            if self._results is None:
                entries.append(Entry(item, in_flight, index, now, n_tokens))
                continue
            key = key_of(self._maker, item)
            known = self._results.get(key)
            if known is None:
                entries.append(Entry(item, in_flight, index, now, n_tokens, key))
            else:
                self._metrics.count("items_reused_total", model=self.model)
                self._complete(in_flight, index, known)
        self._charge_tokens(in_flight, sum([entry.n_tokens for entry in entries]))
        return entries

    def close(self) -> None:
        """Stop the thread; a call in progress is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _slice_of(request: AnyRequest, start: int) -> AnyRequest:
    stop = start + SLICE_ITEMS
    if isinstance(request, EmbedRequest | ClassifyRequest):
        return msgspec.structs.replace(request, input=request.input[start:stop])
    return msgspec.structs.replace(request, documents=request.documents[start:stop])

"""Results in Redis: a second level behind the memory, shared by processes that compute the same.

Who calls it: the tokenizer asks for the items of bulk requests, a list at a time; whatever is computed is
put. `pipeline.app` opens it where `batching.result_cache_url` is set.
What must stay true: it never raises and never waits longer than `WAIT_S`; a server that is down, slow or
full is left alone for a while, said once; what cannot be proven whole, and to belong to its key, is not
served; keys are hashes, values are bytes that nothing executes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import structlog
from redis.exceptions import RedisError

from actors.ports import Clock, Metrics
from gpu.batch import Float32, Int32, ItemResult
from pipeline.transports.redis.connect import close_client, make_client
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis.results_options import WRITE_S

log = structlog.get_logger(__name__)

KEY_PREFIX = b"embedstream:result:"
MAGIC = b"esr1"
"""Of the form of a value; another form has another one."""
WAIT_S = 0.05
"""For the results of one list of items: about what one of them takes to compute."""
MAX_VALUE_BYTES = 256 * 1024
"""A larger result costs more on the wire than it is worth."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""Results that wait to be written; what comes then is not kept."""
WRITTEN_AT_ONCE = 256
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A result as bytes, little-endian. multivector: rows, and all their numbers."""

    dense: bytes | None
    scores: bytes | None
    sparse: tuple[bytes, bytes] | None
    multivector: tuple[int, bytes] | None
    spans: tuple[tuple[int, int], ...] | None


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Stored)


def to_value(key: bytes, result: ItemResult) -> bytes:
    """The result as one value: magic, a digest over key and body, body."""
    several = result.multivector
    body = _ENCODER.encode(
        _Stored(
            None if result.dense is None else _bytes(result.dense),
            None if result.scores is None else _bytes(result.scores),
            result.sparse and (result.sparse[0].astype("<i4").tobytes(), _bytes(result.sparse[1])),
            None if several is None else (len(several), _bytes(several)),
            result.spans,
        )
    )
    return MAGIC + _digest(key, body) + body


def from_value(key: bytes, value: object) -> ItemResult | None:
    """The result that a value holds; None for anything that is not whole, of this form and of this key."""
    if not isinstance(value, bytes) or len(value) > MAX_VALUE_BYTES or value[:4] != MAGIC:
        return None
    body = value[20:]
    if value[4:20] != _digest(key, body):
        return None
    try:
        stored = _DECODER.decode(body)
        sparse = None
        if stored.sparse is not None:
            ids: Int32 = np.frombuffer(stored.sparse[0], dtype="<i4")
            sparse = ids, _floats(stored.sparse[1])
            if len(ids) != len(sparse[1]) or (np.diff(ids) <= 0).any():
                return None
        several = None
        if stored.multivector is not None:
            several = _floats(stored.multivector[1]).reshape(stored.multivector[0], -1)
        result = ItemResult(
            dense=None if stored.dense is None else _floats(stored.dense),
            scores=None if stored.scores is None else _floats(stored.scores),
            sparse=sparse,
            multivector=several,
            spans=stored.spans,
        )
    except (msgspec.DecodeError, ValueError):
        return None
    parts = (result.dense, result.scores, sparse, several)
    return None if all(part is None for part in parts) else result


def _bytes(array: Float32) -> bytes:
    return array.astype("<f4", copy=False).tobytes()


def _floats(data: bytes) -> Float32:
    """Raises `ValueError` for numbers that are not finite, or none."""
    numbers: Float32 = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(numbers).all():
        raise ValueError("not finite")
    return numbers


def _digest(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=key).digest()


class _Breaker:
    """Leaves a server alone after a failure, longer after each one that follows."""

    def __init__(self, what: str, clock: Clock) -> None:
        self._what, self._clock = what, clock
        self._pause_s, self._until = 0.0, 0.0

    @property
    def open(self) -> bool:
        return self._clock.monotonic() < self._until

    def failed(self, reason: str) -> None:
        if not self._pause_s:
            log.warning("result_cache_unavailable", what=self._what, reason=reason)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._until = self._clock.monotonic() + self._pause_s

    def passed(self) -> None:
        if self._pause_s:
            log.info("result_cache_back", what=self._what)
        self._pause_s = 0.0


class RedisResults:
    """Implements `actors.result_cache.SharedResults`.

    ttl_s: how long a result is kept after it was computed.
    """

    def __init__(
        self, options: RedisOptions, *, ttl_s: int, clock: Clock, metrics: Metrics
    ) -> None:
        self._options, self._ttl_s, self._metrics = options, ttl_s, metrics
        self._client = make_client(options, connections=4)
        self._reading, self._writing = _Breaker("reading", clock), _Breaker("writing", clock)
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()

    async def get_many(self, keys: Sequence[bytes]) -> dict[bytes, ItemResult]:
        """See `SharedResults`. One MGET."""
        if not keys:
            return {}
        if self._reading.open:
            self._note("skipped", len(keys))
            return {}
        try:
            async with asyncio.timeout(WAIT_S):
                values = await self._client.mget([_name(key) for key in keys])
        except (RedisError, OSError, TimeoutError) as error:
            self._reading.failed(type(error).__name__)
            self._note("skipped", len(keys))
            return {}
        self._reading.passed()
        found = {}
        for key, value in zip(keys, values, strict=False):
            if value is not None:
                result = from_value(key, value)
                if result is not None:
                    found[key] = result
        n_odd = sum(value is not None for value in values) - len(found)
        for outcome, n in (
            ("hit", len(found)), ("refused", n_odd), ("miss", len(keys) - len(found) - n_odd)
        ):  # fmt: skip
            self._note(outcome, n)
        return found

    def put(self, key: bytes, result: ItemResult) -> None:
        """See `SharedResults`."""
        if self._writing.open or key in self._waiting:
            return
        value = to_value(key, result)
        if len(value) > MAX_VALUE_BYTES or self._waiting_bytes + len(value) > MAX_WAITING_BYTES:
            self._note("dropped", 1)
            return
        self._waiting[key] = value
        self._waiting_bytes += len(value)
        self._arrived.set()

    async def run(self) -> None:
        """Write what is put, in pipelines, until cancelled."""
        while True:
            await self._arrived.wait()
            batch: list[tuple[bytes, bytes]] = []
            while self._waiting and len(batch) < WRITTEN_AT_ONCE:
                key, value = self._waiting.popitem(last=False)
                self._waiting_bytes -= len(value)
                batch.append((key, value))
            if not self._waiting:
                self._arrived.clear()
            await self._write(batch)

    async def _write(self, batch: list[tuple[bytes, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, value in batch:
            pipeline.set(_name(key), value, ex=self._ttl_s)
        try:
            async with asyncio.timeout(WRITE_S):
                answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError) as error:
            answers = [error]
        refused = next((one for one in answers if isinstance(one, Exception)), None)
        if refused is None:
            self._writing.passed()
            self._note("stored", len(batch))
        else:  # also a server that is full and drops nothing: it answers OOM
            self._writing.failed(type(refused).__name__)
            self._note("dropped", len(batch))

    def _note(self, outcome: str, n: int) -> None:
        if n:
            self._metrics.count("result_cache_total", n, outcome=outcome)

    async def aclose(self) -> None:
        """Disconnect, in bounded time; what waits is not written."""
        await close_client(self._client, WRITE_S)


def _name(key: bytes) -> bytes:
    return KEY_PREFIX + key.hex().encode()

"""How many requests share one call of the encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.attempts import Attempts
from actors.coalescer import Coalescer
from actors.messages import InFlight
from actors.packing import PackingPolicy
from actors.ports import NoMetrics, SystemClock
from actors.tokenizer import SHORT_BYTES, SHORT_ITEMS, SLICE_ITEMS, Tokenizer
from gpu.batch import EncodedRequest
from schemas.errors import EmbedstreamError
from schemas.requests import AnyRequest, EmbedRequest, Text
from tests.support.fakes import FakeEncoder
from tests.support.stations import in_flight


class CountingEncoder(FakeEncoder):
    """Remembers how many items each call had."""

    def __init__(self) -> None:
        super().__init__(max_tokens=512)
        self.sizes: list[int] = []

    def encode(self, requests: Sequence[AnyRequest]) -> list[EncodedRequest | EmbedstreamError]:
        self.sizes.append(sum(request.n_items for request in requests))
        return super().encode(requests)


async def sizes_of_calls(requests: list[InFlight]) -> list[int]:
    """Items of each call, once every item is queued."""
    encoder = CountingEncoder()
    clock, queued = SystemClock(), asyncio.Event()

    def fail(one: InFlight, error: EmbedstreamError) -> None:
        raise AssertionError(f"nothing fails here: {error}")

    coalescer = Coalescer(
        {"fake": PackingPolicy(max_batch_tokens=512)},
        max_queued_tokens=10**6,
        clock=clock,
        fail=fail,
    )
    n_wanted, n_queued = sum(len(one.outcomes) for one in requests), 0

    def charge(one: InFlight, tokens: int) -> None:
        nonlocal n_queued
        n_queued += tokens  # one word, one token
        if n_queued == n_wanted:
            queued.set()

    unused: Any = fail
    tokenizer = Tokenizer(
        "fake", encoder, coalescer, attempts=Attempts(), charge_tokens=charge, complete=unused,
        fail=fail, clock=clock, metrics=NoMetrics(),
    )  # fmt: skip
    for one in requests:
        tokenizer.put_nowait(one)
    async with asyncio.timeout(20):
        run = asyncio.ensure_future(tokenizer.run("bulk"))
        await queued.wait()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    tokenizer.close()
    return encoder.sizes


def request_of(n_items: int, n_bytes: int) -> InFlight:
    one = in_flight(EmbedRequest(id="r", input=(Text("word"),) * n_items))
    one.cost_bytes = n_bytes
    return one


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([(1, 40)] * 300, [SHORT_ITEMS, 300 - SHORT_ITEMS]),
        ([(32, 900)] * 10, [SHORT_ITEMS, 320 - SHORT_ITEMS]),
        ([(1, SHORT_BYTES // 100)] * 200, [101, 99]),
        ([(1, SHORT_BYTES)] * 130, [SLICE_ITEMS, SLICE_ITEMS, 2]),
        ([(200, 900)], [SLICE_ITEMS] * 3 + [8]),
    ],
)
async def test_short_records_share_a_call_and_long_ones_are_cut_into_slices(
    requests: list[tuple[int, int]], sizes: list[int]
) -> None:
    assert await sizes_of_calls([request_of(*one) for one in requests]) == sizes

"""The coalescer over several models."""

from __future__ import annotations

import pytest

from actors.coalescer import Coalescer
from actors.packing import PackingPolicy
from tests.support.fakes import ManualClock
from tests.support.stations import entry


@pytest.mark.parametrize(("floor", "turns"), [(0.2, 5), (0.5, 2)])
async def test_interactive_work_of_one_model_does_not_starve_bulk_of_another(
    floor: float, turns: int
) -> None:
    """A model that waits gets at least every n-th batch, n = 1 / bulk_floor."""
    policy = PackingPolicy(max_batch_tokens=100, bulk_floor=floor)
    coalescer = Coalescer(
        {"busy": policy, "other": policy},
        max_queued_tokens=10**6,
        clock=ManualClock(),
        fail=lambda owner, error: None,
    )
    await coalescer.put("other", [entry(100) for _ in range(40)], "bulk")
    chosen = []
    for _ in range(40):
        await coalescer.put("busy", [entry(100)], "interactive")
        selected = coalescer.try_next_batch(idle=True)
        assert selected is not None
        chosen.append(selected.model)
    assert 40 // (turns + 1) <= chosen.count("other") <= 40 // turns
    assert chosen[0] == "busy"

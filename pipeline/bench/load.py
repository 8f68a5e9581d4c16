"""How fast is it, and how late at a given rate: a closed loop, then open loops.

Who calls it: `pipeline.cli.bench`.
What must stay true: in an open loop, requests leave when their time has come, whether or not others have
been answered, and a latency counts from that time: a stall is seen by all whom it delays. What was not
answered is counted, never left out.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

Ask = Callable[[str], Awaitable[int]]
"""Asks for one text; its tokens. Raises for a failure or when no answer comes in time."""

CONCURRENT = 256
"""Requests in flight in the closed loop: several packs of short texts."""
MAX_OPEN = 20_000
"""Requests in flight in an open loop, above which the rest of a step is not sent."""


@dataclass(slots=True)
class Step:
    """One stretch of load.

    rate: texts per second that were asked for, None in the closed loop. latencies_s: of answered
    requests, from the moment they were due. seconds: from the first request to the last answer.
    """

    rate: float | None
    seconds: float = 0.0
    tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0
    first_failure: str = ""
    unsent: int = 0

    @property
    def texts_per_s(self) -> float:
        """Answered ones."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of answered ones."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def latency_s(self, share: float) -> float | None:
        """The latency that this share of the requests kept (nearest rank); None without answers.

        A request that failed was not answered within any time: it stands behind all others.
        """
        ordered = sorted(self.latencies_s)
        n = len(ordered) + self.failed + self.unsent
        rank = max(1, -(-int(share * n * 1000) // 1000))
        return ordered[rank - 1] if 0 < rank <= len(ordered) else None

    def note_failure(self, error: BaseException) -> None:
        """One more that was not answered."""
        self.failed += 1
        self.first_failure = self.first_failure or f"{type(error).__name__}: {error}"


async def closed_loop(
    ask: Ask, texts: Iterator[str], seconds: float, concurrent: int = CONCURRENT
) -> Step:
    """So many callers, each of which asks again when it has its answer: the rate that is possible."""
    step = Step(None)
    started = time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() - started < seconds:
            await _one(ask, next(texts), time.perf_counter(), step)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrent):
            group.create_task(caller())
    step.seconds = time.perf_counter() - started
    return step


async def open_loop(
    ask: Ask, texts: Iterator[str], rate: float, seconds: float, seed: int = 0
) -> Step:
    """Requests at random moments (Poisson), `rate` texts a second on average."""
    step = Step(rate)
    rng = random.Random(seed)
    started = time.perf_counter()
    n_open = 0

    def ended(_: object) -> None:
        nonlocal n_open
        n_open -= 1

    due = started + rng.expovariate(rate)
    async with asyncio.TaskGroup() as group:
        while due - started < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if n_open >= MAX_OPEN:
                step.unsent += 1
            else:
                n_open += 1
                group.create_task(_one(ask, next(texts), due, step)).add_done_callback(ended)
            due += rng.expovariate(rate)
    step.seconds = time.perf_counter() - started
    return step


async def _one(ask: Ask, text: str, due: float, step: Step) -> None:
    try:
        tokens = await ask(text)
    except (ValueError, OSError, TimeoutError) as error:
        step.note_failure(error)
        return
    step.tokens += tokens
    step.latencies_s.append(time.perf_counter() - due)

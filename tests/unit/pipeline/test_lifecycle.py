"""Signals to stop plan to exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from pipeline import lifecycle
from pipeline.lifecycle import ExitStatus, StopSignal, exit_status_for, watch_signals


def test_exit_statuses_are_distinct() -> None:
    """G01: drained, budget exceeded, fatal and forced can be told apart."""
    assert exit_status_for(drained=True) == ExitStatus.OK == 0
    assert exit_status_for(drained=False) == ExitStatus.DRAIN_EXCEEDED == 3
    assert exit_status_for(drained=False, fatal=True) == ExitStatus.FATAL == 4
    assert exit_status_for(drained=True, fatal=True) == ExitStatus.FATAL
    assert exit_status_for(drained=False, forced_by=signal.SIGINT) == 130
    assert exit_status_for(drained=False, forced_by=signal.SIGTERM) == 143
    assert len({int(status) for status in ExitStatus}) == len(list(ExitStatus)) == 7


async def test_first_request_drains_second_signal_forces() -> None:
    """G01."""
    stop = StopSignal(25.0)
    assert not stop.requested and stop.deadline is None
    assert stop.request("signal SIGTERM", signum=signal.SIGTERM) == "drain"
    deadline = stop.deadline
    assert deadline is not None and 0 < deadline.remaining_s() <= 25.0
    assert stop.requested and not stop.forced and stop.reason == "signal SIGTERM"
    await asyncio.wait_for(stop.wait(), 5)
    assert stop.request("signal SIGINT", signum=signal.SIGINT) == "force"
    assert stop.forced and stop.forced_by == signal.SIGINT
    assert stop.deadline is deadline  # the budget is not extended
    await asyncio.wait_for(stop.wait_forced(), 5)
    assert stop.request("again", signum=signal.SIGINT) == "ignored"


async def test_a_request_from_inside_never_forces() -> None:
    stop = StopSignal(1.0)
    assert stop.request("sources are exhausted") == "drain"
    assert stop.request("an executor died") == "ignored"
    assert not stop.forced and stop.reason == "sources are exhausted"


async def test_real_signals_reach_the_plan_and_handlers_are_restored() -> None:
    """G01."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = StopSignal(5.0)
    actions: list[tuple[str, int]] = []
    ended: list[int] = []
    with watch_signals(
        stop, on_action=lambda a, s: actions.append((a, s)), end_process=ended.append
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 5)
        assert not stop.forced
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait_forced(), 5)
    assert actions == [("drain", signal.SIGTERM), ("force", signal.SIGINT)]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
        timer.cancel()


async def test_a_forced_stop_ends_the_process_even_when_something_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G01."""
    monkeypatch.setattr(lifecycle, "FORCE_GRACE_S", 0.0)
    ended = threading.Event()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    with watch_signals(StopSignal(5.0), end_process=end):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(10)  # the loop is blocked right here
    assert statuses == [143]


SCRIPT = """
import asyncio, sys, threading
from pipeline import lifecycle
lifecycle.FORCE_GRACE_S = 0.1

async def main(mode):
    stop = lifecycle.StopSignal(0.2 if mode == "slow" else 30.0)
    with lifecycle.watch_signals(stop):
        print("up", flush=True)
        await stop.wait()
        print("draining", flush=True)
        if mode == "stuck":
            threading.Event().wait()  # native code that nothing cancels
        drained = True
        if mode == "slow":
            try:
                async with asyncio.timeout(stop.deadline.remaining_s()):
                    await asyncio.Event().wait()
            except TimeoutError:
                drained = False
    return lifecycle.exit_status_for(drained=drained, forced_by=stop.forced_by)

sys.exit(asyncio.run(main(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("mode", "signals", "status"),
    [
        ("quick", [signal.SIGTERM], 0),
        ("quick", [signal.SIGINT], 0),
        ("slow", [signal.SIGTERM], 3),
        ("stuck", [signal.SIGTERM, signal.SIGINT], 130),
        ("stuck", [signal.SIGINT, signal.SIGTERM], 143),
    ],
)
def test_exit_status_of_a_real_process(
    mode: str, signals: list[signal.Signals], status: int
) -> None:
    """G01: exit 0 when drained, 3 beyond the budget, at once on the second signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), mode], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signals[0])
        assert process.stdout.readline() == "draining\n"
        for extra in signals[1:]:
            process.send_signal(extra)
        assert process.wait(20) == status
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]

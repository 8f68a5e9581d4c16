"""A service in a process of its own, to be killed by fault tests.

Called as ``python -m tests.support.service_main CONFIG.json``; prints one line ``ready`` when it is.
CONFIG: {"routes": [{"name", "source", "lane"}], "forward_s": seconds per batch, "drain_budget_s",
"health_port", "poison": a text whose presence in a batch kills the process, "kill_at": [function as
"module:Class.name", "before" or "after", the number of the call that kills]}. The model is the fake one: what is tested here is delivery, not numbers.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import structlog

from gpu.batch import PackedBatch
from pipeline.app import App
from pipeline.lifecycle import StopSignal, watch_signals
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import BatchingSettings, HealthSettings, LifecycleSettings, Settings
from tests.support.documents import route_settings
from tests.support.fakes import FakeRunner, fake_ids


def build(config: dict[str, Any]) -> App:
    """The app of one config."""
    forward_s = float(config.get("forward_s", 0.0))

    poison = fake_ids(config["poison"])[0] if "poison" in config else None

    def slow(batch: PackedBatch) -> None:
        if poison is not None and poison in batch.input_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(forward_s)

    runner = FakeRunner(
        max_batch_tokens=int(config.get("max_batch_tokens", 64)), before_forward=slow
    )
    settings = Settings(
        routes=tuple(map(route_settings, config["routes"])),
        # Its texts share ids, and what is measured or killed here is a forward for each of them.
        batching=BatchingSettings(result_cache_bytes=0),
        lifecycle=LifecycleSettings(drain_budget_s=float(config.get("drain_budget_s", 20.0))),
        health=HealthSettings(port=int(config.get("health_port", 0))),
    )
    return App(
        settings,
        metrics=PrometheusMetrics(),
        runner_factories={"fake": lambda: runner},
        serve_health=True,
    )


def kill_at(name: str, when: str, number: int) -> None:
    """SIGKILL ourselves before or after that call of a function."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner: Any = import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    function, calls = getattr(owner, last), itertools.count(1)

    def die_if(moment: str, call: int) -> None:
        if moment == when and call >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    def plain(*given: Any, **named: Any) -> Any:
        call = next(calls)
        die_if("before", call)
        result = function(*given, **named)
        die_if("after", call)
        return result

    async def awaited(*given: Any, **named: Any) -> Any:
        call = next(calls)
        die_if("before", call)
        result = await function(*given, **named)
        die_if("after", call)
        return result

    setattr(owner, last, awaited if inspect.iscoroutinefunction(function) else plain)


async def serve(config: dict[str, Any]) -> int:
    """Run until a signal, like `embedstream serve`."""
    stop = StopSignal(float(config.get("drain_budget_s", 20.0)))
    app = build(config)
    with watch_signals(stop):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(app.run(stop))
            ready = group.create_task(app.ready.wait())
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                print("ready", flush=True)
            ready.cancel()
    return int(running.result())


def main() -> None:
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(20),
    )
    config = json.loads(Path(sys.argv[1]).read_text())
    if "kill_at" in config:
        kill_at(*config["kill_at"])
    sys.exit(asyncio.run(serve(config)))


if __name__ == "__main__":
    main()

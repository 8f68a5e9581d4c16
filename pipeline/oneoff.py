"""A whole service inside this process, for as long as a block runs.

Who calls it: the one-off commands (`embed`, `rerank`, `classify`), the quick demo, tests.
What must stay true: it is the same `App` as `serve` runs, on the in-process transport; errors come out
as they were raised; leaving the block drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from actors.ports import Metrics
from gpu.batch import Runner
from pipeline.app import App
from pipeline.lifecycle import (
    CutShort,
    ExitStatus,
    OperatorError,
    StopSignal,
    beside,
    errors_as_value,
    race,
)
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports.inproc.broker import InprocBroker, InprocReply
from pipeline.transports.inproc.sink import InprocSink
from pipeline.transports.inproc.source import InprocSource
from pipeline.transports.registry import Transport


class InprocService:
    """A service inside this process: send a record, get its reply records."""

    def __init__(self, app: App, broker: InprocBroker, ended: asyncio.Event) -> None:
        self.app = app
        self._broker = broker
        self._ended = ended

    async def request(
        self, body: bytes | None, headers: Mapping[str, bytes] | None = None
    ) -> list[InprocReply]:
        """Every reply record of one request record, in order (several when it was split).

        Raises `OperatorError` when the service ends before it has answered.
        """
        try:
            return await race(self._broker.submit(body, headers), self._ended.wait())
        except CutShort:
            raise OperatorError(
                "the service ended before it answered; see the log", exit_status=ExitStatus.FATAL
            ) from None


@asynccontextmanager
async def run_inproc(
    settings: Settings,
    *,
    metrics: Metrics | None = None,
    runner_factories: Mapping[str, Callable[[], Runner]] | None = None,
    broker: InprocBroker | None = None,
) -> AsyncIterator[InprocService]:
    """A running service without a broker, for one-off commands, the quick demo and tests.

    `settings.routes` is replaced by one in-process route. Raises what `App.run` raises.
    """
    route = RouteSettings(name="inproc", source="inproc://embedstream", lane="bulk")
    settings = msgspec.structs.replace(settings, routes=(route,))
    broker = broker or InprocBroker()
    transport = Transport(InprocSource(broker), InprocSink(broker))
    await transport.source.open()
    app = App(
        settings,
        metrics=metrics,
        transports={route.name: transport},
        runner_factories=runner_factories,
    )
    stop = StopSignal(settings.lifecycle.drain_budget_s)
    ended = asyncio.Event()
    async with beside(errors_as_value(_run_to_end(app, stop, ended)), app.ready.wait()) as (
        running,
        ready,
    ):
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not running.done():
                yield InprocService(app, broker, ended)
        finally:
            stop.request("the one-off run is over")
            await asyncio.wait({running})
            _, error = running.result()
            if error is not None:
                raise error


async def _run_to_end(app: App, stop: StopSignal, ended: asyncio.Event) -> None:
    try:
        status = await app.run(stop)
    finally:
        ended.set()
    if status is ExitStatus.FATAL:
        raise OperatorError("the model failed for good; see the log", exit_status=status)

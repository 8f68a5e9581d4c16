"""The application. **Start reading here**: a service connects, loads, builds its graph, runs, stops.

    connect     every route's transport: a wrong address shows at once, not after the models
    load        every model, warmed up (`pipeline.model_pool`)
    build       the stations a request passes (`pipeline.graph`); sources hand out from here on
    run         until a request to stop, the end of all sources, or a fault
    stop        intake off, drain, settle, leave groups, close: in this order under one `Deadline`

Who calls it: `embedstream serve` and `up`; the one-off commands through `pipeline.oneoff`.
What must stay true: nothing is taken from a broker before every model answers; whatever is not
settled when the process ends is delivered again to somebody; the exit status tells which of the two
it was.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import structlog

from actors.ports import Clock, Deadline, Metrics, NoMetrics, SystemClock
from actors.route import Route
from actors.supervisor import Supervisor
from gpu.batch import ExecutorDied, ModelInfo, Runner
from pipeline.graph import Graph, build_graph, build_route
from pipeline.indexing.route import IndexingRoutes, write_policy
from pipeline.indexing.sinks.registry import is_collection
from pipeline.lifecycle import (
    CutShort,
    ExitStatus,
    OperatorError,
    StopSignal,
    exit_status_for,
    race,
)
from pipeline.model_pool import load_models
from pipeline.observe import views
from pipeline.observe.http import HealthServer, HealthViews
from pipeline.observe.readiness import Readiness, readiness
from pipeline.settings.load import RouteSettings, Settings, route_accepts, route_options
from pipeline.transports.delivery import HeldDelivery
from pipeline.transports.registry import REPLY, Transport, limit_notices, open_transport
from pipeline.transports.source import BrokerSource

log = structlog.get_logger(__name__)

DRAIN_SHARE = 0.8
"""Of the drain budget may be planned for; the rest is for publishing, settling and a rate that falls."""
CLOSE_BUDGET_S = 5.0
"""For leaving groups and closing connections after the drain, whatever state the brokers are in."""


class App:
    """One service: a model pool, its executor, and the routes that share them.

    Args:
        settings: checked settings (`pipeline.settings.load.load`).
        metrics: where counters go; `NoMetrics` when absent.
        transports: open transports by route name, instead of opening the routes' URLs.
        runner_factories: runners by model name, instead of loading the settings' models.
        serve_health: open the HTTP port of `settings.health` before anything else; the process is
            this service, and what was loaded is kept from garbage collection while it runs.
        health_listener: a bound socket to answer on instead of that port (`pipeline.processes`).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        transports: Mapping[str, Transport] | None = None,
        runner_factories: Mapping[str, Callable[[], Runner]] | None = None,
        serve_health: bool = False,
        health_listener: socket.socket | None = None,
    ) -> None:
        self.settings = settings
        self.metrics: Metrics = metrics or NoMetrics()
        self.clock: Clock = clock or SystemClock()
        self.phase = "starting"
        self.ready = asyncio.Event()
        self.graph: Graph | None = None
        self.supervisor = Supervisor(
            clock=self.clock, metrics=self.metrics, fatal_errors=(ExecutorDied,)
        )
        self.health = HealthServer(
            settings.health,
            HealthViews(self.readiness, self.statistics, views.exposition_of(self.metrics)),
        )
        self._serve_health = serve_health
        self._health_listener = health_listener
        self._transports = transports
        self._runner_factories = runner_factories

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """Loaded models by name; none before the graph stands."""
        return {} if self.graph is None else self.graph.models.infos

    async def run(self, stop: StopSignal) -> ExitStatus:
        """Serve until `stop` is requested, every source is exhausted, or something fails for good.

        Raises `OperatorError` when models or brokers cannot be had; nothing was taken then.
        """
        # Closed in reverse: sources leave their groups while their tasks still run, then the tasks
        # end, and only then the threads that they use.
        async with AsyncExitStack() as resources:
            resources.callback(self._close_graph)
            await resources.enter_async_context(self.supervisor)
            if self._serve_health:
                await self.health.open(self._health_listener)
                resources.push_async_callback(_close_quietly, self.health.aclose, "health")
            drained = await self._serve(stop, resources)
        self.phase = "stopped"
        status = exit_status_for(
            drained=drained, fatal=self.supervisor.fatal is not None, forced_by=stop.forced_by
        )
        log.info("service_stopped", status=status.name, reason=stop.reason)
        return status

    async def _serve(self, stop: StopSignal, resources: AsyncExitStack) -> bool:
        """Start, run and stop; true when nothing was left behind."""
        if not await self._until(self._start(resources), stop.wait):
            return self.supervisor.fatal is None
        assert self.graph is not None
        if self._serve_health:
            resources.callback(gc.unfreeze)
            gc.freeze()  # a full collection would walk all that was loaded: 0.2 s in which nothing else runs
        self.phase = "ready"
        self.ready.set()
        log.info("service_ready", models=sorted(self.models), routes=len(self.graph.routes))
        await self._until(_exhausted(self.graph), stop.wait)
        return await self._stop(stop, self.graph)

    # --- starting --------------------------------------------------------------------------------

    async def _start(self, resources: AsyncExitStack) -> None:
        self._enter("connecting")
        indexing = IndexingRoutes(
            write_policy(self.settings.publish), clock=self.clock, metrics=self.metrics
        )
        await indexing.prepare(self.settings.routes)
        transports = [await self._connect(route, resources) for route in self.settings.routes]
        self._enter("loading models")
        models = await load_models(
            self.settings, factories=self._runner_factories, on_phase=self._enter
        )
        try:
            routes = [
                build_route(self.settings, route, transport, models, indexing, clock=self.clock)
                for route, transport in zip(self.settings.routes, transports, strict=True)
            ]
        except OperatorError:
            models.close()
            raise
        shared = None
        if self.settings.batching.result_cache_url is not None:
            from pipeline.transports.redis.results import RedisResults
            from pipeline.transports.redis.results_options import results_options

            shared = RedisResults(
                results_options(self.settings.batching.result_cache_url),
                ttl_s=self.settings.batching.result_cache_ttl_s,
                clock=self.clock,
                metrics=self.metrics,
            )
            resources.push_async_callback(_close_quietly, shared.aclose, "results")
        self.graph = build_graph(
            self.settings,
            routes,
            models,
            supervisor=self.supervisor,
            clock=self.clock,
            metrics=self.metrics,
            shared=shared,
        )
        for route in routes:
            await self._open_destination(route, resources)
        self.graph.start(self.supervisor)

    async def _connect(self, route: RouteSettings, resources: AsyncExitStack) -> Transport:
        if self._transports is not None:
            transport = self._transports[route.name]
        else:
            self._enter(f"connecting route {route.name}")
            try:
                options = route_options(self.settings, route)
                transport = await open_transport(
                    options,
                    destination=(route.report_to or REPLY)
                    if is_collection(route.destination)
                    else route.destination,
                    exactly_once=route.delivery == "exactly_once",
                    clock=self.clock,
                    metrics=self.metrics,
                )
                for notice in await limit_notices(options, route_accepts(self.settings, route)):
                    log.warning("limits_differ", route=route.name, notice=notice)
            except (ConnectionError, ValueError) as error:
                raise OperatorError(f"route {route.name}: {error}") from error
        resources.push_async_callback(_close_quietly, transport.sink.aclose, "sink")
        resources.push_async_callback(_close_quietly, transport.source.aclose, "source")
        return transport

    async def _open_destination(self, route: Route, resources: AsyncExitStack) -> None:
        resources.push_async_callback(_close_quietly, route.destination.aclose, "destination")
        try:
            await route.destination.open(self.models)
        except (ConnectionError, ValueError) as error:
            raise OperatorError(f"route {route.name}: {error}") from error

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            log.info("phase", phase=phase)

    # --- stopping --------------------------------------------------------------------------------

    async def _stop(self, stop: StopSignal, graph: Graph) -> bool:
        """Intake off, drain, publish, settle; true when nothing was left. One budget for all."""
        self.phase = "draining"
        stop.request("all sources are exhausted")
        deadline = stop.deadline
        assert deadline is not None
        for route in graph.routes:
            route.source.stop_intake()
        drained = False
        if self.supervisor.fatal is None:
            drained = await self._until(_drain(graph, deadline), stop.wait_forced, deadline)
        if not drained:
            _release_rest(graph)
        # Settles are made durable also after a failed drain: what was answered must not come again.
        flush_deadline = Deadline(max(deadline.remaining_s(), 1.0))
        for route in graph.routes:
            await _close_quietly(partial(route.source.flush, flush_deadline), "flush")
        return drained

    def _close_graph(self) -> None:
        if self.graph is not None:
            self.graph.close()

    async def _until(
        self,
        work: Coroutine[Any, Any, None],
        stopped: Callable[[], Coroutine[Any, Any, None]],
        deadline: Deadline | None = None,
    ) -> bool:
        """Run `work` until it ends (true), or `stopped`, a fatal actor or the deadline cuts it short."""
        timeout_s = None if deadline is None else deadline.remaining_s()
        try:
            await race(work, stopped(), self.supervisor.wait_fatal(), timeout_s=timeout_s)
        except CutShort:
            return False
        return True

    # --- looking in ------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """The verdict of `/ready`."""
        inputs = views.readiness_inputs(self.phase, self.graph, self.supervisor)
        return readiness(inputs, self.clock.monotonic(), self.settings.health)

    def statistics(self) -> dict[str, Any]:
        """A snapshot for `/statistics`, the demo's summary and tests. Plain values."""
        return views.statistics(self.phase, self.graph, self.supervisor)


async def _exhausted(graph: Graph) -> None:
    """Until every source has said that nothing more will come (files, one-off runs)."""
    for ingress in graph.ingresses:
        await ingress.closed.wait()


async def _drain(graph: Graph, deadline: Deadline) -> None:
    # What cannot be finished is others' work now, not when the budget is over.
    # Lines of a file are nobody else's.
    shared = [route.source for route in graph.routes if isinstance(route.source, BrokerSource)]
    beyond = graph.table.beyond(deadline.remaining_s() * DRAIN_SHARE) if shared else 0
    released = 0
    if beyond:
        released = graph.egress.withdraw(
            lambda one: isinstance(one, HeldDelivery) and any(map(one.is_of, shared)),
            at_most=beyond,
        )
    log.info(
        "draining",
        in_flight=len(graph.table),
        released=released,
        budget_s=round(deadline.remaining_s(), 1),
    )
    await _exhausted(graph)
    await graph.table.wait_empty()
    await graph.egress.wait_quiet()


def _release_rest(graph: Graph) -> None:
    left = list(graph.table)
    if left:
        log.warning("released_unfinished", n_requests=len(left))
    for in_flight in left:
        in_flight.closed = True
        for delivery in in_flight.deliveries:
            delivery.release("stopped before the answer was complete")
    graph.egress.close()  # not each tried, and said, once the sinks are closed


async def _close_quietly(close: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Close in bounded time; a broker that is gone must not keep us."""
    try:
        async with asyncio.timeout(CLOSE_BUDGET_S):
            await close()
    except Exception as error:  # noqa: BLE001  boundary: closing is best effort, and said
        log.warning("close_failed", what=what, error_type=type(error).__name__)

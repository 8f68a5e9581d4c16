"""The application. **Start reading here**: the graph is built in the order a request passes it.

    source -> ingress -> tokenizer -> coalescer -> dispatcher -> executor -> egress -> sink, settle

Who calls it: `embedstream serve` and `up`; the one-off commands through `pipeline.oneoff`.
What must stay true: nothing is taken from a broker before every model answers; stopping runs the
same steps in order under one `Deadline`; whatever is not settled when the process ends is delivered
again to somebody; the exit status tells which of the two it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import structlog

from actors.admission import Admission, LaneBudget
from actors.attempts import Attempts
from actors.coalescer import Coalescer
from actors.decoder import WireDecoder
from actors.dispatcher import Dispatcher, ExecutorDied
from actors.egress import Egress
from actors.housekeeping import Housekeeping
from actors.in_flight import InFlightTable
from actors.ingress import Ingress
from actors.packing import PackingPolicy
from actors.ports import Clock, Deadline, Metrics, NoMetrics, SystemClock
from actors.publish import PublishPolicy, ReplyDestination
from actors.route import Route
from actors.supervisor import NO_RESTART, Supervisor
from actors.tokenizer import Tokenizer
from gpu.batch import ModelInfo, Runner
from gpu.executor import ModelExecutor
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal, exit_status_for
from pipeline.model_pool import LoadedModels, load_models
from pipeline.observe.http import HealthServer, Readiness
from pipeline.observe.views import app_readiness, app_statistics, health_views
from pipeline.settings.load import RouteSettings, Settings, route_options
from pipeline.transports.registry import Transport, open_transport
from schemas.requests import LANES, TASKS, Task

log = structlog.get_logger(__name__)

CLOSE_BUDGET_S = 5.0
"""For leaving groups and closing connections after the drain, whatever state the brokers are in."""


class App:
    """One service: a model pool, its executor, and the routes that share them.

    Args:
        settings: checked settings (`pipeline.settings.load.load`).
        metrics: where counters go; `NoMetrics` when absent.
        transports: open transports by route name, instead of opening the routes' URLs.
        runner_factories: runners by model name, instead of loading the settings' models.
        serve_health: open the HTTP port of `settings.health` before anything else.
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
    ) -> None:
        self.settings = settings
        self.metrics: Metrics = metrics or NoMetrics()
        self.clock: Clock = clock or SystemClock()
        self.phase = "starting"
        self.ready = asyncio.Event()
        self.models: dict[str, ModelInfo] = {}
        self.routes: list[Route] = []
        self.executor: ModelExecutor | None = None
        self.dispatcher: Dispatcher | None = None
        self.housekeeping: Housekeeping | None = None
        self.table: InFlightTable | None = None
        self.coalescer: Coalescer | None = None
        self.supervisor: Supervisor | None = None
        self.health = HealthServer(settings.health, health_views(self))
        self._serve_health = serve_health
        self._transports = transports
        self._runner_factories = runner_factories
        self._loaded: LoadedModels | None = None
        self._ingresses: list[Ingress] = []
        self._egress: Egress | None = None

    # --- running ---------------------------------------------------------------------------------

    async def run(self, stop: StopSignal) -> ExitStatus:
        """Serve until `stop` is requested, every source is exhausted, or something fails for good.

        Raises `OperatorError` when models or brokers cannot be had; nothing was taken then.
        """
        drained, failed = False, None
        async with Supervisor(
            clock=self.clock, metrics=self.metrics, fatal_errors=(ExecutorDied,)
        ) as supervisor:
            self.supervisor = supervisor
            # Sources leave their groups while their tasks still run: resources close first.
            async with AsyncExitStack() as resources:
                try:
                    drained = await self._serve(stop, supervisor, resources)
                except Exception as error:  # noqa: BLE001  raised below, outside the TaskGroup
                    failed = error
        if failed is not None:
            raise failed
        self.phase = "stopped"
        status = exit_status_for(
            drained=drained, fatal=supervisor.fatal is not None, forced_by=stop.forced_by
        )
        log.info("service_stopped", status=status.name, reason=stop.reason)
        return status

    async def _serve(
        self, stop: StopSignal, supervisor: Supervisor, resources: AsyncExitStack
    ) -> bool:
        if self._serve_health:
            await self.health.open()
            resources.push_async_callback(_close_quietly, self.health.aclose, "health")
        start = self._start(supervisor, resources)
        if not await self._until(stop, supervisor, start, on_stop="return"):
            return supervisor.fatal is None
        self.phase = "ready"
        self.ready.set()
        log.info("service_ready", models=sorted(self.models), routes=len(self.routes))
        await self._until(stop, supervisor, self._exhausted(), on_stop="return")
        return await self._stop(stop, supervisor)

    async def _start(self, supervisor: Supervisor, resources: AsyncExitStack) -> None:
        # Brokers first: a wrong address shows at once, not after the models have loaded. Nothing
        # is taken before a source's `run` starts, at the end of `_build`.
        self.phase = "connecting"
        resources.callback(self._close_models)  # last: sources leave their groups before that
        transports = [
            await self._open_transport(route, resources) for route in self.settings.routes
        ]
        self.phase = "loading models"
        loaded = await load_models(
            self.settings, factories=self._runner_factories, on_phase=self._on_phase
        )
        self._loaded = loaded
        self.executor, self.models = loaded.executor, loaded.infos
        self.routes = [
            self._route(route, transport)
            for route, transport in zip(self.settings.routes, transports, strict=True)
        ]
        for route in self.routes:
            resources.push_async_callback(_close_quietly, route.destination.aclose, "destination")
            await route.destination.open(self.models)
        self._build(supervisor, loaded)

    def _build(self, supervisor: Supervisor, loaded: LoadedModels) -> None:
        """The graph, last station first, so that each finds the next one running."""
        settings, clock, metrics = self.settings, self.clock, self.metrics
        admission = Admission({lane: _lane_budget(settings, lane) for lane in LANES})
        table = self.table = InFlightTable(admission)
        attempts = Attempts()
        policy = PublishPolicy(
            max_concurrent=settings.publish.max_concurrent,
            attempts=settings.publish.attempts,
            first_backoff_s=settings.publish.backoff_ms / 1000,
            max_backoff_s=settings.publish.max_backoff_ms / 1000,
        )
        egress = self._egress = Egress(
            table,
            self.models,
            policy=policy,
            max_waiting=sum(b.max_requests for b in admission.budgets.values()),
            clock=clock,
            metrics=metrics,
        )
        coalescer = self.coalescer = Coalescer(
            {name: _packing_policy(settings, info) for name, info in self.models.items()},
            max_queued_tokens=max(b.max_tokens for b in admission.budgets.values()),
            clock=clock,
            fail=egress.fail,
        )
        dispatcher = self.dispatcher = Dispatcher(
            coalescer,
            loaded.executor,
            spawn=supervisor.spawn,
            attempts=attempts,
            complete=egress.complete,
            clock=clock,
            metrics=metrics,
        )
        tokenizers = {
            name: Tokenizer(
                name,
                runner.encoder,
                coalescer,
                attempts=attempts,
                charge_tokens=table.charge_tokens,
                complete=egress.complete,
                fail=egress.fail,
                clock=clock,
                metrics=metrics,
            )
            for name, runner in loaded.runners.items()
        }
        self.housekeeping = Housekeeping(
            table,
            coalescer,
            n_running=lambda: dispatcher.n_out,
            fail=egress.fail,
            clock=clock,
            metrics=metrics,
        )
        self._ingresses = [
            Ingress(
                route,
                admission=admission,
                table=table,
                tokenizers=tokenizers,
                infos=self.models,
                egress=egress,
                clock=clock,
                metrics=metrics,
            )
            for route in self.routes
        ]

        for route in self.routes:
            supervisor.start(f"destination.{route.name}", route.destination.run)
            for number in range(route.destination.max_concurrent or policy.max_concurrent):
                supervisor.start(f"publisher.{route.name}.{number}", _bind(egress.run, route))
        supervisor.start("dispatcher", dispatcher.run)
        supervisor.start("housekeeping", self.housekeeping.run)
        for name, tokenizer in tokenizers.items():
            for lane in LANES:
                supervisor.start(f"tokenizer.{name}.{lane}", _bind(tokenizer.run, lane))
        for route in self.routes:
            supervisor.start(f"source.{route.name}", route.source.run, NO_RESTART)
        for ingress in self._ingresses:
            supervisor.start(f"ingress.{ingress.route.name}", ingress.run)
        loaded.on_close.extend([egress.close, *(i.close for i in self._ingresses)])
        loaded.on_close.extend(tokenizer.close for tokenizer in tokenizers.values())

    def _close_models(self) -> None:
        if self._loaded is not None:
            self._loaded.close()

    def _route(self, route: RouteSettings, transport: Transport) -> Route:
        return Route(
            name=route.name,
            lane=route.lane,
            source=transport.source,
            decoder=WireDecoder(self.settings.limits_for(route)),
            destination=ReplyDestination(
                transport.sink,
                split_replies=self.settings.publish.split_replies,
                clock=self.clock,
            ),
            sink=transport.sink,
            models=self._default_models(route),
            max_attempts=self.settings.attempts.max_attempts,
        )

    async def _open_transport(self, route: RouteSettings, resources: AsyncExitStack) -> Transport:
        if self._transports is not None:
            transport = self._transports[route.name]
        else:
            self._on_phase(f"connecting route {route.name}")
            try:
                options = route_options(self.settings, route)
                transport = await open_transport(
                    options,
                    destination=route.destination,
                    clock=self.clock,
                    metrics=self.metrics,
                )
            except (ConnectionError, ValueError) as error:
                raise OperatorError(f"route {route.name}: {error}") from error
        resources.push_async_callback(_close_quietly, transport.sink.aclose, "sink")
        resources.push_async_callback(_close_quietly, transport.source.aclose, "source")
        return transport

    def _default_models(self, route: RouteSettings) -> dict[Task, str]:
        """Task -> model: what the route says, else what a model says, else the first that can."""
        chosen: dict[Task, str] = {}
        for task in TASKS:
            able = [name for name, info in self.models.items() if task in info.tasks]
            named = self.settings.model_for(route, task)
            if named is not None:
                chosen[task] = named
            elif able:
                chosen[task] = able[0]
        return chosen

    def _on_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            log.info("phase", phase=phase)

    async def _exhausted(self) -> None:
        """Until every source has said that nothing more will come (files, one-off runs)."""
        for ingress in self._ingresses:
            await ingress.closed.wait()

    # --- stopping --------------------------------------------------------------------------------

    async def _stop(self, stop: StopSignal, supervisor: Supervisor) -> bool:
        """Intake off, drain, publish, settle; true when nothing was left. One budget for all."""
        self.phase = "draining"
        stop.request("all sources are exhausted")
        deadline = stop.deadline
        assert deadline is not None
        for route in self.routes:
            route.source.stop_intake()
        drained = False
        if supervisor.fatal is None:
            drained = await self._until(
                stop, supervisor, self._drain(deadline), on_stop="force", deadline=deadline
            )
        if not drained:
            self._release_rest()
        # Settles are made durable also after a failed drain: what was answered must not come again.
        flush_deadline = Deadline(max(deadline.remaining_s(), 1.0))
        for route in self.routes:
            await _close_quietly(_bind(route.source.flush, flush_deadline), "flush")
        return drained

    async def _drain(self, deadline: Deadline) -> None:
        assert self.table is not None and self._egress is not None
        log.info("draining", in_flight=len(self.table), budget_s=round(deadline.remaining_s(), 1))
        await self._exhausted()
        await self.table.wait_empty()
        await self._egress.wait_quiet()

    def _release_rest(self) -> None:
        assert self.table is not None
        left = list(self.table)
        if left:
            log.warning("released_unfinished", n_requests=len(left))
        for in_flight in left:
            in_flight.closed = True
            for delivery in in_flight.deliveries:
                delivery.release("stopped before the answer was complete")

    async def _until(
        self,
        stop: StopSignal,
        supervisor: Supervisor,
        work: Coroutine[Any, Any, None],
        *,
        on_stop: str,
        deadline: Deadline | None = None,
    ) -> bool:
        """Run `work` until it ends (true) or is cut short (false).

        on_stop: "return" at the first request to stop, "force" at the second one only.
        Always cut short by a fatal actor and by `deadline`. Errors of `work` are raised.
        """
        waiter = stop.wait_forced if on_stop == "force" else stop.wait
        timeout_s = None if deadline is None else deadline.remaining_s()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(errors_as_value(work))
            others = [group.create_task(waiter()), group.create_task(supervisor.wait_fatal())]
            await asyncio.wait(
                {task, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            finished = task.done()
            for other in (task, *others):
                other.cancel()
        if not finished:
            return False
        error = task.result()
        if error is not None:
            raise error
        return True

    # --- looking in ------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """The verdict of `/ready`."""
        return app_readiness(self)

    def statistics(self) -> dict[str, Any]:
        """A snapshot for `/statistics`, the demo's summary and tests. Plain values."""
        return app_statistics(self)


def _lane_budget(settings: Settings, lane: Any) -> LaneBudget:
    admission = settings.admission.lane(lane)
    return LaneBudget(
        max_requests=admission.max_in_flight_requests,
        max_tokens=admission.max_in_flight_tokens,
        max_bytes=admission.max_in_flight_bytes,
        full_policy=admission.when_full,
    )


def _packing_policy(settings: Settings, info: ModelInfo) -> PackingPolicy:
    return PackingPolicy(
        max_batch_tokens=info.max_batch_tokens,
        max_batch_items=settings.batching.max_batch_items,
        linger_s=settings.batching.linger_ms / 1000,
        bulk_floor=settings.batching.bulk_floor,
        max_reorder_items=settings.batching.max_reorder_items,
        group_lengths=not info.packed,
    )


def _bind(
    function: Callable[[Any], Coroutine[Any, Any, None]], argument: Any
) -> Callable[[], Coroutine[Any, Any, None]]:
    def call() -> Coroutine[Any, Any, None]:
        return function(argument)

    return call


async def errors_as_value(work: Coroutine[Any, Any, None]) -> Exception | None:
    """Await `work`; an error is returned, so that it does not cancel its siblings."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  re-raised by the caller, unchanged
        return error
    return None


async def _close_quietly(close: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Close in bounded time; a broker that is gone must not keep us (bug log G02)."""
    try:
        async with asyncio.timeout(CLOSE_BUDGET_S):
            await close()
    except Exception as error:  # noqa: BLE001  boundary: closing is best effort, and said
        log.warning("close_failed", what=what, error_type=type(error).__name__)

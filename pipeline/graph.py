"""The graph of stations, in the order in which a request passes them.

    source -> ingress -> tokenizer -> coalescer -> dispatcher -> executor -> egress -> destination

Who calls it: `pipeline.app`, once everything is connected and loaded.
What must stay true: nothing awaits between building and starting, so no station meets one that does
not exist yet; closing stops threads, in the order of a request, and releases what never left.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.admission import Admission, LaneBudget
from actors.answers import RecentAnswers
from actors.attempts import Attempts
from actors.coalescer import Coalescer
from actors.decoder import WireDecoder
from actors.dispatcher import Dispatcher
from actors.egress import Egress
from actors.housekeeping import Housekeeping
from actors.in_flight import InFlightTable
from actors.ingress import Ingress
from actors.packing import PackingPolicy
from actors.ports import Clock, Metrics
from actors.publish import PublishPolicy, ReplyDestination
from actors.result_cache import ResultCache
from actors.route import Decoder, Destination, Route
from actors.supervisor import NO_RESTART, Supervisor
from actors.tokenizer import Tokenizer
from gpu.batch import ModelInfo
from pipeline.indexing.route import IndexingRoutes
from pipeline.indexing.sinks.registry import is_collection
from pipeline.lifecycle import OperatorError
from pipeline.model_pool import LoadedModels
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports.registry import Transport, parse_url, reading
from schemas.requests import LANES, TASKS, Lane, Task

if TYPE_CHECKING:
    from pipeline.transports.redis.results import RedisResults

PUBLISHERS_OF_TRANSACTIONS = 1024
"""Results of one route on their way at once, where they share transactions."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What a running service consists of. `table`: the requests between ingress and egress."""

    routes: Sequence[Route]
    ingresses: Sequence[Ingress]
    tokenizers: Mapping[str, Tokenizer]  # by model
    coalescer: Coalescer
    dispatcher: Dispatcher
    models: LoadedModels
    egress: Egress
    table: InFlightTable
    housekeeping: Housekeeping
    publishers: int  # of a route whose destination names no number of its own
    shared: Callable[[], Coroutine[Any, Any, None]] | None = None  # writes results that are shared

    def start(self, supervisor: Supervisor) -> None:
        """Every station as a supervised task. Sources hand out from here on."""
        start = supervisor.start
        for route in self.routes:
            start(f"source.{route.name}", route.source.run, NO_RESTART)
        for ingress in self.ingresses:
            start(f"ingress.{ingress.route.name}", ingress.run)
            for lane in LANES:
                start(f"ingress.{ingress.route.name}.{lane}", _bind(ingress.run_parked, lane))
        for name, tokenizer in self.tokenizers.items():
            for lane in LANES:
                start(f"tokenizer.{name}.{lane}", _bind(tokenizer.run, lane))
        start("dispatcher", self.dispatcher.run)
        for route in self.routes:
            start(f"destination.{route.name}", route.destination.run)
            if route.transactions is not None:
                start(f"transactions.{route.name}", route.transactions.run, NO_RESTART)
            for number in range(self._publishers_of(route)):
                start(f"publisher.{route.name}.{number}", _bind(self.egress.run, route))
                if self.egress.takes_lists(route):
                    start(
                        f"publisher.{route.name}.lists.{number}",
                        _bind(self.egress.run_lists, route),
                    )
        start("housekeeping", self.housekeeping.run)
        if self.shared is not None:
            start("results", self.shared)

    def _publishers_of(self, route: Route) -> int:
        if route.transactions is not None:  # they wait for a commit that they share
            return max(self.publishers, PUBLISHERS_OF_TRANSACTIONS)
        return route.destination.max_concurrent or self.publishers

    def close(self) -> None:
        """Stop the stations' threads, then the executor's."""
        for ingress in self.ingresses:
            ingress.close()
        for tokenizer in self.tokenizers.values():
            tokenizer.close()
        self.egress.close()
        self.models.close()


def build_graph(
    settings: Settings,
    routes: Sequence[Route],
    models: LoadedModels,
    *,
    supervisor: Supervisor,
    clock: Clock,
    metrics: Metrics,
    shared: RedisResults | None = None,
) -> Graph:
    """The stations, each with what it hands its work to: so the last one is made first."""
    admission = Admission({lane: _lane_budget(settings, lane) for lane in LANES})
    budgets = admission.budgets.values()
    table = InFlightTable(admission)
    attempts = Attempts()
    policy = _publish_policy(settings)
    egress = Egress(
        table,
        models.infos,
        policy=policy,
        max_waiting=sum(budget.max_requests for budget in budgets),
        clock=clock,
        metrics=metrics,
    )
    results = ResultCache(settings.batching.result_cache_bytes, shared)
    coalescer = Coalescer(
        {name: _packing_policy(settings, info) for name, info in models.infos.items()},
        max_queued_tokens=max(budget.max_tokens for budget in budgets),
        clock=clock,
        fail=egress.fail,
    )
    reserved = settings.executor.reserved_threads
    dispatcher = Dispatcher(
        coalescer,
        models.executor,
        spawn=supervisor.spawn,
        attempts=attempts,
        complete=egress.complete,
        clock=clock,
        metrics=metrics,
        reserved=None if reserved == "auto" else reserved,
        results=results,
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
            results=results,
            maker=maker_of(models.infos[name]),
        )
        for name, runner in models.runners.items()
    }
    ingresses = [
        Ingress(
            route,
            admission=admission,
            table=table,
            tokenizers=tokenizers,
            infos=models.infos,
            egress=egress,
            clock=clock,
            metrics=metrics,
        )
        for route in routes
    ]
    housekeeping = Housekeeping(
        table,
        coalescer,
        n_running=lambda: dispatcher.n_out,
        fail=egress.fail,
        clock=clock,
        metrics=metrics,
    )
    for route in routes:
        route.source.withdraw_with(egress.withdraw)
    return Graph(
        routes=routes,
        ingresses=ingresses,
        tokenizers=tokenizers,
        coalescer=coalescer,
        dispatcher=dispatcher,
        models=models,
        egress=egress,
        table=table,
        housekeeping=housekeeping,
        publishers=policy.max_concurrent,
        shared=None if shared is None else shared.run,
    )


def maker_of(info: ModelInfo) -> str:
    """Who computes: two that compare alike make the same bytes of the same item."""
    told = (info.name, info.fingerprint, info.dtype, info.device.partition(":")[0], info.linears)
    layers = (info.implementation, info.attention, info.packed)
    return repr((*told, *layers, info.normalized, info.pooling, _release()))


def _release() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("embedstream")
    except PackageNotFoundError:
        return ""


def build_route(
    settings: Settings,
    route: RouteSettings,
    transport: Transport,
    models: LoadedModels,
    indexing: IndexingRoutes,
    *,
    clock: Clock,
) -> Route:
    """A route of the settings on its open transport: the wire contract in, replies out; or documents
    in, into a collection. Raises `OperatorError` for a collection that its model cannot fill."""
    defaults = _default_models(settings, route, models.infos)
    limits = settings.limits_for(route)
    decoder: Decoder = WireDecoder(limits)
    publish = settings.publish
    destination: Destination = ReplyDestination(
        transport.sink,
        split_replies=publish.split_replies,
        clock=clock,
        recent=RecentAnswers(publish.remember_s, publish.remember_bytes, clock=clock),
    )
    if is_collection(route.destination):
        decoder, destination = indexing.ends(
            route, defaults.get("embed"), models, limits=limits, sink=transport.sink
        )
    _check_dimensions(route, models.infos.get(defaults.get("embed", "")))
    return Route(
        name=route.name,
        lane=route.lane,
        source=transport.source,
        decoder=reading(parse_url(route.source), decoder),
        destination=destination,
        sink=transport.sink,
        models=defaults,
        max_attempts=settings.attempts.max_attempts,
        order=route.order,
        transactions=transport.transactions,
        dimensions=route.dimensions,
    )


def _check_dimensions(route: RouteSettings, info: ModelInfo | None) -> None:
    size = route.dimensions
    if size is None:
        return
    allowed = () if info is None else info.allowed_dimensions or (info.dimensions,)
    if size not in allowed:
        raise OperatorError(
            f"route {route.name}: dimensions = {size} is no size of the model that answers its embed "
            "requests; name one that `embedstream check` lists, or add it to `matryoshka_dimensions` of "
            "that model"
        )


def _default_models(
    settings: Settings, route: RouteSettings, models: Mapping[str, ModelInfo]
) -> dict[Task, str]:
    """Task -> model: what the route says, else what a model says, else the first that can."""
    chosen: dict[Task, str] = {}
    for task in TASKS:
        able = [name for name, info in models.items() if task in info.tasks]
        named = settings.model_for(route, task)
        if named is not None:
            chosen[task] = named
        elif able:
            chosen[task] = able[0]
    return chosen


def _lane_budget(settings: Settings, lane: Lane) -> LaneBudget:
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


def _publish_policy(settings: Settings) -> PublishPolicy:
    return PublishPolicy(
        max_concurrent=settings.publish.max_concurrent,
        attempts=settings.publish.attempts,
        first_backoff_s=settings.publish.backoff_ms / 1000,
        max_backoff_s=settings.publish.max_backoff_ms / 1000,
    )


def _bind(
    function: Callable[[Any], Coroutine[Any, Any, None]], argument: Any
) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: function(argument)

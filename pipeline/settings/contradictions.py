"""Contradictions between settings that are each fine alone.

Who calls it: `pipeline.settings.load.load`, after every value has its type and range.
What must stay true: pure; a contradiction names both settings and both remedies; nothing here
touches a disk, a network or a model.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.indexing.mapping import DocumentMapping
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.indexing.sinks.registry import SINKS, check_collection_url, is_collection
from pipeline.redact import redact
from pipeline.settings.records import RouteSettings, Settings
from pipeline.settings.sources import Problem
from pipeline.transports.options import Options, Place
from pipeline.transports.redis.results_options import results_options
from pipeline.transports.registry import REPLY, parse_destination, parse_url
from schemas.requests import LANES, TASKS


def contradictions(settings: Settings) -> list[Problem]:
    """Every contradiction, in the order of the settings."""
    options = list(_options_of_routes(settings))
    found = [problem for _, problem in options if isinstance(problem, Problem)]
    found += _model_problems(settings)
    found += _route_problems(settings)
    parsed = [(i, o) for i, o in options if not isinstance(o, Problem)]
    found += _source_problems(settings, parsed)
    found += _budget_problems(settings)
    found += _results_problems(settings)
    if settings.executor.processes > 1:
        found += _process_problems(settings, parsed)
    return [
        Problem(p.setting, p.message, p.remedy, p.origin or settings.origins.get(p.setting))
        for p in found
    ]


def _options_of_routes(settings: Settings) -> Iterator[tuple[int, Options | Problem]]:
    for i, route in enumerate(settings.routes):
        try:
            yield i, parse_url(route.source)
        except ValueError as error:
            yield (
                i,
                Problem(
                    f"routes.{i}.source",
                    redact(str(error)),
                    "correct the address; docs/settings.md lists the forms",
                ),
            )


def _model_problems(settings: Settings) -> Iterator[Problem]:
    for task in TASKS:
        defaults = [name for name, model in settings.models.items() if task in model.default_for]
        if len(defaults) > 1:
            first, second = defaults[:2]
            yield Problem(
                f"models.{second}.default_for",
                f"names {task!r}, and so does models.{first}.default_for",
                "remove it from one of the two",
            )
    for name, model in settings.models.items():
        if isinstance(model.max_tokens, int):
            for lane in LANES:
                budget = settings.admission.lane(lane).max_in_flight_tokens
                if model.max_tokens > budget:
                    yield Problem(
                        f"models.{name}.max_tokens",
                        f"({model.max_tokens}) exceeds admission.{lane}.max_in_flight_tokens "
                        f"({budget}): such an item would never be admitted",
                        "lower the one or raise the other",
                    )


def _results_problems(settings: Settings) -> Iterator[Problem]:
    url = settings.batching.result_cache_url
    if url is not None:
        try:
            results_options(url)
        except ValueError as error:
            told = redact(str(error))
            yield Problem("batching.result_cache_url", told, "correct the address, or leave it out")


def _route_problems(settings: Settings) -> Iterator[Problem]:
    if settings.routes and not settings.models:
        yield Problem(
            "models",
            "is empty, but there are routes",
            "add [models.NAME] with a path, or pass --model; `embedstream models list` shows packaged ones",
        )
    seen: dict[str, int] = {}
    for i, route in enumerate(settings.routes):
        if route.name in seen:
            yield Problem(
                f"routes.{i}.name",
                f"({route.name}) is also routes.{seen[route.name]}.name",
                "rename one of the two",
            )
        seen.setdefault(route.name, i)
        yield from _document_problems(i, route)
        yield from _named_models(settings, i, route)


def _document_problems(i: int, route: RouteSettings) -> Iterator[Problem]:
    untouched = (DocumentOptions(), ChunkOptions())
    if not is_collection(route.destination):
        if (route.document, route.chunk) != untouched:
            yield Problem(
                f"routes.{i}.document",
                f"is set, and routes.{i}.destination is no collection: requests are no documents",
                "name a collection as the destination, or remove document and chunk",
            )
        if route.report_to is not None:
            yield Problem(
                f"routes.{i}.report_to",
                f"is set, and routes.{i}.destination is no collection: each request has its reply",
                "name a collection as the destination, or remove report_to",
            )
        return
    if route.dimensions is not None:
        yield Problem(
            f"routes.{i}.dimensions",
            f"is set, and routes.{i}.destination is a collection",
            f"say it as routes.{i}.document.dimensions",
        )
    try:
        check_collection_url(route.destination)
    except ValueError as error:
        yield Problem(
            f"routes.{i}.destination",
            f"({redact(route.destination)[:60]}) is not usable: {error}",
            "correct the address; docs/indexing.md lists the forms",
        )
    try:
        DocumentMapping(route.document)
    except ValueError as error:
        yield Problem(f"routes.{i}.document", f"cannot be used: {error}", "correct that option")


def _named_models(settings: Settings, i: int, route: RouteSettings) -> Iterator[Problem]:
    for key in ("model", "rerank_model", "classify_model"):
        name = getattr(route, key)
        if settings.models and name is not None and name not in settings.models:
            yield Problem(
                f"routes.{i}.{key}",
                f"({name[:60]}) names no model",
                f"add [models.{name[:60]}], or choose one of {', '.join(sorted(settings.models))}",
            )


def _source_problems(settings: Settings, options: list[tuple[int, Options]]) -> Iterator[Problem]:
    reads = [(i, place) for i, option in options for place in option.consumes()]
    for n, (i, place) in enumerate(reads):
        first = next((j for j, p in reads[:n] if p.same(place) and p.group == place.group), None)
        if first is not None:
            yield Problem(
                f"routes.{i}.source",
                f"reads {place.what} {place.name} as the group of routes.{first}.source: "
                "each would get a part of the requests",
                "give one of them another group or topic, or remove one route",
            )
    yield from _order_problems(settings, options)
    yield from _delivery_problems(settings, options)
    yield from _loops(settings, options)
    yield from _destination_problems(settings, reads)
    budget_s = settings.lifecycle.drain_budget_s
    for i, option in options:
        bound = option.must_poll_within()
        if bound is not None and budget_s >= bound[1]:
            yield Problem(
                "lifecycle.drain_budget_s",
                f"({budget_s:g} s) is not below {bound[0]} ({bound[1]:g} s) of routes.{i}.source: "
                "the broker would give the work away during the drain",
                f"lower drain_budget_s or raise {bound[0]} in the address",
            )


def _order_problems(settings: Settings, options: list[tuple[int, Options]]) -> Iterator[Problem]:
    for i, option in options:
        order = settings.routes[i].order
        if order != "none" and order not in option.orders():
            able = " or ".join(f'"{one}"' for one in ("none", *option.orders()))
            yield Problem(
                f"routes.{i}.order",
                f'("{order}") cannot be kept: what routes.{i}.source reads has no such order',
                f"set it to {able}, or read from Kafka",
            )


def _delivery_problems(settings: Settings, options: list[tuple[int, Options]]) -> Iterator[Problem]:
    for i, option in options:
        route = settings.routes[i]
        if route.delivery != "exactly_once":
            continue
        refused = option.exactly_once_problem()
        if refused is not None:
            yield Problem(
                f"routes.{i}.delivery",
                f'is "exactly_once", and routes.{i}.source cannot be: {refused}',
                'or set delivery to "at_least_once"',
            )
        elif is_collection(route.destination):
            yield Problem(
                f"routes.{i}.delivery",
                f'is "exactly_once", and routes.{i}.destination is a collection, which takes no part in a '
                "Kafka transaction",
                'set delivery to "at_least_once": what is written twice there changes nothing',
            )
        elif route.destination != REPLY:
            yield Problem(
                f"routes.{i}.delivery",
                f'is "exactly_once", and routes.{i}.destination is another place than the source\'s cluster '
                "as far as a transaction goes",
                f'set destination to "{REPLY}" and reply_topic in the address of the source, or delivery to '
                '"at_least_once"',
            )


def _loops(settings: Settings, options: list[tuple[int, Options]]) -> Iterator[Problem]:
    """Replies or dead letters of one route that are requests of another."""
    reads = [(j, place) for j, option in options for place in option.consumes()]
    for i, option in options:
        elsewhere = settings.routes[i].destination != REPLY
        for written in option.writes():
            if elsewhere and not written.is_dead_letters:
                continue
            for j, read in reads:
                if i != j and written.same(read):
                    yield Problem(
                        f"routes.{i}.source",
                        f"writes {written.option}={written.name}, which routes.{j}.source reads: "
                        "answers would become requests",
                        f"change {written.option} of the one or the {read.what} of the other",
                    )


def _destination_problems(settings: Settings, reads: list[tuple[int, Place]]) -> Iterator[Problem]:
    """Destinations that are an address: wrong ones, and those that a route reads."""
    for i, route in enumerate(settings.routes):
        setting, address = f"routes.{i}.destination", route.destination
        if is_collection(address):
            setting, address = f"routes.{i}.report_to", route.report_to or REPLY
        if address == REPLY:
            continue
        try:
            options, name = parse_destination(address)
        except ValueError as error:
            yield Problem(
                setting,
                redact(str(error)),
                f'write "{REPLY}", or correct the address; docs/settings.md lists the forms'
                if address is route.destination
                else "correct the address; docs/settings.md lists the forms",
            )
            continue
        written = options.place_at(name)
        for j, read in reads:
            if written.same(read):
                yield Problem(
                    setting,
                    f"is the {read.what} {read.name}, which routes.{j}.source reads: answers would "
                    "become requests",
                    "change the one or the other",
                )


def _budget_problems(settings: Settings) -> Iterator[Problem]:
    publish = settings.publish
    if publish.backoff_ms > publish.max_backoff_ms:
        yield Problem(
            "publish.backoff_ms",
            f"({publish.backoff_ms:g}) exceeds publish.max_backoff_ms ({publish.max_backoff_ms:g})",
            "lower the one or raise the other",
        )
    records = [("limits", settings.limits)]
    records += [
        (f"routes.{i}.limits", settings.limits_for(route))
        for i, route in enumerate(settings.routes)
        if route.limits.max_record_bytes is not None
    ]
    for name, limits in records:
        for lane in LANES:
            budget = settings.admission.lane(lane).max_in_flight_bytes
            if limits.max_record_bytes > budget:
                yield Problem(
                    f"{name}.max_record_bytes",
                    f"({limits.max_record_bytes}) exceeds admission.{lane}.max_in_flight_bytes "
                    f"({budget}): such a record would never be admitted",
                    "lower the one or raise the other",
                )


def _process_problems(settings: Settings, options: list[tuple[int, Options]]) -> Iterator[Problem]:
    """What belongs to one process, in a service of several."""
    ends = [(f"routes.{i}.source", option.one_process_problem()) for i, option in options]
    ends += [
        (f"routes.{i}.{name}", _one_process_place(getattr(route, name) or REPLY))
        for i, route in enumerate(settings.routes)
        for name in ("destination", "report_to")
    ]
    for setting, reason in ends:
        if reason is not None:
            yield Problem(
                "executor.processes",
                f"is {settings.executor.processes}, and {setting} is for one: {reason}",
                f"set processes to 1, or change {setting}",
            )


def _one_process_place(address: str) -> str | None:
    if address == REPLY:
        return None
    if is_collection(address):
        scheme = address.partition(":")[0].lower()
        return f"{scheme} files have one writer" if SINKS[scheme].one_process else None
    try:
        return parse_destination(address)[0].one_process_problem()
    except ValueError:
        return None  # said already

"""The settings as frozen records: names, types, ranges, defaults, one sentence each.

Who calls it: `pipeline.settings.load` fills them from file, environment and flags; everything that is
configured reads them. docs/settings.md is generated from them.
What must stay true: plain values only; every numeric field has a range; the sentence in `Meta` is
the reference documentation; a unit is part of the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gpu.settings import ModelSettings
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.settings.results import ResultCacheBytes, ResultCacheTtl, ResultCacheUrl
from schemas.requests import Lane, Limits, Task


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every settings table."""


class LimitsOverride(Record, frozen=True, kw_only=True):
    """`[routes.limits]`: limits of one route; what is absent is taken from `[limits]`."""

    max_record_bytes: int | None = None
    max_items: int | None = None
    max_item_bytes: int | None = None
    max_depth: int | None = None
    max_id_bytes: int | None = None
    max_metadata_bytes: int | None = None


class RouteSettings(Record, frozen=True, kw_only=True):
    """`[[routes]]`: where work comes from, which model, where results go."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="Name of the route: in logs, in the metric label `route`.",
        ),
    ]
    source: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address of the source: `kafka://host:port/topic?group=NAME`, "
            "`redis://host:port/stream?group=NAME`, `redis-list://host:port/key`, "
            "`file:///in.jsonl?replies=/out.jsonl`, or `-` (stdin to stdout). Every transport option is a query parameter.",
        ),
    ]
    destination: Annotated[
        str,
        Meta(
            min_length=1,
            description='"reply": to the `reply_to` of each request, else the reply destination '
            "of the source's transport. An address: all replies to that one place, "
            "`kafka://host:port/topic`, `redis://host/list:NAME`, `redis://host/stream:NAME`, "
            "`file:///out.jsonl` or `-` (stdout); dead letters stay with the source. A collection, "
            "`lance:///folder#docs`: records are documents, kept there (docs/indexing.md).",
        ),
    ] = "reply"
    report_to: Annotated[
        str | None,
        Meta(
            description="Beside a collection: an address, as of `destination`, where one record tells of each "
            "document that it is stored, was there already, or is gone (docs/indexing.md)."
        ),
    ] = None
    lane: Annotated[
        Lane,
        Meta(
            description="Lane of requests that name no `priority`. When unset: `interactive` for "
            "Redis, else `bulk`."
        ),
    ] = "bulk"
    model: Annotated[
        str | None,
        Meta(description="Model for embed requests that name none."),
    ] = None
    rerank_model: Annotated[
        str | None,
        Meta(description="Model for rerank and score requests that name none."),
    ] = None
    classify_model: Annotated[
        str | None,
        Meta(description="Model for classify requests that name none."),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(
            description="Size of dense vectors of embed requests that name neither `dimensions` nor a model, "
            "where the route's model can be cut to it; when unset, the native."
        ),
    ] = None
    delivery: Annotated[
        Literal["at_least_once", "exactly_once"],
        Meta(
            description='"exactly_once": replies, dead letters and offsets in one Kafka transaction every '
            "`transaction_interval_ms`, so that readers with `read_committed` see each reply once, whatever "
            "dies (docs/delivery.md)."
        ),
    ] = "at_least_once"
    order: Annotated[
        Literal["none", "key", "partition"],
        Meta(
            description='Which results are published in the order of their records: those of one "key", '
            'those of one "partition" (of a file: all), or "none". Computed in any order, they leave one '
            "after the other (docs/delivery.md)."
        ),
    ] = "none"
    limits: LimitsOverride = LimitsOverride()
    document: DocumentOptions = DocumentOptions()
    chunk: ChunkOptions = ChunkOptions()


class BatchingSettings(Record, frozen=True, kw_only=True):
    """`[batching]`: how items are gathered into packs."""

    linger_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000,
            description="Longest wait of an item for a fuller pack while executors are busy; an idle "
            "executor takes what is there.",
        ),
    ] = 5.0
    bulk_floor: Annotated[
        float,
        Meta(
            ge=0.0,
            le=0.9,
            description="Share of the token budget that bulk keeps while interactive items wait.",
        ),
    ] = 0.2
    max_reorder_items: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="How many waiting items the packer looks through for ones that still fit, or "
            "for equal lengths where a model is padded; 1: strictly first in, first out.",
        ),
    ] = 256
    max_batch_items: Annotated[
        int,
        Meta(ge=1, le=65_536, description="Items a pack may hold, whatever their tokens."),
    ] = 1024
    result_cache_bytes: ResultCacheBytes = 32 * 1024 * 1024
    result_cache_url: ResultCacheUrl = None
    result_cache_ttl_s: ResultCacheTtl = 7 * 24 * 3600


class LaneAdmission(Record, frozen=True, kw_only=True):
    """Budgets of one lane: what may be in flight (admitted and not settled)."""

    max_in_flight_requests: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Requests in flight.")
    ] = 4096
    max_in_flight_tokens: Annotated[
        int, Meta(ge=16, le=1_000_000_000, description="Tokens in flight, once tokenized.")
    ] = 2_000_000
    max_in_flight_bytes: Annotated[
        int, Meta(ge=1024, le=2**40, description="Bytes of request records in flight.")
    ] = 256 * 1024 * 1024
    when_full: Annotated[
        Literal["reject", "wait"],
        Meta(
            description="A full budget: answer `overloaded` at once, or wait, which pauses the "
            "source."
        ),
    ] = "wait"


class AdmissionSettings(Record, frozen=True, kw_only=True):
    """`[admission.interactive]` and `[admission.bulk]`."""

    interactive: LaneAdmission = LaneAdmission(max_in_flight_tokens=500_000, when_full="reject")
    bulk: LaneAdmission = LaneAdmission()

    def lane(self, lane: Lane) -> LaneAdmission:
        """The budgets of one lane."""
        return self.interactive if lane == "interactive" else self.bulk


class PublishSettings(Record, frozen=True, kw_only=True):
    """`[publish]`: how replies reach the broker."""

    attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Tries per reply before its delivery is released to come again. The default "
            "outlasts a broker that is away for some minutes; what is held meanwhile counts against "
            "the budgets, so intake pauses.",
        ),
    ] = 60
    backoff_ms: Annotated[
        float, Meta(ge=1, le=60_000, description="Wait after the first failed try; doubles.")
    ] = 100.0
    max_backoff_ms: Annotated[
        float, Meta(ge=1, le=600_000, description="Longest wait between two tries.")
    ] = 5_000.0
    max_concurrent: Annotated[
        int,
        Meta(ge=1, le=65_536, description="Writes of one route at once: of a reply, or of a list."),
    ] = 64
    split_replies: Annotated[
        bool,
        Meta(
            description="Split a reply that exceeds the broker's limit into numbered parts; "
            "otherwise it becomes `record_too_large`."
        ),
    ] = True
    remember_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="A request that comes again within this time, with the same id, bytes and reply "
            "destination, is answered with the same bytes and not computed again; 0 remembers nothing.",
        ),
    ] = 60.0
    remember_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**40,
            description="Replies of one route remembered for it, at most; the oldest go.",
        ),
    ] = 32 * 1024 * 1024


class AttemptsSettings(Record, frozen=True, kw_only=True):
    """`[attempts]`: when a delivery is given up."""

    max_attempts: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Attempts of one record that did not come back, or whose reply could not be published, before it is dead-lettered as `failed`.",
        ),
    ] = 5


class LifecycleSettings(Record, frozen=True, kw_only=True):
    """`[lifecycle]`: how the service stops."""

    drain_budget_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600,
            description="Seconds between the first signal and the exit: intake stops, held work "
            "finishes, the rest is released. Keep it below the grace period of the platform "
            "(Kubernetes: 30 s).",
        ),
    ] = 25.0


class HealthSettings(Record, frozen=True, kw_only=True):
    """`[health]`: the HTTP port with /live, /ready, /metrics, /statistics."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=255,
            description="Address to listen on; `0.0.0.0` inside a container.",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port to listen on; 0 turns the server off.")
    ] = 8321
    stuck_after_s: Annotated[
        float,
        Meta(
            ge=0.5,
            le=3600,
            description="Not ready when a forward has run this long and none succeeded meanwhile.",
        ),
    ] = 8.0
    max_failed_forwards: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Not ready after this many failed forwards in a row."),
    ] = 5
    max_loop_lag_s: Annotated[
        float,
        Meta(ge=0.05, le=60, description="Not ready while the event loop is this late."),
    ] = 2.0


class LogSettings(Record, frozen=True, kw_only=True):
    """`[log]`: events on stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level written.")
    ] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description='"auto": console on a terminal, JSON lines otherwise.'),
    ] = "auto"


class ExecutorSettings(Record, frozen=True, kw_only=True):
    """`[executor]`: the threads that own the models."""

    cpu_workers: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        Meta(
            description='Executor threads on CPU, one intra-op thread each. "auto": the cores '
            "this process may use, as far as its container's CPU limit goes; with `processes`, its share.",
        ),
    ] = "auto"
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Processes that `serve` starts, each with its share of the cores, its own model and "
            "its own budgets, each a member of the groups; more than one where one Python process is slower "
            "than the model (docs/scaling.md).",
        ),
    ] = 1
    reserved_threads: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"],
        Meta(
            description="Threads that bulk work leaves free while interactive items keep coming, so that "
            'these begin at once; one always stays for bulk. "auto": a quarter of them, none below four.',
        ),
    ] = "auto"


class Origin(msgspec.Struct, frozen=True):
    """Where an effective value came from."""

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


DEFAULT_ORIGIN = Origin("default")


class Settings(Record, frozen=True, kw_only=True):
    """Everything that is configured. Built only by `pipeline.settings.load.load`."""

    models: dict[str, ModelSettings] = msgspec.field(default_factory=dict)
    routes: tuple[RouteSettings, ...] = ()
    limits: Limits = Limits()
    batching: BatchingSettings = BatchingSettings()
    admission: AdmissionSettings = AdmissionSettings()
    publish: PublishSettings = PublishSettings()
    attempts: AttemptsSettings = AttemptsSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    health: HealthSettings = HealthSettings()
    log: LogSettings = LogSettings()
    executor: ExecutorSettings = ExecutorSettings()
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)
    """Dotted setting name -> where its value came from; absent: the default."""

    def model_for(self, route: RouteSettings | None, task: Task) -> str | None:
        """The configured default model of a task on a route, or None when settings do not say.

        Then the caller falls back to the first loaded model that has the task.
        """
        if route is not None:
            named = {
                "embed": route.model,
                "rerank": route.rerank_model,
                "score": route.rerank_model,
                "classify": route.classify_model,
            }[task]
            if named is not None:
                return named
        for name, model in self.models.items():
            if task in model.default_for:
                return name
        return None

    def limits_for(self, route: RouteSettings) -> Limits:
        """`[limits]` with the route's overrides on top."""
        given = {
            name: value
            for name in route.limits.__struct_fields__
            if (value := getattr(route.limits, name)) is not None
        }
        return msgspec.structs.replace(self.limits, **given)

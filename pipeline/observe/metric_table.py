"""Every metric of the service: name, kind, sentence, labels, buckets.

Who calls it: `pipeline.observe.metrics` registers them; docs/operations.md is generated from here; a test
compares the names with those that the sources use.
What must stay true: one row per metric; label values come from closed sets (routes, models, lanes,
error codes), never from a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

PREFIX = "embedstream_"
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

# Forward of one short text on a CPU is about 2 ms, a queue at its bound waits minutes.
SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0,
)  # fmt: skip
LAG_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COUNTS = tuple(float(2**n) for n in range(12))  # 1 .. 2048 items
TOKENS = tuple(float(2**n) for n in range(3, 19))  # 8 .. 262144 tokens


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` is without the prefix, as the sources say it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help_, labels)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", help_, labels, buckets)


METRICS: tuple[MetricSpec, ...] = (
    # what came and how it ended
    _counter(
        "requests_total", "Requests by how they ended: ok, or a code.", "route", "task", "outcome"
    ),
    _counter("items_total", "Items of answered requests.", "task"),
    _counter("item_errors_total", "Items that failed alone, by code.", "code"),
    _counter("nonfinite_total", "Items for which the model gave NaN or infinity.", "model"),
    _counter("dead_letters_total", "Records that were dead-lettered.", "kind"),
    _counter("redelivered_total", "Deliveries that had been handed out before.", "route"),
    _counter("joined_duplicates_total", "Requests answered with a twin in flight.", "route"),
    _counter("answered_again_total", "Requests answered with a remembered reply.", "route"),
    _counter("tombstones_skipped_total", "Records without a value that were skipped.", "route"),
    _counter("cancel_records_total", "Records that withdraw a request.", "route", "outcome"),
    _histogram("request_seconds", "Receipt to published reply.", SECONDS, "route"),
    # what waits
    _gauge("queue_requests", "Requests in flight.", "lane"),
    _gauge("queue_tokens", "Tokens that wait to be packed.", "model", "lane"),
    _gauge("in_flight", "Requests admitted and not settled."),
    _gauge("source_paused", "1 while backpressure pauses the source.", "route"),
    _histogram("queue_wait_seconds", "Tokenized to start of the forward.", SECONDS, "lane"),
    # what the model did
    _histogram("tokenize_seconds", "One batched tokenizer call.", SECONDS, "model"),
    _histogram("batch_items", "Items of a pack.", COUNTS, "model"),
    _histogram("batch_tokens", "Tokens of a pack.", TOKENS, "model"),
    _histogram("forward_seconds", "Submit to rows of one pack.", SECONDS, "model"),
    _counter(
        "items_reused_total",
        "Items whose result was made by an equal item: a moment before, or in the same pack.",
        "model",
    ),
    _counter(
        "result_cache_total",
        "Results in Redis, of items asked for (hit, miss, refused, skipped) and computed (stored, dropped).",
        "outcome",
    ),
    _counter(
        "batches_packed_again_total",
        "Batches that had not begun when interactive items came, and were packed again with them.",
        "model",
    ),
    _counter("failed_batches_total", "Packs whose forward failed as a whole.", "model"),
    _counter(
        "padding_avoided_tokens_total",
        "Tokens that padding to the longest item would have added.",
        "model",
    ),
    _counter(
        "executor_idle_with_work_seconds_total",
        "Seconds in which tokens waited and no forward ran.",
    ),
    # what left
    _histogram("publish_seconds", "Publish to the broker's acknowledgement.", SECONDS),
    _counter("publish_retries_total", "Publishes that were tried again."),
    # into collections
    _counter("index_documents_total", "Documents by what became of them.", "outcome"),
    _counter("index_chunks_total", "Chunks stored."),
    _counter(
        "index_skipped_total",
        "Documents that were not embedded: unchanged, or replayed.",
        "route",
        "reason",
    ),
    _counter("index_retries_total", "Batches that a store did not take at once."),
    _histogram("index_write_seconds", "One batch into a store.", SECONDS),
    # the processes of executor.processes
    _gauge("process_up", "1 while a process of executor.processes is ready or was.", "process"),
    _counter("process_restarts_total", "Processes that ended and were started again.", "process"),
    # transports: sources
    _counter("source_records_total", "Records handed out by a source.", "transport"),
    _counter("source_released_total", "Deliveries handed back.", "transport"),
    _counter(
        "source_dropped_total",
        "Deliveries lost to another member at a rebalance; that member repeats them.",
        "transport",
    ),
    _counter(
        "source_unreadable_batches_total",
        "Batches that could not be decoded and were dead-lettered.",
        "transport",
    ),
    _counter(
        "source_skipped_done_total",
        "Records that a commit remembered as finished and that were not done again.",
        "transport",
    ),
    _counter("source_commit_failures_total", "Commits that the broker refused.", "transport"),
    _counter("source_reconnects_total", "Times a source connected anew.", "transport"),
    _counter("source_claimed_total", "Entries taken over from a silent member.", "transport"),
    _counter("source_leases_lost_total", "Entries another member took from us.", "transport"),
    _counter(
        "source_records_gone_total",
        "Requests that somebody deleted or trimmed before they were answered.",
        "transport",
    ),
    _counter("source_group_recreated_total", "Groups that had to be made again.", "transport"),
    _gauge("source_connected", "1 while the source reaches its broker.", "transport"),
    _gauge("source_partitions", "Partitions assigned to this process.", "transport"),
    _gauge("source_group_consumers", "Members of the group.", "transport"),
    _gauge(
        "source_lag_records",
        "Records not settled: behind the commit watermark, or of a Redis stream waiting and pending.",
        "topic",
        "partition",
    ),
    _gauge(
        "source_oldest_unsettled_offset", "Commit watermark of a partition.", "topic", "partition"
    ),
    # transports: sinks
    _counter("sink_records_total", "Records the broker acknowledged.", "transport"),
    _counter("sink_dead_letters_total", "Dead letters a file sink wrote or counted.", "transport"),
    _counter("sink_reconnects_total", "Times a sink connected anew.", "transport"),
    _counter("sink_transactions_total", "Transactions committed (exactly_once).", "transport"),
    _counter(
        "sink_transactions_aborted_total",
        "Transactions given up; their results went into another, or to another member.",
        "transport",
    ),
    _counter("sink_out_of_memory_total", "Writes refused by a full Redis.", "transport"),
    # the process
    _histogram("loop_lag_seconds", "How late the event loop was.", LAG_SECONDS),
    _counter("actor_restarts_total", "Actors that crashed and were started again.", "actor"),
)
BY_NAME: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}


def markdown() -> str:
    """The table of docs/operations.md."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{PREFIX}{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())

"""What the demo shows: progress, the answers to questions, the one-screen summary.

Who calls it: `pipeline.demo.run`.
What must stay true: the same on a terminal and in a log; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Hit:
    """One document that answers a question: cosine and place by vector, score by the reranker."""

    title: str
    cosine: float
    vector_rank: int
    score: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Shares are 0 to 1, times in seconds unless the name says ms."""

    documents: int
    tokens: int
    index_s: float
    duplicates: int
    batches: int
    batch_fill: float
    padding_avoided: float
    rpc_count: int
    rpc_p50_ms: float
    rpc_p99_ms: float
    stages: Sequence[tuple[str, float]]


def download_progress(console: Console) -> Progress:
    """A bar for bytes."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        console=console,
        transient=not console.is_terminal,
    )


def count_progress(console: Console) -> Progress:
    """A bar for documents or questions."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def spinner(console: Console) -> Progress:
    """For what has no measure."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )


def show_hits(console: Console, question: str, hits: Sequence[Hit], milliseconds: float) -> None:
    """The best hits of a question in the reranker's order, with the place each had by vector."""
    console.print(f"\n[bold]{escape(question)}[/bold]   [dim]{milliseconds:.0f} ms[/dim]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("document", max_width=60, no_wrap=True)
    table.add_column("rerank", justify="right")
    table.add_column("cosine", justify="right")
    table.add_column("vector #", justify="right")
    for rank, hit in enumerate(hits, 1):
        place = f"[bold]{hit.vector_rank}[/bold]" if hit.vector_rank != rank else str(rank)
        score, cosine = f"{hit.score:.4f}", f"{hit.cosine:.3f}"
        table.add_row(str(rank), escape(hit.title), score, cosine, place)
    console.print(table)


def show_summary(console: Console, summary: Summary) -> None:
    """Everything measured, on one screen."""
    table = Table(title="What this machine did", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    rows = [
        ("documents embedded, every one answered", f"{summary.documents:,}"),
        ("answered more than once", f"{summary.duplicates}"),
        ("documents/s", f"{summary.documents / summary.index_s:,.1f}"),
        ("tokens/s", f"{summary.tokens / summary.index_s:,.0f}"),
        ("batches", f"{summary.batches:,}"),
        ("batch fill (tokens of the budget)", f"{summary.batch_fill:.0%}"),
        ("padding avoided (of what padding would cost)", f"{summary.padding_avoided:.0%}"),
        (f"RPC p50 / p99 of {summary.rpc_count}", _milliseconds(summary)),
    ]
    for what, figure in rows:
        table.add_row(what, figure)
    table.add_section()
    for stage, seconds in summary.stages:
        table.add_row(stage, f"{seconds:.1f} s")
    console.print(table)


def _milliseconds(summary: Summary) -> str:
    return f"{summary.rpc_p50_ms:.1f} / {summary.rpc_p99_ms:.1f} ms"

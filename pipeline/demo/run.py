"""`embedstream demo`: documents through Kafka, questions through Redis, figures at the end.

Who calls it: the CLI; `make demo`.
What must stay true: it checks what it shows and fails with a clear line when a document is lost, a
vector is wrong or a question has no answer; without a terminal it asks nobody anything; it ends in
bounded time and leaves nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from rich.console import Console

from pipeline.demo import screen
from pipeline.demo.catalog import EMBEDDER, RERANKER
from pipeline.demo.clients import DemoBrokerError
from pipeline.demo.corpus import Corpus, load_corpus
from pipeline.demo.doors import Door, broker_door, inproc_door
from pipeline.demo.fetch import fetch_model, find_model, is_fetched
from pipeline.demo.ledger import Ledger, Vectors, nearest, parse_metrics, quantile, vector_fault
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.local.kafka import packaged_kafka_binary
from pipeline.local.redis import find_redis
from pipeline.local.server import LocalServerError
from pipeline.settings.load import Settings

TEXTS_PER_REQUEST = 16
FEW = 12
"""Documents of the first answer: enough to choose among, embedded in a moment."""
CANDIDATES = 10
SHOWN = 3
RPC_CALLS = 50
PATIENCE_S = 60.0
ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `embedstream demo` may be told.

    documents    how many documents to embed
    in_process   no brokers: the same service inside this process
    prompt       ask the person at the terminal for questions; None: when there is one
    has_kafka    an Apache Kafka is configured (KAFKA_HOME), so no packaged broker is needed
    """

    documents: int = 1000
    in_process: bool = False
    prompt: bool | None = None
    has_kafka: bool = False


@dataclass(slots=True)
class _Run:
    """One run: where it prints and how long its stages took."""

    console: Console
    started: float = field(default_factory=time.monotonic)
    stages: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.stages.append((name, time.monotonic() - started))


async def run_demo(
    options: DemoOptions, *, settings: Settings | None = None, console: Console | None = None
) -> ExitStatus:
    """The whole demo. Returns OK only when everything that was shown has been checked.

    Raises:
        OperatorError: models, brokers or the service cannot be had, or a check failed.
    """
    run = _Run(console or Console())
    with run.stage("models"):
        await _fetch_models(run.console)
    with run.stage("documents"):
        corpus = await asyncio.to_thread(load_corpus, options.documents)
    _introduce(run.console, corpus)
    started = time.monotonic()
    try:
        async with _door(options, settings, run.console) as door:
            run.stages.append(("start of the service", time.monotonic() - started))
            await _show(door, corpus, options, run)
    except DemoBrokerError as error:
        raise OperatorError(f"demo: {error}") from error
    run.console.print("[bold green]Everything shown above was checked.[/bold green]")
    return ExitStatus.OK


async def _fetch_models(console: Console) -> None:
    """Both models, with a bar for what has to be downloaded."""
    missing = [m for name in (EMBEDDER, RERANKER) if (m := find_model(name)) and not is_fetched(m)]
    if not missing:
        return
    with screen.download_progress(console) as progress:
        for model in missing:
            bar = progress.add_task(f"model {model.name}", total=None)

            def report(stage: str, done: int, total: int, bar: Any = bar) -> None:
                progress.update(bar, description=stage, completed=done, total=total or None)

            await fetch_model(model.name, progress=report)


def _introduce(console: Console, corpus: Corpus) -> None:
    if corpus.note:
        console.print(f"[yellow]{corpus.note}[/yellow]")
    words = sorted(len(document.text.split()) for document in corpus.documents)
    console.print(
        f"{len(words):,} documents of the {corpus.name} ({corpus.licence}), "
        f"{words[0]} to {words[-1]} words, median {words[len(words) // 2]}"
    )


def _door(
    options: DemoOptions, settings: Settings | None, console: Console
) -> AbstractAsyncContextManager[Door]:
    if options.in_process:
        return inproc_door(settings)
    try:
        if not options.has_kafka:
            packaged_kafka_binary()
        find_redis()
    except LocalServerError as error:
        console.print(f"[yellow]{error}[/yellow]\nGoing on without brokers, in this process.")
        return inproc_door(settings)
    return broker_door()


async def _show(door: Door, corpus: Corpus, options: DemoOptions, run: _Run) -> None:
    for fact in door.facts:
        run.console.print(f"[dim]{fact}[/dim]")
    await _first_answer(door, corpus, run)
    ledger, index_s = await _index(door, corpus, run)
    batches, fill, avoided = _packing(parse_metrics(await door.metrics_text()), door)
    matrix = ledger.matrix()
    with run.stage("five questions"):
        for question in corpus.questions:
            hits, elapsed_ms = await _answer(door, corpus, matrix, question.text)
            screen.show_hits(run.console, question.text, hits[:SHOWN], elapsed_ms)
            if not hits:
                raise OperatorError(f"demo: no answer to {question.text!r}")
    latencies = await _measure_rpc(door, corpus, run)
    wants_prompt = options.prompt if options.prompt is not None else _is_terminal(run.console)
    if wants_prompt:
        await _prompt(door, corpus, matrix, run.console)
    screen.show_summary(
        run.console,
        screen.Summary(
            documents=ledger.n_answered,
            tokens=ledger.tokens,
            index_s=index_s,
            duplicates=ledger.duplicates,
            batches=batches,
            batch_fill=fill,
            padding_avoided=avoided,
            rpc_count=len(latencies),
            rpc_p50_ms=1000 * quantile(latencies, 0.5),
            rpc_p99_ms=1000 * quantile(latencies, 0.99),
            stages=run.stages,
        ),
    )


async def _first_answer(door: Door, corpus: Corpus, run: _Run) -> None:
    """One real answer early on, from a few documents: nobody waits for all of them to see one."""
    if not corpus.questions:
        return
    answers = {question.answer for question in corpus.questions}
    few = sorted(corpus.documents, key=lambda document: document.title not in answers)[:FEW]
    vectors = await _embed(door, [document.text for document in few], truncate="right")
    first = replace(corpus, documents=tuple(few))
    question = corpus.questions[0].text
    hits, elapsed_ms = await _answer(door, first, vectors, question)
    run.console.print(
        f"\nA first answer, from {len(few)} documents; all {len(corpus.documents):,} follow"
    )
    screen.show_hits(run.console, question, hits[:SHOWN], elapsed_ms)
    run.stages.append(("from the start to the first answer", time.monotonic() - run.started))


async def _index(door: Door, corpus: Corpus, run: _Run) -> tuple[Ledger, float]:
    """Embed every document in requests of several texts; returns the checked answers and seconds."""
    requests: list[tuple[str, bytes]] = []
    expected: dict[str, int] = {}
    texts = [document.text for document in corpus.documents]
    for first in range(0, len(texts), TEXTS_PER_REQUEST):
        chunk = texts[first : first + TEXTS_PER_REQUEST]
        request_id = f"doc-{first:06d}"
        # Longer documents are cut to the model's limit, and the reply says so.
        record = {"id": request_id, "input": chunk, "truncate": "right"}
        requests.append((request_id, msgpack.packb(record)))
        expected[request_id] = len(chunk)
    ledger = Ledger(expected)
    started = finished = time.monotonic()
    with run.stage("embedding"), screen.count_progress(run.console) as progress:
        bar = progress.add_task("embedding", total=len(texts))

        def on_reply(request_id: str, body: bytes) -> bool:
            nonlocal finished
            ledger.record(request_id, body)
            finished = time.monotonic()
            progress.update(bar, completed=ledger.n_answered)
            return ledger.complete

        await door.exchange(requests, on_reply, patience_s=PATIENCE_S)
    if problems := ledger.problems():
        raise OperatorError(f"demo: {'; '.join(problems)}")
    if ledger.truncated:
        run.console.print(
            f"[dim]{ledger.truncated} long documents were cut to the model's limit[/dim]"
        )
    return ledger, max(finished - started, 1e-9)


def _packing(metrics: dict[str, dict[str, float]], door: Door) -> tuple[int, float, float]:
    """(batches, share of the token budget used, share of padded execution that was avoided)."""

    def of(name: str) -> float:
        return metrics.get(f"embedstream_{name}", {}).get(EMBEDDER, 0.0)

    batches, tokens = of("batch_tokens_count"), of("batch_tokens_sum")
    avoided = of("padding_avoided_tokens_total")
    if not batches or not tokens:
        raise OperatorError("demo: the service reports no batch; its metrics are broken")
    fill = tokens / (batches * door.max_batch_tokens) if door.max_batch_tokens else 0.0
    return int(batches), fill, avoided / (avoided + tokens)


async def _answer(
    door: Door, corpus: Corpus, matrix: Vectors, question: str
) -> tuple[list[screen.Hit], float]:
    """Embed the question, take the nearest documents, let the reranker put them in order."""
    started = time.monotonic()
    (query,) = await _embed(door, [question])
    found = nearest(matrix, query, CANDIDATES)
    record = {
        "id": _next_id("rank"),
        "query": question,
        "documents": [corpus.documents[row].text for row, _ in found],
        "truncate": "right",
    }
    reply = await _ask(door, record)
    hits = []
    for result in reply["results"]:
        if "error" in result:
            raise OperatorError(f"demo: reranking failed: {result['error'].get('code')}")
        row, cosine = found[result["index"]]
        score = float(result["relevance_score"])
        if not np.isfinite(score):
            raise OperatorError("demo: a rerank score is not finite")
        title = corpus.documents[row].title
        hits.append(screen.Hit(title, cosine, result["index"] + 1, score))
    return hits, 1000 * (time.monotonic() - started)


async def _measure_rpc(door: Door, corpus: Corpus, run: _Run) -> list[float]:
    """Seconds of single embed requests, one after the other."""
    latencies = []
    titles = [document.title for document in corpus.documents]
    with run.stage(f"{RPC_CALLS} RPCs"), screen.count_progress(run.console) as progress:
        for number in progress.track(range(RPC_CALLS), description="RPC latency"):
            started = time.monotonic()
            await _embed(door, [f"what is {titles[number % len(titles)]}?"])
            latencies.append(time.monotonic() - started)
    return latencies


async def _embed(door: Door, texts: Sequence[str], *, truncate: str = "error") -> Vectors:
    """[n_texts, dimensions] float32, each vector checked."""
    record = {"id": _next_id("ask"), "input": list(texts), "truncate": truncate}
    reply = await _ask(door, record)
    rows = []
    for entry in reply["data"]:
        if "error" in entry:
            raise OperatorError(f"demo: a question failed: {entry['error'].get('code')}")
        if fault := vector_fault(entry.get("embedding")):
            raise OperatorError(f"demo: the vector of a question: {fault}")
        rows.append(np.frombuffer(entry["embedding"], dtype="<f4"))
    if len(rows) != len(texts):
        raise OperatorError(f"demo: {len(rows)} vectors for {len(texts)} texts")
    return np.stack(rows)


async def _ask(door: Door, record: dict[str, Any]) -> dict[str, Any]:
    try:
        body = await door.ask(record["id"], msgpack.packb(record), timeout_s=ASK_TIMEOUT_S)
    except TimeoutError:
        raise OperatorError(f"demo: no answer within {ASK_TIMEOUT_S:.0f} s") from None
    reply: dict[str, Any] = msgpack.unpackb(body)
    if reply.get("id") != record["id"]:
        raise OperatorError("demo: an answer names another request")
    if "error" in reply:
        raise OperatorError(f"demo: a question failed: {reply['error'].get('code')}")
    return reply


_counts: dict[str, int] = {}


def _next_id(kind: str) -> str:
    _counts[kind] = _counts.get(kind, 0) + 1
    return f"{kind}-{_counts[kind]}"


# --- the interactive prompt -----------------------------------------------------------------------


def _is_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stdin.isatty()


async def _prompt(door: Door, corpus: Corpus, matrix: Vectors, console: Console) -> None:
    console.print("\n[bold]Your own questions[/bold] (an empty line ends)")
    console.print("? ", end="")
    async for line in _lines():
        question = line.strip()
        if not question:
            return
        try:
            hits, elapsed_ms = await _answer(door, corpus, matrix, question)
        except OperatorError as error:  # too long a question, say: theirs, not ours
            console.print(f"[yellow]{error}[/yellow]")
        else:
            screen.show_hits(console, question, hits[:SHOWN], elapsed_ms)
        console.print("? ", end="")


async def _lines() -> AsyncIterator[str]:
    """Lines of the terminal without a thread, so that Ctrl-C ends the wait at once."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    descriptor = sys.stdin.fileno()
    loop.add_reader(descriptor, readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            line = sys.stdin.readline()
            if not line:
                return
            yield line
    finally:
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(descriptor)

"""`index` and `search`: documents of files into a collection, and questions to one.

Who calls it: `pipeline.cli.commands`.
What must stay true: `index` runs the same service as `serve`, on files; a run that was cut short is
run again; a question is embedded by the model that the collection was made with, or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.ports import NoMetrics
from pipeline.cli.console import (
    ItemProgress,
    configure_one_off_logging,
    load_settings,
    note_error,
    out_console,
    run_async,
    say,
    usage_error,
)
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal, watch_signals

if TYPE_CHECKING:
    from pipeline.indexing.sinks.base import Collection, Hit
    from pipeline.indexing.vectors import Vector
    from pipeline.oneoff import InprocService
    from pipeline.settings.load import Settings
    from schemas.requests import Output

SNIPPET = 160
MAX_TOLD = 20
"""Failures told one by one; the rest is counted."""
WATCH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """The arguments of `index`."""

    paths: list[str]
    to: str
    id: str | None = None
    text: str | None = None
    metadata: str | None = None
    chunk_tokens: int | None = None
    overlap: int = 0
    late: bool = False
    output: str | None = None
    by: str | None = None
    model: str | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()


def index(command: IndexCommand) -> int:
    """Index files; the exit status is 1 when a row was not stored."""
    from pipeline.demo.catalog import demo_models

    configure_one_off_logging()
    flags = {**_route_flags(command), **model_flags(command.model)}
    settings = load_settings(command.config, command.overrides, flags, default_models=demo_models())
    routes = tuple(route for route in settings.routes if route.name == "files")
    return run_async(_index(command, msgspec.structs.replace(settings, routes=routes)))


def model_flags(model: str | None) -> dict[str, str]:
    """`--model` as a flag of the settings."""
    if model is None:
        return {}
    return {f"models.{(Path(model).name or model).replace('.', '-')}.path": model}


def _route_flags(command: IndexCommand) -> dict[str, Any]:
    """The one route, as flags of the settings, which check it like any other."""
    from pipeline.indexing.files import TABLE_SUFFIXES

    tables = [p for p in command.paths if p == "-" or Path(p).suffix.lower() in TABLE_SUFFIXES]
    if tables and len(tables) < len(command.paths):
        raise usage_error("tables and texts have other fields: index them in two runs")
    if command.id is None and tables:
        raise usage_error("--id FIELD is needed: the field that tells rows apart, such as --id id")
    if command.text is None and tables:
        raise usage_error("--text TEMPLATE is needed, such as --text '{title}: {body?}'")
    by = command.by or ("sentences" if tables else "markdown")
    flags: dict[str, Any] = {
        "source": "inproc://files",  # stands for the files, which the source beside it reads
        "destination": command.to,
        "document.id": command.id or "key",
        "document.text": (command.text or "{text}").replace("\\n", "\n"),
        "document.output": command.output,
        "document.metadata": command.metadata or ("" if tables else "path,title"),
        "chunk.by": by,
        "chunk.max_tokens": command.chunk_tokens,
        "chunk.overlap": command.overlap or None,
        "chunk.late": command.late or None,
    }
    return {f"routes.files.{name}": value for name, value in flags.items() if value is not None}


async def _index(command: IndexCommand, settings: Settings) -> int:
    from pipeline.app import App
    from pipeline.indexing.files import FailureSink, FileSource
    from pipeline.transports.registry import Transport

    told = 0

    def tell(line: str) -> None:
        nonlocal told
        told += 1
        if told <= MAX_TOLD:
            note_error(line)

    counts = _Counts()
    with ItemProgress("documents", None) as progress:
        source = FileSource(command.paths, on_settled=progress.advance)
        sink = FailureSink(tell)
        stop = StopSignal(settings.lifecycle.drain_budget_s)
        app = App(
            settings,
            metrics=counts,
            transports={"files": Transport(source, sink)},
        )
        with watch_signals(stop):
            status = await app.run(stop)
    if told > MAX_TOLD:
        note_error(f"... and {told - MAX_TOLD} more rows")
    if source.error is not None:
        note_error(source.error)
    written = counts.by_outcome.get("written", 0)
    unchanged = source.n_settled - sink.n_failed - written
    say(
        f"{shown(command.to)}: {written} documents written, {unchanged} there already, "
        f"{sink.n_failed} failed"
    )
    if source.n_released:
        note_error(f"{source.n_released} were not finished: run the same command again")
    bad = sink.n_failed or source.n_released or source.error is not None
    return status if status is not ExitStatus.OK else ExitStatus.ERROR if bad else ExitStatus.OK


class _Counts(NoMetrics):
    """Counts what became of documents."""

    def __init__(self) -> None:
        self.by_outcome: dict[str, int] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Only what the last line of the run tells."""
        if name == "index_documents_total":
            outcome = labels["outcome"]
            self.by_outcome[outcome] = self.by_outcome.get(outcome, 0) + int(value)


def shown(url: str) -> str:
    """An address without its password."""
    from pipeline.redact import redact

    return redact(url)


# --- reading -------------------------------------------------------------------------------------


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Collection]:
    """An existing collection. Raises `OperatorError`, also for what the store says inside the block."""
    from pipeline.indexing.identity import WrongCollection
    from pipeline.indexing.sinks.base import StoreUnavailable
    from pipeline.indexing.sinks.registry import open_collection

    try:
        collection = await asyncio.to_thread(open_collection, url)
    except ValueError as error:
        raise usage_error(str(error)) from error
    try:
        await collection.open_as_is()
        yield collection
    except (StoreUnavailable, WrongCollection) as error:
        text = str(error)
        named = text.startswith(collection.where)
        raise OperatorError(text if named else f"{collection.where}: {text}") from error
    finally:
        await collection.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCommand:
    """The arguments of `search`. watch: ask again whenever the collection has changed."""

    question: str
    url: str
    k: int = 5
    rerank: bool = False
    watch: bool = False
    prompt_name: str | None = None
    model: str | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()


def search(command: SearchCommand) -> int:
    """Ask a collection."""
    from pipeline.demo.catalog import demo_models

    configure_one_off_logging()
    settings = load_settings(
        command.config,
        command.overrides,
        model_flags(command.model),
        default_models=demo_models(),
    )
    run_async(_search(command, settings))
    return ExitStatus.OK


async def _search(command: SearchCommand, settings: Settings) -> None:
    from pipeline.oneoff import run_inproc

    async with reading(command.url) as collection:
        assert collection.identity is not None
        async with run_inproc(
            settings if command.rerank else embedding_models(settings)
        ) as service:
            name = _model_of(service, collection, settings)
            vector = await _embedded(service, name, collection.identity.kind, command)
            changed: int | None = -1
            while True:
                told = await collection.status()
                if told.changed_at_ms != changed:
                    changed = told.changed_at_ms
                    _show(await _found(command, collection, service, vector))
                if not command.watch:
                    return
                await asyncio.sleep(WATCH_S)


def embedding_models(settings: Settings) -> Settings:
    """The settings without the models that are there for something else."""
    models = {
        name: model
        for name, model in settings.models.items()
        if not model.default_for or "embed" in model.default_for
    }
    return msgspec.structs.replace(settings, models=models)


def _model_of(service: InprocService, collection: Collection, settings: Settings) -> str:
    identity = collection.identity
    assert identity is not None
    for name, info in service.app.models.items():
        if info.fingerprint == identity.fingerprint:
            return name
    raise OperatorError(
        f"{collection.where} was made with model {identity.model} (fingerprint "
        f"{identity.fingerprint}), which is not loaded: name it with --model",
        exit_status=ExitStatus.USAGE,
    )


async def _embedded(
    service: InprocService, name: str, kind: Output, command: SearchCommand
) -> Vector:
    info = service.app.models[name]
    prompt = command.prompt_name or ("query" if "query" in info.prompts else None)
    request: dict[str, Any] = {
        "id": "search", "task": "embed", "model": name, "input": command.question, "outputs": [kind],
    }  # fmt: skip
    if prompt is not None:
        request["prompt_name"] = prompt
    reply = await _asked_once(service, request)
    (vector,) = vectors_in(reply.items[0], late=False)
    return vector


def vectors_in(item: Any, *, late: bool = True) -> list[Vector]:
    """The vectors of one entry of a reply. late: `spans` of it, if there are any, have one each."""
    import numpy as np

    from pipeline.indexing.vectors import SparseVector

    if item.sparse is not None:
        return [SparseVector.of(item.sparse.indices, item.sparse.values)]
    if item.multivector is not None:
        rows = [np.frombuffer(one, dtype="<f4") for one in item.multivector]
        return list(rows) if late and item.spans is not None else [np.stack(rows)]
    return [np.frombuffer(item.embedding or b"", dtype="<f4")]


async def asked(service: InprocService, request: dict[str, Any]) -> Any:
    """The reply to a request for this process's own service. Raises `OperatorError` for a failure."""
    import msgpack

    from schemas.codec import decode_reply
    from schemas.headers import CONTENT_TYPE, MSGPACK
    from schemas.results import FailureReply

    records = await service.request(msgpack.packb(request), {CONTENT_TYPE: MSGPACK.encode()})
    reply = decode_reply(records[0].body, records[0].headers)
    if isinstance(reply, FailureReply):
        raise OperatorError(f"{reply.error.code}: {reply.error.message}")
    return reply


async def _asked_once(service: InprocService, request: dict[str, Any]) -> Any:
    reply = await asked(service, request)
    if (error := reply.items[0].error) is not None:
        raise OperatorError(f"{error.code}: {error.message}")
    return reply


async def _found(
    command: SearchCommand, collection: Collection, service: InprocService, vector: Any
) -> list[Hit]:
    hits = await collection.search(vector, command.k * 4 if command.rerank else command.k)
    if not command.rerank or not hits:
        return hits
    documents = [{"text": hit.text, "id": str(i)} for i, hit in enumerate(hits)]
    request = {
        "id": "rerank", "task": "rerank", "query": command.question, "documents": documents,
        "top_n": command.k, "truncate": "right",
    }  # fmt: skip
    reply = await _asked_once(service, request)
    import dataclasses

    return [
        dataclasses.replace(hits[int(item.id)], score=item.relevance_score) for item in reply.items
    ]


def _show(hits: Sequence[Hit]) -> None:
    from rich.table import Table

    table = Table("score", "document", "chunk", "text")
    for hit in hits:
        text = " ".join(hit.text.split())
        shown = text if len(text) <= SNIPPET else text[: SNIPPET - 3] + "..."
        table.add_row(f"{hit.score:.3f}", _plain(hit.document_id), str(hit.ordinal), _plain(shown))
    out_console().print(table)


def _plain(text: str) -> str:
    """Text of documents as it is: no markup, no control characters of a terminal."""
    from rich.markup import escape

    return escape("".join(char if char.isprintable() else " " for char in text))

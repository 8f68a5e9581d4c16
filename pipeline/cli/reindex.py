"""`reindex`: a collection again, for another model, prompt, size or cutting, from the text it stores.

Who calls it: `pipeline.cli.commands`.
What must stay true: the first collection is only read; nothing is embedded before everything that can
be refused has been; a run that was cut short is run again and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.cli.console import (
    ItemProgress,
    configure_one_off_logging,
    load_settings,
    note_error,
    run_async,
    say,
    usage_error,
)
from pipeline.cli.index import MAX_TOLD, embedding_models, model_flags, reading, shown
from pipeline.lifecycle import ExitStatus, OperatorError

if TYPE_CHECKING:
    from gpu.batch import ModelInfo
    from pipeline.indexing.chunking import Chunker
    from pipeline.indexing.identity import CollectionIdentity
    from pipeline.indexing.options import ChunkOptions, DocumentOptions
    from pipeline.indexing.reindex import Embed, Reindexing, Totals
    from pipeline.indexing.sinks.base import Collection
    from pipeline.oneoff import InprocService
    from pipeline.settings.load import Settings
    from schemas.requests import Text

PASSES = 3
"""Passes over a collection that changes meanwhile; what then still changes is told."""
TEXTS_A_REQUEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReindexCommand:
    """The arguments of `reindex`."""

    url: str
    to: str
    alias: str | None = None
    sample: int = 100
    prompt: str | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    output: str | None = None
    chunk_tokens: int | None = None
    overlap: int | None = None
    late: bool | None = None
    by: str | None = None
    model: str | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()


def reindex(command: ReindexCommand) -> int:
    """Fill a second collection; the exit status is 1 when a document is missing there."""
    from pipeline.demo.catalog import demo_models

    if command.url == command.to:
        raise usage_error("--to names the same collection: the new one needs a name of its own")
    configure_one_off_logging()
    settings = load_settings(
        command.config,
        command.overrides,
        model_flags(command.model),
        default_models=demo_models(),
    )
    name, document, chunk = _options(command, settings)
    settings = embedding_models(settings)
    if name is not None:
        settings = msgspec.structs.replace(settings, models={name: settings.models[name]})
    return run_async(_reindex(command, settings, name, document, chunk))


def _options(
    command: ReindexCommand, settings: Settings
) -> tuple[str | None, DocumentOptions, ChunkOptions]:
    """Model, prompt and cutting: of the route that writes into the new collection, else of the flags."""
    from pipeline.indexing.options import ChunkOptions, DocumentOptions

    flags = {
        "prompt": command.prompt,
        "prompt_name": command.prompt_name,
        "dimensions": command.dimensions,
        "output": command.output,
    }
    cutting = {
        "max_tokens": command.chunk_tokens,
        "overlap": command.overlap,
        "by": command.by,
        "late": command.late,
    }
    given = {k: v for k, v in flags.items() if v is not None}
    cut = {k: v for k, v in cutting.items() if v is not None}
    route = next((r for r in settings.routes if r.destination == command.to), None)
    if route is not None:
        if given or cut:
            raise usage_error(
                f"route {route.name} writes into that collection and says how: leave out "
                + ", ".join("--" + k.replace("_", "-") for k in (*given, *cut))
            )
        return settings.model_for(route, "embed"), route.document, route.chunk
    try:
        return (
            Path(command.model).name.replace(".", "-") if command.model else None,
            msgspec.convert(given, DocumentOptions),
            msgspec.convert(cut, ChunkOptions),
        )
    except msgspec.ValidationError as error:
        raise usage_error(str(error)) from error


async def _reindex(
    command: ReindexCommand,
    settings: Settings,
    name: str | None,
    document: DocumentOptions,
    chunk: ChunkOptions,
) -> int:
    from actors.ports import SystemClock
    from pipeline.indexing.reindex import Reindexing
    from pipeline.oneoff import run_inproc

    async with AsyncExitStack() as stack:
        new = await stack.enter_async_context(_writable(command))
        old = await stack.enter_async_context(reading(command.url))
        service = await stack.enter_async_context(run_inproc(settings))
        info, document, chunker, identity = _prepared(service, name, document, chunk)
        _check_overlap(old, chunk)
        await _open(new, identity)
        total = (await old.status()).n_documents
        with ItemProgress("documents", total) as progress:
            reindexing = Reindexing(
                old,
                new,
                chunker=chunker,
                embed=_embedder(service, info.name, document),
                now_ms=SystemClock().epoch_ms,
                on_document=progress.advance,
                n_sampled=command.sample,
            )
            totals = await _passes(reindexing)
        agreement = await reindexing.agreement() if command.sample else None
        bad = _tell(command, info, totals, agreement)
        if command.alias is not None and not bad:
            await new.lead_alias(command.alias)
            say(f"{command.alias} leads to {new.where} now")
        return ExitStatus.ERROR if bad else ExitStatus.OK


def _writable(command: ReindexCommand) -> Any:
    from contextlib import asynccontextmanager

    from pipeline.indexing.sinks.registry import open_collection

    @asynccontextmanager
    async def opened() -> Any:
        try:
            collection = await asyncio.to_thread(open_collection, command.to)
        except ValueError as error:
            raise usage_error(str(error)) from error
        if command.alias is not None and not collection.has_aliases:
            raise usage_error(
                f"--alias: {collection.where} is in a store that has no aliases: change the address "
                "where it is read"
            )
        try:
            yield collection
        finally:
            await collection.aclose()

    return opened()


def _prepared(
    service: InprocService, name: str | None, document: DocumentOptions, chunk: ChunkOptions
) -> tuple[ModelInfo, DocumentOptions, Chunker, CollectionIdentity]:
    from pipeline.indexing.route import chunker_and_identity, completed

    assert service.app.graph is not None
    models = service.app.graph.models
    able = [one for one, info in models.infos.items() if "embed" in info.tasks]
    if not able:
        raise usage_error("no loaded model embeds: name one with --model")
    info = models.infos[name or able[0]]
    document = completed(document, info)
    try:
        chunker, identity = chunker_and_identity(
            info, models.runners[info.name].encoder, document, chunk
        )
    except ValueError as error:
        raise OperatorError(str(error), exit_status=ExitStatus.USAGE) from error
    return info, document, chunker, identity


def _check_overlap(old: Collection, chunk: ChunkOptions) -> None:
    """Late chunking reads a document as its stored chunks make it, one behind the other."""
    assert old.identity is not None
    told = old.identity.chunking
    if chunk.late and " overlap=0" not in told:
        raise OperatorError(
            f"{old.where} holds chunks that overlap ({told}), from which late chunking would read what "
            "they share twice: index the documents themselves again",
            exit_status=ExitStatus.USAGE,
        )


async def _open(new: Collection, identity: CollectionIdentity) -> None:
    from pipeline.indexing.identity import WrongCollection
    from pipeline.indexing.sinks.base import StoreUnavailable

    try:
        await new.open(identity)
    except (StoreUnavailable, WrongCollection) as error:
        text = str(error)
        raise OperatorError(
            text if text.startswith(new.where) else f"{new.where}: {text}"
        ) from error


def _embedder(service: InprocService, model: str, document: DocumentOptions) -> Embed:
    """Asks the service in this process, some requests at a time."""
    from pipeline.cli.index import asked, vectors_in
    from schemas.errors import EmbedstreamError

    options = {
        "prompt": document.prompt,
        "prompt_name": document.prompt_name,
        "dimensions": document.dimensions,
    }
    given = {k: v for k, v in options.items() if v is not None}

    async def one(texts: Sequence[Text]) -> list[Any]:
        spans = [text.spans for text in texts]
        request: dict[str, Any] = {
            "id": "reindex", "task": "embed", "model": model, **given,
            "input": [
                {"text": text.text, "spans": text.spans} if text.spans else text.text
                for text in texts
            ],
        }  # fmt: skip
        if not any(spans):
            request |= {"truncate": "right", "outputs": [document.output]}
        reply = await asked(service, request)
        return [
            item.error if isinstance(item.error, EmbedstreamError) else vectors_in(item)
            for item in reply.items
        ]

    async def embed(texts: Sequence[Text]) -> list[Any]:
        parts = [texts[i : i + TEXTS_A_REQUEST] for i in range(0, len(texts), TEXTS_A_REQUEST)]
        found = await asyncio.gather(*(one(part) for part in parts))
        return [vectors for part in found for vectors in part]

    return embed


async def _passes(reindexing: Reindexing) -> Totals:
    from pipeline.indexing.sinks.base import StoreUnavailable

    written = 0
    try:
        for _ in range(PASSES):
            totals = await reindexing.once()
            written += totals.written
            if not totals.changing:
                break
    except StoreUnavailable as error:
        raise OperatorError(f"{error}: run the same command again, it goes on") from error
    totals.written = written
    return totals


def _tell(
    command: ReindexCommand, info: ModelInfo, totals: Totals, agreement: float | None
) -> bool:
    """The last lines; whether a document is missing."""
    for name, reason in totals.failed[:MAX_TOLD]:
        note_error(f"{name}: {reason}")
    say(
        f"{shown(command.to)}: {totals.written} documents written with {info.name}, "
        f"{totals.there} there already, {len(totals.failed)} failed"
    )
    if agreement is not None:
        say(f"overlap@10 with {shown(command.url)}: {agreement:.2f} over {command.sample} chunks")
    if totals.changing:
        note_error(
            f"{totals.changing} documents changed meanwhile: run the same command again for them"
        )
    return bool(totals.failed or totals.changing)

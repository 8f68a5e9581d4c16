"""Both ends of routes into collections: decoder and destination, built from a route's settings.

Who calls it: the graph, once per route, when the models are loaded.
What must stay true: routes that name the same collection share one writer, so that two versions of a
document meet in one place; what a route asks for and its model cannot do stops the start with one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from actors.ports import Clock, Metrics, Sink
from gpu.batch import Encoder, ModelInfo
from gpu.encode.measure import check_late, text_measure
from pipeline.indexing.chunking import Chunker
from pipeline.indexing.decoder import DocumentDecoder
from pipeline.indexing.destination import CollectionDestination
from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.mapping import DocumentMapping
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.indexing.report import Report
from pipeline.indexing.sinks.base import Collection
from pipeline.indexing.sinks.registry import is_collection, open_collection
from pipeline.indexing.writer import IndexWriter, WritePolicy
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.model_pool import LoadedModels
from pipeline.settings.records import PublishSettings, RouteSettings
from schemas.errors import Unsupported
from schemas.requests import Limits


class IndexingRoutes:
    """Builds the routes into collections of one service.

    open: address -> collection; tests put their own here.
    """

    def __init__(
        self,
        policy: WritePolicy,
        *,
        clock: Clock,
        metrics: Metrics,
        open: Callable[[str], Collection] = open_collection,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self._open = open
        self._collections: dict[str, Collection] = {}
        self.writers: dict[str, IndexWriter] = {}

    async def prepare(self, routes: Iterable[RouteSettings]) -> None:
        """Import what the routes' stores need, in a thread: some clients take seconds to import.

        Raises `OperatorError`.
        """
        for route in routes:
            if is_collection(route.destination) and route.destination not in self._collections:
                try:
                    collection = await asyncio.to_thread(self._open, route.destination)
                except ValueError as error:
                    raise OperatorError(
                        f"route {route.name}: {error}", exit_status=ExitStatus.USAGE
                    ) from error
                self._collections[route.destination] = collection

    def ends(
        self,
        route: RouteSettings,
        model: str | None,
        loaded: LoadedModels,
        *,
        limits: Limits,
        sink: Sink,
    ) -> tuple[DocumentDecoder, CollectionDestination]:
        """Decoder and destination of one route, whose documents `model` embeds; `sink` takes its reports.

        Raises `OperatorError` with the option that is to blame.
        """
        try:
            if model is None:
                raise ValueError("no loaded model embeds: add one to [models]")
            info, encoder = loaded.infos[model], loaded.runners[model].encoder
            return self._ends(route, info, encoder, limits, sink)
        except ValueError as error:
            raise OperatorError(
                f"route {route.name}: {error}", exit_status=ExitStatus.USAGE
            ) from error

    def _ends(
        self, route: RouteSettings, info: ModelInfo, encoder: Encoder, limits: Limits, sink: Sink
    ) -> tuple[DocumentDecoder, CollectionDestination]:
        url, document = route.destination, route.document
        writer = self.writers.get(url)
        owner = writer is None
        if writer is None:
            writer = self.writers[url] = IndexWriter(
                self._collections[url],
                policy=self._policy,
                clock=self._clock,
                metrics=self._metrics,
            )
        chunker, identity = chunker_and_identity(info, encoder, document, route.chunk)
        decoder = DocumentDecoder(
            document,
            DocumentMapping(document),
            chunker,
            writer,
            route=route.name,
            model=info.name,
            limits=limits,
            metrics=self._metrics,
            reports=route.report_to is not None,
        )
        report = None if route.report_to is None else Report(sink, writer.collection.where)
        return decoder, CollectionDestination(
            writer, identity, lane=route.lane, owner=owner, report=report
        )


def write_policy(publish: PublishSettings) -> WritePolicy:
    """The writer's own tries are few: egress asks it again, under `publish.attempts`."""
    return WritePolicy(
        attempts=3,
        first_backoff_s=publish.backoff_ms / 1000,
        max_backoff_s=publish.max_backoff_ms / 1000,
    )


def chunker_and_identity(
    info: ModelInfo, encoder: Encoder, document: DocumentOptions, chunk: ChunkOptions
) -> tuple[Chunker, CollectionIdentity]:
    """How texts are cut for a model, and what its vectors are. Raises `ValueError`."""
    if "embed" not in info.tasks or info.dimensions is None:
        raise ValueError(f"model {info.name} makes no dense vectors: choose an embedding model")
    dimensions = document.dimensions or info.dimensions
    allowed = info.allowed_dimensions
    if dimensions != info.dimensions and dimensions not in (allowed or ()):
        told = ", ".join(map(str, allowed or (info.dimensions,)))
        raise ValueError(f"document.dimensions is {dimensions}; model {info.name} has {told}")
    try:
        measure = text_measure(encoder, prompt=document.prompt, prompt_name=document.prompt_name)
        if chunk.late:
            check_late(encoder)
    except Unsupported as error:
        raise ValueError(f"model {info.name}: {error.message}") from error
    chunker = Chunker(chunk, tokenizer_json=measure.tokenizer_json, room=measure.room)
    return chunker, CollectionIdentity(
        model=info.name,
        fingerprint=info.fingerprint,
        dimensions=dimensions,
        prompt=measure.prompt,
        chunking=chunker.described,
    )

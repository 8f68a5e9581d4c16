"""Both ends of routes into collections: decoder and destination, built from a route's settings.

Who calls it: the graph, once per route, when the models are loaded.
What must stay true: routes that name the same collection share one writer, so that two versions of a
document meet in one place; what a route asks for and its model cannot do stops the start with one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

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
from pipeline.indexing.vectors import METRICS
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
        url, document = route.destination, completed(route.document, info)
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
            output=identity.kind,
            limits=limits,
            metrics=self._metrics,
            lane=route.lane,
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


def completed(document: DocumentOptions, info: ModelInfo) -> DocumentOptions:
    """The options with what the model says where they say nothing: its own output, and the prompt that a
    model with vectors per token has for documents."""
    output = document.output or info.default_outputs[0]
    name = document.prompt_name
    if output == "multivector" and document.prompt is None and name is None:
        name = "document" if "document" in info.prompts else info.default_prompt_name
    return msgspec.structs.replace(document, output=output, prompt_name=name)


def chunker_and_identity(
    info: ModelInfo, encoder: Encoder, document: DocumentOptions, chunk: ChunkOptions
) -> tuple[Chunker, CollectionIdentity]:
    """How texts are cut for a model, and what its vectors are. Raises `ValueError`."""
    document = completed(document, info)
    output = document.output
    if "embed" not in info.tasks or output not in info.outputs:
        told = ", ".join(sorted(info.outputs)) if "embed" in info.tasks else "none"
        raise ValueError(
            f"model {info.name} makes no {output or 'dense'} vectors (it makes: {told}): choose another "
            "model, or document.output"
        )
    if chunk.late and output != "dense":
        raise ValueError(f"chunk.late is for dense vectors, and document.output is {output}")
    try:
        measure = text_measure(encoder, prompt=document.prompt, prompt_name=document.prompt_name)
        if chunk.late:
            check_late(encoder)
    except Unsupported as error:
        raise ValueError(f"model {info.name}: {error.message}") from error
    chunker = Chunker(chunk, tokenizer_json=measure.tokenizer_json, room=measure.room)
    native = {
        "dense": info.dimensions,
        "sparse": measure.vocabulary,
        "multivector": info.multivector_dimensions,
    }[output]
    assert native, "a model says how large its vectors are"
    dimensions = document.dimensions or native
    allowed = None if output == "sparse" else info.allowed_dimensions
    if dimensions != native and dimensions not in (allowed or ()):
        told = ", ".join(map(str, allowed or (native,)))
        raise ValueError(f"document.dimensions is {dimensions}; model {info.name} has {told}")
    return chunker, CollectionIdentity(
        model=info.name,
        fingerprint=info.fingerprint,
        dimensions=dimensions,
        metric=METRICS[output],
        prompt=measure.prompt,
        chunking=chunker.described,
    )

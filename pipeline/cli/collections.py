"""The commands over collections: `index` (and `index status`), `search`, `reindex`. Options only.

Who calls it: `pipeline.cli.commands` adds them to the command line.
What must stay true: as there: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipeline.cli.console import usage_error
from pipeline.cli.options import ConfigOption, ModelOption, SetOption


def index(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|FOLDER|-",
            help="JSONL, JSON, CSV, TSV, Parquet; folders or files of text, Markdown, HTML; "
            "- for JSONL on stdin. Or: status URL.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="The collection, as in lance:///folder#docs."),
    ] = None,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="FIELD", help="The field that names a document.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEMPLATE", help="As in '{title}\\n\\n{body?}'."),
    ] = None,
    metadata: Annotated[
        str | None,
        typer.Option("--metadata", metavar="FIELDS", help="Kept beside each chunk: url,lang or *."),
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="Tokens of a chunk; else what fits.")
    ] = None,
    overlap: Annotated[int, typer.Option("--overlap", help="Tokens that chunks share.")] = 0,
    late: Annotated[
        bool, typer.Option("--late", help="Late chunking: the model reads the document whole.")
    ] = False,
    output: Annotated[
        Literal["dense", "sparse", "multivector"] | None,
        typer.Option("--output", help="Which vectors of the model; else its own."),
    ] = None,
    by: Annotated[
        Literal["sentences", "markdown", "tokens"] | None,
        typer.Option("--by", help="Where chunks are cut; folders: markdown, else sentences."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="URL",
            help="For status: a topic that fills it, as in kafka://host:9092/docs?group=indexer. Repeat "
            "it; else the routes of --config that do.",
        ),
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Files into a collection; again, for what has changed.

    What is stored already and did not change is not embedded again, so a run that was cut short is
    simply run again. A file never overwrites what a topic has told the collection.

    \b
    embedstream index docs.jsonl --to lance://index#docs --id id --text '{title}: {body}'
    embedstream index handbook/ --to lance://index#docs
    embedstream index status lance://index#docs
    embedstream index status lance://index#docs --source 'kafka://localhost:9092/docs?group=indexer'
    """
    from pipeline.cli import index as room

    if paths[0] == "status" and len(paths) == 2 and to is None:
        from pipeline.cli.index_status import StatusCommand
        from pipeline.cli.index_status import status as run

        return run(StatusCommand(paths[1], tuple(source or ()), config, tuple(set_ or ())))
    if source:
        raise usage_error("--source goes with `index status URL`; `index` reads files")
    if to is None:
        raise usage_error("--to URL is needed: the collection, such as --to lance://index#docs")
    return room.index(
        room.IndexCommand(
            paths=paths,
            to=to,
            id=id_,
            text=text,
            metadata=metadata,
            chunk_tokens=chunk_tokens,
            overlap=overlap,
            late=late,
            output=output,
            by=by,
            model=model,
            config=config,
            overrides=set_ or [],
        )
    )


def search(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to look for.")],
    in_: Annotated[
        str, typer.Option("--in", metavar="URL", help="The collection, as in lance:///folder#docs.")
    ],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many chunks.")] = 5,
    rerank: Annotated[
        bool, typer.Option("--rerank", help="Let a reranker put four times as many in order.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Ask again whenever the collection has changed.")
    ] = False,
    prompt_name: Annotated[
        str | None, typer.Option(help="The model's prompt for questions; else `query`, if any.")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """The chunks of a collection that are nearest to a question.

    The question is embedded by the model that the collection was made with, or refused.

    \b
    embedstream search "who invented the mouse?" --in lance://index#docs --rerank
    """
    from pipeline.cli import index as room

    return room.search(
        room.SearchCommand(
            question=question,
            url=in_,
            k=k,
            rerank=rerank,
            watch=watch,
            prompt_name=prompt_name,
            model=model,
            config=config,
            overrides=set_ or [],
        )
    )


def reindex(
    url: Annotated[str, typer.Argument(metavar="URL", help="The collection that there is.")],
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="The new one; it is made, or gone on with.")
    ],
    alias: Annotated[
        str | None,
        typer.Option("--alias", help="Let this name lead readers to the new one, at the end."),
    ] = None,
    sample: Annotated[
        int, typer.Option("--sample", min=0, max=10_000, help="Chunks to compare both with.")
    ] = 100,
    prompt: Annotated[str | None, typer.Option(help="Text put before each chunk.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="The model's prompt for it.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Size, where vectors can be cut.")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="Tokens of a chunk; else what fits.")
    ] = None,
    overlap: Annotated[int | None, typer.Option("--overlap", help="As for `index`.")] = None,
    late: Annotated[bool | None, typer.Option("--late", help="As for `index`.")] = None,
    output: Annotated[
        Literal["dense", "sparse", "multivector"] | None,
        typer.Option("--output", help="Which vectors of the model; else its own."),
    ] = None,
    by: Annotated[
        Literal["sentences", "markdown", "tokens"] | None,
        typer.Option("--by", help="As for `index`."),
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """A collection again, for another model, while it serves.

    From the text that the first one stores. A route of --config that writes into the new collection says model,
    prompt and cutting; without one the options do. Cut short, it is run again and goes on.

    \b
    embedstream reindex lance://index#docs --to lance://index#docs2 --model bge-small-en-v1.5
    """
    from pipeline.cli import reindex as room

    return room.reindex(
        room.ReindexCommand(
            url=url,
            to=to,
            alias=alias,
            sample=sample,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            chunk_tokens=chunk_tokens,
            overlap=overlap,
            late=late,
            output=output,
            by=by,
            model=model,
            config=config,
            overrides=set_ or [],
        )
    )

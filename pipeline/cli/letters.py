"""The commands over dead letters. Options only; `pipeline.cli.letters_room` runs them.

Who calls it: `pipeline.cli.commands` adds them to the command line.
What must stay true: as there: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipeline.cli.options import JsonOption

letters_app = typer.Typer(
    no_args_is_help=True,
    help="Records that were given up: list, show, replay, purge.",
    rich_markup_mode=None,
)

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="kafka://host:port/TOPIC, redis://host:port/stream:NAME or file:///FILE.jsonl.",
    ),
]
KindOption = Annotated[
    Literal["failed", "unprocessable", "any"],
    typer.Option("--kind", help="failed: tried, gave up. unprocessable: never could be read."),
]


@letters_app.command("list")
def list_(url: UrlArgument, kind: KindOption = "any", json: JsonOption = False) -> int:
    """One line each: position, kind, code, attempts, age, size, id, origin.

    \b
    embedstream dead-letters list kafka://localhost:9092/embedstream.dead-letters
    """
    from pipeline.cli import letters_room as room

    return room.list_(url, kind, json)


@letters_app.command("show")
def show(
    url: UrlArgument,
    position: Annotated[str, typer.Argument(metavar="POSITION", help="As `list` shows it.")],
    payload: Annotated[
        bool, typer.Option("--payload", help="The record itself, byte for byte, to stdout.")
    ] = False,
) -> int:
    """Why one record was given up, and where it came from. Not what it says, unless asked."""
    from pipeline.cli import letters_room as room

    return room.show(url, position, payload)


@letters_app.command("replay")
def replay(
    url: UrlArgument,
    positions: Annotated[
        list[str] | None, typer.Argument(metavar="POSITION", help="As `list` shows them.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="All that were not sent again before.")
    ] = False,
    kind: KindOption = "failed",
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="NAME", help="This topic, stream or file; else the origin."),
    ] = None,
) -> int:
    """Send records again, as they were: same bytes, headers, key and id; attempts start anew.

    A stream's entry is deleted then; of a topic it is remembered that the letter was sent again.

    \b
    embedstream dead-letters replay kafka://localhost:9092/embedstream.dead-letters --all
    embedstream dead-letters replay file:///dead.jsonl --all --to again.jsonl
    """
    from pipeline.cli import letters_room as room

    return room.replay(url, positions or [], all_, kind, to)


@letters_app.command("purge")
def purge(
    url: UrlArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Throw all dead letters away that are there now."""
    from pipeline.cli import letters_room as room

    return room.purge(url, yes)

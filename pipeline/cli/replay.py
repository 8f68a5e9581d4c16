"""`embedstream replay`: its options; `pipeline.cli.replay_room` runs it.

Who calls it: `pipeline.cli.commands` adds it to the command line.
What must stay true: as there: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.options import ConfigOption, SetOption

_POINT = "start, end, an offset, or a time such as 2026-03-01T12:00:00Z."


def replay(
    topic: Annotated[str, typer.Option("--topic", metavar="NAME", help="Whose records.")],
    begin: Annotated[str, typer.Option("--from", metavar="POINT", help=f"First: {_POINT}")],
    end: Annotated[
        str, typer.Option("--to", metavar="POINT", help="That one and all behind it are left out.")
    ] = "end",
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", metavar="N", min=0, help="Only this one. Repeat it."),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            "--route", metavar="NAME", help="Through this route; else the one that reads it."
        ),
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Send a part of a Kafka topic through a route once more.

    Reads without a group and commits nothing, so the service beside it goes on undisturbed. Replies go
    where they went, documents into the collection of the route. Ends when all have their outcome.

    \b
    embedstream replay -c service.toml --topic docs --from start
    embedstream replay -c service.toml --topic docs --from 2026-03-01T12:00:00Z --to 2026-03-01T13:00:00Z
    embedstream replay -c service.toml --topic docs --partition 2 --from 1200 --to 1300
    """
    from pipeline.cli.replay_room import ReplayCommand
    from pipeline.cli.replay_room import replay as run

    return run(
        ReplayCommand(topic, begin, end, tuple(partitions or ()), route, config, tuple(set_ or ()))
    )

"""Options that several commands share, each with its help text.

Who calls it: `pipeline.cli.commands`.
What must stay true: imports typer and nothing heavier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.console import usage_error

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="EMBEDSTREAM_CONFIG", metavar="FILE", help="TOML settings file."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="One setting, as in batching.linger_ms=2. Repeat it.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|DIR", help="Model name, folder or hub id."),
]
ViaOption = Annotated[
    str | None,
    typer.Option(
        "--via",
        metavar="URL",
        help="Ask a running service: redis://host:port[/stream], redis-list:// or kafka://host:port[/topic].",
    ),
]
OutputOption = Annotated[
    Literal["table", "jsonl", "npz"],
    typer.Option("--output", "-o", help="jsonl: one wire reply a line, vectors as floats."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write results here instead of stdout."),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Longest wait for one answer."),
]
TruncateOption = Annotated[
    Literal["error", "right", "left"],
    typer.Option("--truncate", help="Texts longer than the model takes: refuse, or cut that end."),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Embed a few texts with each model's own library too, and print the worst difference.",
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Defaults and honoured keys of model folders, too."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, for machines.")
]


def boolean(name: str, text: str) -> bool:
    """The one boolean rule of settings, for an option of a command."""
    from pipeline.settings.build import NotBoolean, parse_bool

    try:
        return parse_bool(text)
    except NotBoolean as refused:
        raise usage_error(f"{name} {refused}, not {text[:40]!r}; {refused.remedy}") from None

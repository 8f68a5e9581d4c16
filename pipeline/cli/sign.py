"""`embedstream sign`: the right to have replies written to one destination.

Who calls it: `pipeline.cli.commands` adds it to the command line.
What must stay true: as there: nothing heavy is imported before a command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer


def sign(
    destination: Annotated[
        str, typer.Argument(help="A topic; on Redis stream:NAME or list:NAME.", metavar="NAME")
    ],
    key_file: Annotated[
        str,
        typer.Option(
            "--key-file", metavar="FILE", help="reply_key_file of the route; its first key signs."
        ),
    ],
) -> int:
    """Sign a reply destination: what its owner then gives as reply_to.

    Example: embedstream sign embedstream.replies.shop --key-file /run/secrets/reply-keys
    """
    from pipeline.lifecycle import OperatorError
    from pipeline.transports.signed import read_keys
    from pipeline.transports.signed import sign as signed

    try:
        keys = read_keys(key_file)
    except ConnectionError as error:
        raise OperatorError(str(error).replace("reply_key_file", "--key-file")) from None
    typer.echo(signed(destination, keys[0]))
    return 0

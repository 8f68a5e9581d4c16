"""The console script `embedstream` and `python -m pipeline`: handlers of signals, then all the rest."""

from __future__ import annotations

import gc

from pipeline.cli import interrupts


def main() -> None:
    """Run one command and end the process with its status."""
    interrupts.watch()
    gc.disable()  # what an import makes stays: a collection in between finds nothing
    from pipeline.cli import commands

    gc.enable()
    interrupts.started()
    interrupts.leave(interrupts.status(commands.main()))


if __name__ == "__main__":
    main()

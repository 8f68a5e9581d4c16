"""The console script `embedstream` and `python -m pipeline`: handlers of signals, then all the rest."""

from __future__ import annotations

from pipeline.cli import interrupts


def main() -> None:
    """Run one command and end the process with its status."""
    interrupts.watch()
    from pipeline.cli import commands

    interrupts.started()
    interrupts.leave(interrupts.status(commands.main()))


if __name__ == "__main__":
    main()

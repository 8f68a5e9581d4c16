"""The demo of indexing: pages into a folder, a question, a change, and what was not done twice.

Who calls it: `make demo-index` (`python -m pipeline.demo.index`).
What must stay true: it runs the commands that a user would, and prints them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

QUESTION = "what happens to a request when the process is killed?"

ADDED = "\n\n# The release party\n\nIt is on Friday at the harbour. Ada brings the cake.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it over a folder of Markdown pages; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    pages = Path(given[0] if given else "docs")
    if not any(pages.glob("*.md")):
        sys.stderr.write(f"{pages} holds no Markdown pages: give a folder that does\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="embedstream-index-") as scratch:
        copy = Path(scratch) / "pages"
        shutil.copytree(pages, copy)
        url = f"lance://{scratch}/index#docs"
        changed = sorted(copy.glob("*.md"))[0]
        into = ["index", str(copy), "--to", url, "--chunk-tokens", "200"]
        for step in (
            into,
            ["search", QUESTION, "--in", url, "-k", "3"],
            None,
            into,
            ["index", "status", url],
        ):
            if step is None:
                with changed.open("a") as page:
                    page.write(ADDED)
                _say(f"# one page changes: {changed.name}")
            elif status := _run(step):
                return status
        return _run(["search", "who brings the cake?", "--in", url, "-k", "1"])


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


def _run(command: Sequence[str]) -> int:
    from pipeline.cli.commands import main as embedstream

    shown = " ".join(f"'{part}'" if " " in part else part for part in command)
    _say(f"$ embedstream {shown}")
    return embedstream(command)


if __name__ == "__main__":
    sys.exit(main())

"""Pictures of a terminal for the documentation, from what the commands print.

    python -m benchmarks.pictures [docs/pictures]

Who calls it: a person, when a command prints something else than before.
What must stay true: nothing in a picture was typed by hand but the commands; they run on the pages of `docs/`
in an empty folder, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
PICTURES = {
    "index": ["embedstream index pages --to lance://index#pages --chunk-tokens 128"],
    "search": [
        'embedstream search "what happens when the store is full?" --in lance://index#pages -k 3'
    ],
    "reindex": [
        "embedstream reindex lance://index#pages --to lance://index#pages64 --chunk-tokens 64 --by sentences"
    ],
    "index-status": ["embedstream index status lance://index#pages"],
}
_FONTS = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)


def run(command: str, folder: Path) -> str:
    """What it prints on a terminal, then what it says beside it. Raises `CalledProcessError`."""
    words = [sys.executable, "-m", "pipeline", *shlex.split(command)[1:]]
    env = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    mine, theirs = pty.openpty()  # a few kilobytes of output fit into it
    try:
        done = subprocess.run(
            words, cwd=folder, env=env, check=True, stdout=theirs, stderr=subprocess.PIPE
        )
        os.set_blocking(mine, False)
        with contextlib.suppress(BlockingIOError):
            shown = os.read(mine, 64 * 1024)
            return (shown + done.stderr).decode().replace("\r\n", "\n")
        return done.stderr.decode()
    finally:
        os.close(mine)
        os.close(theirs)


def picture(commands: list[str], folder: Path) -> str:
    """An SVG of a terminal in which they ran."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
        console.print(Text.from_ansi(run(command, folder).rstrip()))
    drawn = console.export_svg(title="embedstream", unique_id=commands[0].split()[1])
    return _FONTS.sub("", drawn)


def main() -> None:
    """Write one file for each of `PICTURES`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("to", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    to: Path = parser.parse_args().to
    to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pages").mkdir()
        for page in sorted((ROOT / "docs").glob("*.md")):
            (folder / "pages" / page.name).write_text(page.read_text())
        for title, commands in PICTURES.items():
            (to / f"{title}.svg").write_text(picture(commands, folder))
            print(f"{title}.svg", flush=True)


if __name__ == "__main__":
    main()

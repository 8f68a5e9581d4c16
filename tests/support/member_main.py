"""A stand-in for one process of `serve --processes`: takes its place, then does what its plan says.

Called as ``python -m tests.support.member_main FOLDER serve --member PLACE``. FOLDER holds `plan.NUMBER`:
one word for each life, the last one for all that follow; each life adds a line to `lives.NUMBER`.

    serve     ready until SIGTERM, then status 0
    N         ends with that status before it was ready
    ready:N   ready until FOLDER/go exists, then ends with that status; below zero: by that signal
    hang      ready until FOLDER/go exists, then its loop stands still
    deaf      ready, and SIGTERM changes nothing
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.observe.http import HealthServer, HealthViews
from pipeline.observe.readiness import READY_PHASE, Readiness
from pipeline.processes.member import join


async def live(folder: Path, word: str, server: HealthServer, listener: object) -> int:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await server.open(listener)  # type: ignore[arg-type]
    go = folder / "go"
    while not (stopped.is_set() and word != "deaf"):
        await asyncio.sleep(0.02)
        if word == "hang" and go.exists():
            time.sleep(3600)
        if word.startswith("ready:") and go.exists():
            status = int(word.partition(":")[2])
            if status < 0:
                os.kill(os.getpid(), -status)
            return status
    return 0


def main() -> None:
    folder = Path(sys.argv[1])
    member, settings, listener = join(sys.argv[sys.argv.index("--member") + 1])
    lives = folder / f"lives.{member.number}"
    with lives.open("a") as file:
        file.write(f"{os.getpid()} {member.cores} {settings.executor.cpu_workers}\n")
    words = (folder / f"plan.{member.number}").read_text().split()
    word = words[min(len(lives.read_text().splitlines()), len(words)) - 1]
    if word.isdigit():
        sys.exit(int(word))
    ready = Readiness(True, READY_PHASE)
    views = HealthViews(lambda: ready, lambda: {"in_flight": 3}, lambda: b"# HELP a b\na 1\n")
    sys.exit(asyncio.run(live(folder, word, HealthServer(settings.health, views), listener)))


if __name__ == "__main__":
    main()

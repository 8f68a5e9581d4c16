"""Whether the files of a route can be read and written, for `embedstream check`.

Who calls it: the registry.
What must stay true: no file is made or changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.transports.files.options import STANDARD, FileOptions


async def reach(options: FileOptions, *, place: str | None = None) -> tuple[str, ...]:
    """As `registry.reach`. Raises `ConnectionError`."""
    path = options.path
    if place is None and path != STANDARD and not os.access(path, os.R_OK):
        raise ConnectionError(f"{path} cannot be read: check the path of the source")
    for output in (options.replies, options.dead_letters):
        if output is not None and output != STANDARD and not _takes_lines(Path(output)):
            raise ConnectionError(f"{output} cannot be written: check its folder and permissions")
    return ()


def _takes_lines(path: Path) -> bool:
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)

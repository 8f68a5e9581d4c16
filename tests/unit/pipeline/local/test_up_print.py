"""What `embedstream up` prints can be copied from any terminal; its ready file is whole."""

from __future__ import annotations

import ast
import asyncio
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.lifecycle import OperatorError
from pipeline.local.up import Addresses, _print, read_ready_file, snippets, write_ready_file

ADDRESSES = Addresses(
    pid=1,
    kafka="127.0.0.1:49152",
    kafka_kind="packaged",
    redis="redis://127.0.0.1:49153",
    redis_kind="system",
    health="http://127.0.0.1:49154",
)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_code_is_printed_as_it_must_be_copied(columns: int) -> None:
    """K34: a wrapped line is a syntax error."""
    screen = io.StringIO()
    _print(Console(file=screen, width=columns, force_terminal=False), ADDRESSES)
    printed = screen.getvalue()
    for code in snippets(ADDRESSES).values():
        ast.parse(code)
        assert f"\n{code}\n" in printed
        assert max(map(len, code.splitlines())) <= 100


async def test_the_ready_file_is_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    """K16, K10: a file is replaced, a FIFO waits for its reader, a full disk is said."""
    path = tmp_path / "ready.json"
    path.write_text("before")
    path.chmod(0o640)
    await write_ready_file(path, ADDRESSES)
    assert read_ready_file(path) == ADDRESSES
    assert path.stat().st_mode & 0o777 == 0o640 and os.listdir(tmp_path) == ["ready.json"]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read, _ = await asyncio.gather(
        asyncio.to_thread(fifo.read_bytes), write_ready_file(fifo, ADDRESSES)
    )
    assert read == path.read_bytes() and fifo.is_fifo()
    with pytest.raises(OperatorError, match=r"No space left on device.*--ready-file"):
        await write_ready_file(Path("/dev/full"), ADDRESSES)

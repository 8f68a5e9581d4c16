"""K10, K16: a file somebody named is replaced whole or stays as it was; what is no file is written through."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.lifecycle import OperatorError
from pipeline.whole_file import NoReader, WholeFile

ROOT = Path(__file__).parents[3]


def write(path: Path, content: bytes) -> None:
    with WholeFile(path, "--out") as file:
        file.write(content)
        file.keep()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_is_replaced_with_its_mode(tmp_path: Path, mode: int) -> None:
    """K16: one step, and nobody loses a right."""
    path = tmp_path / "out"
    path.write_bytes(b"before")
    path.chmod(mode)
    before = path.stat().st_ino
    write(path, b"after")
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == mode and path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["out"]


def test_a_new_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("new")
    write(tmp_path / "link", b"after")
    write(tmp_path / "dangling", b"made")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"after"
    assert (tmp_path / "dangling").is_symlink() and (tmp_path / "new").read_bytes() == b"made"


def test_without_keep_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), WholeFile(path, "--out") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["out"]


def test_a_fifo_is_written_through(tmp_path: Path) -> None:
    """K16: what is no regular file stays what it is."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(NoReader):
        WholeFile(path, "--out", waits=False)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    write(path, b"through")
    reader.join(10)
    assert read == [b"through"] and path.is_fifo()


def test_what_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(OperatorError, match=r"cannot be written .*--out"):
            WholeFile(path, "--out")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_is_told() -> None:
    with (
        pytest.raises(OperatorError, match="No space left on device"),
        WholeFile(Path("/dev/full"), "--out") as file,
    ):
        file.write(b"x")


FILL = """
import signal, sys
from pathlib import Path
from pipeline.cli.output import JsonlWriter, Question
from pipeline.lifecycle import OperatorError
from schemas.errors import InvalidRequest
from schemas.results import FailureReply
out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
reply = FailureReply(id="r", error=InvalidRequest("x" * 60))
try:
    with JsonlWriter(out) as writer:
        for _ in range(100):
            writer.write(Question("r", "r", {}), reply)
        writer.finish()
except OperatorError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


def fill(stdout: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """100 replies with room for about three: a limit on file size stands for a full disk."""
    with stdout.open("ab") as output:
        return subprocess.run(
            [sys.executable, "-c", FILL, *arguments],
            cwd=ROOT, stdout=output, stderr=subprocess.PIPE, timeout=50,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400)),
        )  # fmt: skip


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """K10: nothing is torn, and the status says so."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"before")
    done = fill(tmp_path / "stdout", str(out))
    assert done.returncode == 1 and b"cannot be written" in done.stderr, done.stderr
    assert out.read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "stdout"]


def test_a_full_disk_behind_stdout_leaves_whole_lines(tmp_path: Path) -> None:
    """K10: what is there can be read."""
    output = tmp_path / "stdout"
    output.write_bytes(b'{"before": 1}\n')
    done = fill(output)
    assert done.returncode == 1 and b"standard output cannot be written" in done.stderr
    lines = output.read_bytes().splitlines(keepends=True)
    assert 2 <= len(lines) < 100 and all(line.endswith(b"}\n") for line in lines)


SINK = """
import asyncio, resource, signal, sys
from actors.ports import NoMetrics, PublishError
from pipeline.transports.files.options import REPLIES, FileOptions
from pipeline.transports.files.sink import open_sink

async def main(path):
    sink = await open_sink(FileOptions(replies=path), beside=None, metrics=NoMetrics())
    room = 400
    for number in range(12):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        try:
            await sink.publish(REPLIES, "r", b'{"reply": "%060d"}' % number, {})
        except PublishError as error:
            assert error.retryable and "output" in str(error)
            print(number, flush=True)
            room = 2000  # somebody made room: it passes when it is tried again
    await sink.aclose()

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
asyncio.run(main(sys.argv[1]))
"""


def test_a_full_disk_tears_no_reply_of_a_route(tmp_path: Path) -> None:
    """K10: a reply that does not fit is not there at all and not settled; the next one is not joined to it."""
    out = tmp_path / "replies.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SINK, str(out)], cwd=ROOT, capture_output=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    (failed,) = map(int, done.stdout.split())
    written = [int(json.loads(line)["reply"]) for line in out.read_bytes().splitlines()]
    assert written == [number for number in range(12) if number != failed]

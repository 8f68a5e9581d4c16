"""JSONL in and out: files, pipes, endless lines, releases, exhaustion."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ports import NoMetrics, PublishError, SourceClosed, SystemClock
from pipeline.transports.files.lines import LineSplitter
from pipeline.transports.files.options import FileOptions
from pipeline.transports.registry import Transport, open_transport


async def opened(path: Path | str, tmp_path: Path, **settings: Any) -> Transport:
    options = FileOptions(
        path=str(path), replies=str(tmp_path / "out.jsonl"), release_backoff_ms=1, **settings
    )
    return await open_transport(options, clock=SystemClock(), metrics=NoMetrics())


async def test_every_line_once_then_closed(tmp_path: Path) -> None:
    lines = [b'{"id": "%d"}' % i for i in range(5000)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines[:10]) + b"\r\n\n   \n" + b"\n".join(lines[10:]))
    transport = await opened(path, tmp_path, max_in_flight=64)
    got: list[bytes | None] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        with pytest.raises(SourceClosed):
            while True:
                batch = await transport.source.receive()
                assert len(batch) <= 64
                for delivery in batch:
                    got.append(delivery.body)
                    assert delivery.headers["content-type"] == b"application/json"
                    await transport.sink.publish(
                        transport.sink.default_destination("x"), "x", delivery.body or b"", {}
                    )
                    delivery.settle()
        await transport.source.aclose()
    await transport.sink.aclose()
    assert got == lines
    assert (tmp_path / "out.jsonl").read_bytes().split(b"\n")[:-1] == lines


async def test_released_line_comes_again_after_the_end(tmp_path: Path) -> None:
    """The source is not exhausted while a line could still come again."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}")
    transport = await opened(path, tmp_path)
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        for attempt in (1, 2, 3):
            (delivery,) = await transport.source.receive()
            assert (delivery.attempt, delivery.default_id) == (attempt, "line-1")
            if attempt < 3:
                delivery.release("again")
        delivery.settle()
        with pytest.raises(SourceClosed):
            await transport.source.receive()
        await transport.source.aclose()
    await transport.sink.aclose()


async def test_pipe_is_read_as_it_comes(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    transport = await opened(fifo, tmp_path)
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        writer = os.open(fifo, os.O_WRONLY)
        for i in range(3):
            os.write(writer, b"%d\n" % i)
            (delivery,) = await transport.source.receive()
            assert delivery.body == b"%d" % i
            delivery.settle()
        os.write(writer, b"last, without an end")
        os.close(writer)
        (delivery,) = await transport.source.receive()
        assert delivery.body == b"last, without an end"
        delivery.settle()
        with pytest.raises(SourceClosed):
            await transport.source.receive()
        await transport.source.aclose()
    await transport.sink.aclose()


COPY = """
import asyncio
from actors.ports import NoMetrics, SourceClosed, SystemClock
from pipeline.transports.registry import open_transport, parse_url
async def main():
    transport = await open_transport(parse_url("-"), clock=SystemClock(), metrics=NoMetrics())
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        try:
            while True:
                for delivery in await transport.source.receive():
                    await transport.sink.publish("file:replies", "k", delivery.body, {})
                    delivery.settle()
        except SourceClosed:
            await transport.source.aclose()
    await transport.sink.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["pipe", "file"])
async def test_standard_input_to_standard_output(tmp_path: Path, kind: str) -> None:
    """`-` in both directions, from a pipe and from a redirected file."""
    lines = b"".join(b'{"id": "%d"}\n' % i for i in range(3000))
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines)
    with path.open("rb") as redirected:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            COPY,
            stdin=asyncio.subprocess.PIPE if kind == "pipe" else redirected,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
        )
    output, _ = await process.communicate(lines if kind == "pipe" else None)
    assert process.returncode == 0
    assert output == lines


async def test_close_while_a_pipe_is_silent(tmp_path: Path) -> None:
    """G02: closing does not wait for a writer that says nothing."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    transport = await opened(fifo, tmp_path)
    writer = os.open(fifo, os.O_RDWR)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        await asyncio.sleep(0)
        await transport.source.aclose()
    os.close(writer)
    await transport.sink.aclose()


async def test_overlong_line_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    """E12: a line over the limit comes one byte over it, for ingress to refuse."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 1_000_000 + b"\n" + b"next\n")
    transport = await opened(path, tmp_path, max_line_bytes=1000)
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        got: list[Any] = []
        while len(got) < 2:
            got += await transport.source.receive()
        assert [len(d.body) for d in got] == [1001, 4]
        await transport.source.aclose()
    await transport.sink.aclose()


async def test_concurrent_replies_are_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")
    transport = await opened(path, tmp_path, dead_letters=str(tmp_path / "dead.jsonl"))
    bodies = [json.dumps({"id": i, "text": "x" * 50_000}).encode() for i in range(40)]
    sink = transport.sink
    await asyncio.gather(*(sink.publish(sink.default_destination(""), "k", b, {}) for b in bodies))
    await sink.publish(sink.default_destination(""), "k", b'{\n "a": 1\r\n}', {})
    await sink.publish(sink.dead_letter_destination, "k", b"\xff\x00", {"reason": b"bad"})
    with pytest.raises(PublishError):
        await sink.publish("elsewhere", "k", b"{}", {})
    assert sink.check_destination("elsewhere")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert sorted(lines[:-1]) == sorted(bodies)
    assert json.loads(lines[-1]) == {"a": 1}
    dead = json.loads((tmp_path / "dead.jsonl").read_text())
    assert dead == {"id": "k", "headers": {"reason": "bad"}, "body_base64": "/wA="}
    await transport.source.aclose()
    await sink.aclose()


@pytest.mark.parametrize("make", ["missing", "folder", "unwritable"])
async def test_bad_paths_are_named(tmp_path: Path, make: str) -> None:
    path = tmp_path / "there"
    replies = "-"
    if make == "folder":
        path.mkdir()
    if make == "unwritable":
        path.write_bytes(b"")
        replies = str(tmp_path / "no" / "such" / "folder")
    with pytest.raises(ConnectionError) as caught:
        await open_transport(
            FileOptions(path=str(path), replies=replies), clock=SystemClock(), metrics=NoMetrics()
        )
    assert ("folder" if make == "unwritable" else str(path)) in str(caught.value)


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 30))
def test_lines_do_not_depend_on_chunks(chunks: list[bytes], limit: int) -> None:
    splitter = LineSplitter(limit)
    got = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.end()
    *ended, last = b"".join(chunks).split(b"\n")
    wanted = [line[: limit + 1].removesuffix(b"\r") for line in ended]
    if last:
        wanted.append(last[: limit + 1].removesuffix(b"\r"))
    assert got == wanted

"""Clients that were made, or used, before a fork: web servers preload the application."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client import service
from tests.support.servers import ServerInfo, redis_ladder, unique

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.redis

PROGRAM = """
import asyncio, json, os, sys, threading
from embedstream_client import AsyncClient, Client

url, leave = sys.argv[1:]
blocking, anywhere = Client.from_url(url), AsyncClient.from_url(url)

def ask(number):
    return blocking.embed(f"fork {number}").vector.tolist()

async def ask_async(number):
    vector = (await anywhere.embed(f"fork {number}")).vector.tolist()
    await anywhere.aclose()
    return vector

answers = [ask(0)]                       # the parent's thread and connections exist before the fork
children = []
for number in (1, 2):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = [ask(number), asyncio.run(ask_async(number))]
        os.write(writer, json.dumps(found).encode())
        if leave == "sys":
            sys.exit(0)                  # runs atexit handlers and destructors in the child
        os._exit(0)
    os.close(writer)
    children.append((pid, reader))
for pid, reader in children:
    with os.fdopen(reader) as pipe:
        answers.append(json.load(pipe))
    assert os.waitpid(pid, 0)[1] == 0
answers.append(ask(3))                   # the parent's event loop still hears its sockets
several = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
[t.start() for t in several]; [t.join() for t in several]
blocking.close()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


@pytest.mark.parametrize("leave", ["os", "sys"])
async def test_parent_and_children_ask_after_a_fork(redis_info: ServerInfo, leave: str) -> None:
    stream = unique("embedstream.fork")
    async with service(f"redis://{redis_info.address}/{stream}"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM),
            f"redis://{redis_info.address}/0?stream={stream}",
            leave,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "clients" / "python" / "src")},
        )
        out, err = await asyncio.wait_for(process.communicate(), 50)
        assert process.returncode == 0 and not err, err.decode()
        zero, (one, one_async), (two, two_async), three = json.loads(out)
        assert one == one_async and two == two_async
        assert len({tuple(v) for v in (zero, one, two, three)}) == 4

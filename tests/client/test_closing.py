"""What a program says on its way out, whether or not it has closed its client."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from embedstream_client import Client
from tests.support.client import background_service
from tests.support.servers import ServerInfo, redis_ladder, unique

pytestmark = pytest.mark.redis

PROGRAM = """
import asyncio, gc, sys
from embedstream_client import AsyncClient, Client

how, url = sys.argv[1:]

async def ask():
    await client.embed("a text")

client = (Client if how == "blocking client" else AsyncClient).from_url(url, timeout=30)
if how == "blocking client":
    client.embed("a text")
elif how == "asyncio.run":
    asyncio.run(ask())
    asyncio.run(ask())
elif how.startswith("TestClient"):
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app = FastAPI(lifespan=None if how == "TestClient" else client.lifespan)
    app.get("/")(ask)
    if how == "TestClient":
        assert [TestClient(app).get("/").status_code for _ in range(2)] == [200, 200]
    else:
        with TestClient(app) as browser:
            assert browser.get("/").status_code == 200
else:
    for _ in range(2):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(ask())
        loop.close()
    if how == "loop.close, aclose elsewhere":
        asyncio.run(client.aclose())
del client
gc.collect()
"""


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


def said(redis_info: ServerInfo, how: str, *options: str) -> str:
    """What the program wrote to its standard error."""
    stream = unique("embedstream.test")
    url = f"redis://{redis_info.address}/0?stream={stream}"
    with background_service(f"redis://{redis_info.address}/{stream}"):
        done = subprocess.run(
            [sys.executable, *options, "-c", PROGRAM, how, url],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "how", ["asyncio.run", "TestClient", "TestClient with lifespan", "blocking client"]
)
def test_a_program_that_ends_its_loop_ends_its_client(redis_info: ServerInfo, how: str) -> None:
    """No warning of any kind, though nobody called `aclose`."""
    assert said(redis_info, how, "-W", "always", "-W", "ignore::DeprecationWarning") == ""


@pytest.mark.parametrize("how", ["loop.close", "loop.close, aclose elsewhere"])
def test_a_loop_that_was_closed_under_it_is_no_fault_of_the_clients(
    redis_info: ServerInfo, how: str
) -> None:
    """asyncio and redis-py say what they have to say; nothing that the client awaits is added to it."""
    err = said(redis_info, how)
    for words in (
        "this is a bug",
        "an unexpected way",
        "'Redis.execute_command'",
        "'Redis.aclose'",
    ):
        assert words not in err


def test_a_forgotten_client_ends_its_thread(redis_info: ServerInfo) -> None:
    """One made for each web request, or by an adapter that nobody closes: no thread and no connection is left."""
    before = set(threading.enumerate())
    stream = unique("forgotten")
    with background_service(f"redis://{redis_info.address}/{stream}"):
        for number in range(3):
            client = Client.from_url(f"redis://{redis_info.address}/0?stream={stream}", timeout=30)
            client.embed(f"text {number}")
        names = [t.name for t in threading.enumerate() if t not in before]
        assert "embedstream-client" in names
        del client
        until = time.monotonic() + 20
        while "embedstream-client" in names and time.monotonic() < until:
            gc.collect()
            time.sleep(0.02)
            names = [t.name for t in threading.enumerate() if t not in before]
        assert "embedstream-client" not in names

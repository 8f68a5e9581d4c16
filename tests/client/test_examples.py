"""Every file in examples/ runs as it stands, but for the address, against a real Redis.

The service has a fake model: what is tested is the callers' code. docs/web.md shows the same files.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pipeline.local.server import LocalServer
from tests.support.client import background_service, until
from tests.support.fakes import fake_ids, fake_vector
from tests.support.servers import new_redis, start_now

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLIENT_SOURCE = str(ROOT / "clients" / "python" / "src")
pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # what other libraries warn of is theirs to mend
]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A Redis of our own: the examples use the default names."""
    redis = new_redis()
    start_now(redis)
    with background_service(f"redis://{redis.address}"):
        yield redis
    redis.close()


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Loops that end with an open client leave it to the collector: here, not in another test."""
    yield
    gc.collect()


@pytest.fixture
def example(server: LocalServer, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of an example with this server's address in place of the usual one."""

    def copy(name: str, folder: Path = tmp_path) -> Path:
        text = (EXAMPLES / name).read_text("utf-8")
        assert "redis://localhost:6379" in text
        path = folder / Path(name).name
        path.write_text(text.replace("redis://localhost:6379", f"redis://{server.address}"))
        return path

    return copy


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": CLIENT_SOURCE},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expected(text: str) -> list[float]:
    vector: list[float] = fake_vector(fake_ids(text)).tolist()
    return vector


def best_first(query: str, documents: list[str]) -> list[str]:
    return sorted(documents, key=lambda text: -expected(f"{query} {text}")[0])


DOCUMENTS = ["one two", "three", "four five six", "seven"]


def test_fastapi(example: Callable[[str], Path]) -> None:
    import uvicorn

    code = (EXAMPLES / "fastapi_app.py").read_text("utf-8").splitlines()
    assert len([line for line in code if line.strip()]) <= 12
    module = load(example("fastapi_app.py"))
    web = uvicorn.Server(uvicorn.Config(module.app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=web.run)
    thread.start()
    try:
        asyncio.run(until(lambda: web.started))
        port = web.servers[0].sockets[0].getsockname()[1]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/search?query=q",
            json.dumps(DOCUMENTS).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response) == best_first("q", DOCUMENTS)[:3]
    finally:
        web.should_exit = True
        thread.join()
    with pytest.raises(Exception, match="closed"):
        asyncio.run(module.client.ping())


def test_django(example: Callable[[str], Path]) -> None:
    import django
    from django.conf import settings
    from django.test import RequestFactory

    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"])
        django.setup()
    module = load(example("django_views.py"))
    answer = module.search(RequestFactory().get("/", {"q": "q", "document": DOCUMENTS}))
    results = json.loads(answer.content)["results"]
    assert [r["text"] for r in results] == best_first("q", DOCUMENTS)[:3]
    refused = module.search(RequestFactory().get("/", {"q": "q"}))
    assert refused.status_code == 400 and json.loads(refused.content) == {"error": "empty_input"}
    module.client.close()


def test_plain_redis_without_the_client(example: Callable[[str], Path]) -> None:
    out = run(sys.executable, example("redis_sync.py"))
    texts = [line.split("  ", 1)[1] for line in out.splitlines()]
    assert texts == best_first("what is a deadlock?", sorted(texts))


def test_five_hundred_callers_without_the_client(example: Callable[[str], Path]) -> None:
    """K29: with the pool's own default the 101st caller fails."""
    assert run(sys.executable, example("redis_async.py")) == "500\n"


def test_redis_cli_in_json(example: Callable[[str], Path]) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("needs redis-cli")
    out = run("sh", example("redis_cli.sh")).splitlines()
    reply = json.loads(out[-1])
    documents = re.findall(
        r'"([^"]*)"', (EXAMPLES / "redis_cli.sh").read_text().split("[")[1].split("]")[0]
    )
    assert [documents[r["index"]] for r in reply["results"]] == best_first(
        "what is a deadlock?", documents
    )


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """The packages of examples/node, installed once into build/."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = ROOT / "build" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # of several processes one installs
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(folder)
    return folder


def install(folder: Path) -> None:
    wanted = (EXAMPLES / "node" / "package.json").read_text("utf-8")
    manifest = folder / "package.json"
    if not (folder / "node_modules").exists() or manifest.read_text("utf-8") != wanted:
        manifest.write_text(wanted)
        installed = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if installed.returncode != 0:
            shutil.rmtree(folder / "node_modules", ignore_errors=True)
            pytest.skip(f"npm cannot install the packages: {installed.stderr.strip()[-200:]}")


def test_node_redis(example: Callable[..., Path], node_folder: Path) -> None:
    out = run("node", example("node/redis.mjs", node_folder)).splitlines()
    for line, text in zip(out, ["a text", "another"], strict=True):
        _, size, first = line.split()
        assert int(size) == 8 and float(first) == pytest.approx(expected(text)[0])


def test_node_ioredis(example: Callable[..., Path], node_folder: Path) -> None:
    out = run("node", example("node/ioredis.mjs", node_folder)).splitlines()
    documents = ["first document", "second document"]
    ranked = [line.split(" ", 1)[1].rsplit(" ", 1)[0] for line in out]
    assert ranked == best_first("which one?", documents)


def test_celery(example: Callable[[str], Path], server: LocalServer) -> None:
    """A real worker with forked processes; the client is made before the fork."""
    path = example("celery_tasks.py")
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "-A", "celery_tasks", "worker"),
            *("--pool=prefork", "--concurrency=2", "--loglevel=WARNING", "--without-gossip"),
            "--without-mingle",
        ],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": CLIENT_SOURCE},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        module = load(path)
        waiting = [module.embed.delay([f"text {i}", "x"]) for i in range(6)]
        for number, result in enumerate(waiting):
            vectors = result.get(timeout=120)
            np.testing.assert_allclose(vectors, [expected(f"text {number}"), expected("x")])
    finally:
        worker.terminate()
        _, err = worker.communicate()
    assert b"Traceback" not in err, err.decode()
    module.app.close()


async def test_arq(example: Callable[[str], Path]) -> None:
    from arq import create_pool
    from arq.worker import create_worker

    module = load(example("arq_worker.py"))
    settings: Any = module.WorkerSettings
    pool = await create_pool(settings.redis_settings)
    jobs = [await pool.enqueue_job("embed", [f"text {i}"]) for i in range(5)]
    worker = create_worker(settings, burst=True, poll_delay=0.01)
    await worker.main()
    for number, job in enumerate(jobs):
        assert job is not None
        np.testing.assert_allclose(await job.result(timeout=20), [expected(f"text {number}")])
    await worker.close()
    await pool.aclose()


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (ROOT / "docs" / "web.md").read_text("utf-8")
    page += (ROOT / "docs" / "kafka.md").read_text("utf-8")
    for path in sorted(EXAMPLES.rglob("*")):
        if path.suffix in {".py", ".mjs", ".sh"} and "node_modules" not in path.parts:
            assert path.read_text("utf-8").strip() in page, path.name

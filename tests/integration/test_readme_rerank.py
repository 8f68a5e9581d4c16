"""The rerank examples of README and `up` convince: the real reranker puts the right document first."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedstream_client import AsyncClient
from pipeline.app import App
from pipeline.demo.catalog import RERANKER
from pipeline.lifecycle import StopSignal
from pipeline.local.up import Addresses, snippets
from pipeline.settings.load import ModelSettings, RouteSettings, Settings
from tests.support.servers import ServerInfo, redis_ladder, unique

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
RIGHT = "A deadlock is when two processes wait for each other and neither can go on."
pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def redis_info() -> Iterator[ServerInfo]:
    yield from redis_ladder()


def samples(url: str) -> list[str]:
    """The README's first Python block and the code that `up` prints, for this service."""
    (code, *_) = re.findall(r"```python\n(.*?)```", README, re.S)
    unused = dict.fromkeys(("kafka", "kafka_kind", "redis_kind", "health"), "")
    printed = list(snippets(Addresses(pid=1, redis="redis://localhost:6379", **unused)).values())
    return [one.replace("redis://localhost:6379", url) for one in (code, printed[-1])]


def readme_command() -> list[str]:
    """Query and documents of the README's `embedstream rerank`."""
    text = README.replace("\\\n", " ")
    (line,) = [one for one in text.splitlines() if "embedstream rerank" in one]
    return shlex.split(line)[2:]


async def test_the_examples_rank_the_right_document_first(
    redis_info: ServerInfo, packaged_model: Callable[[str], Path]
) -> None:
    """K37."""
    stream = unique("embedstream.readme")
    model = ModelSettings(path=str(packaged_model(RERANKER)), default_for=("rerank",))
    route = RouteSettings(
        name="r", source=f"redis://{redis_info.address}/{stream}", lane="interactive"
    )
    app, stop = App(Settings(models={"reranker": model}, routes=(route,))), StopSignal(10.0)
    url = f"redis://{redis_info.address}/0?stream={stream}"
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(stop))
        await asyncio.wait_for(app.ready.wait(), 240)
        for code in samples(url):
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                cwd=ROOT / "clients" / "python" / "src",
                check=False,
            )
            assert done.returncode == 0, done.stderr
            lines = [line.split("  ", 1) for line in done.stdout.splitlines()]
            assert len(lines) == 3 and lines[0][1] == RIGHT
            assert float(lines[0][0]) > 0.9 and float(lines[1][0]) < 0.1
        query, *documents = readme_command()
        async with AsyncClient.from_url(url) as client:
            ranking = await client.rerank(query, documents)
        assert ranking.best.document == RIGHT and ranking.best.score > 0.9
        assert all(ranked.score < 0.1 for ranked in list(ranking)[1:])
        stop.request("the test is over")

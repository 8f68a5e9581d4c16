"""`index status`: what a collection holds, and what of its topics it does not hold yet."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from pipeline.cli.index_status import age
from tests.support.documents import Record, Topic, indexing, until_committed
from tests.support.processes import ROOT
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


async def command(*arguments: str) -> tuple[int, str]:
    """Exit status and output, both streams, of `embedstream index status`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pipeline", "index", "status", *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.fixture
async def topic(kafka_server: ServerInfo) -> Topic:
    """A topic of the test's own, with one partition."""
    made = Topic(kafka_server.address, partitions=1)
    await made.create()
    return made


async def test_lag_is_what_the_group_has_not_settled(topic: Topic, tmp_path: Path) -> None:
    url = f"lance://{tmp_path}/index#docs"
    records: list[Record] = [(f"d{i}", {"title": f"t{i}", "lang": "en"}) for i in range(7)]
    for record in records:  # one batch each: some brokers count batches
        await topic.produce([record])
    async with indexing(topic.route(url)):
        await until_committed(topic, 7)
    status, told = await command(url, "--source", topic.source(topic.group))
    assert status == 0, told
    assert f"{topic.name}/0" in told and "everything is stored" in told
    assert "7" in told and " ago" in told
    for i in range(3):
        await topic.produce([(f"d{i}", {"title": "newer", "lang": "en"})])
    status, told = await command(url, "--source", topic.source(topic.group))
    [line] = [line for line in told.splitlines() if f"{topic.name}/0" in line]
    assert line.replace("│", " ").split() == [f"{topic.name}/0", "6", "7", "10", "3"]
    assert "3 records are not stored yet" in told

    status, told = await command(url, "--source", topic.source("another"))
    [line] = [line for line in told.splitlines() if f"{topic.name}/0" in line]
    assert line.replace("│", " ").split() == [f"{topic.name}/0", "6", "nothing", "10", "10"]


async def test_the_routes_of_the_settings_say_what_fills_a_collection(
    topic: Topic, tmp_path: Path
) -> None:
    url = f"lance://{tmp_path}/index#docs"
    await topic.produce([("d1", {"title": "one", "lang": "en"})])
    async with indexing(topic.route(url)):
        await until_committed(topic, 1)
    config = tmp_path / "service.toml"
    config.write_text(
        f'[models.m]\npath = "{tmp_path}"\n[[routes]]\nname = "docs"\nsource = "{topic.source(topic.group)}"\n'
        f'destination = "{url}"\n[routes.document]\ntext = "{{title}}"\n'
    )
    status, told = await command(url, "--config", str(config))
    assert (status, "everything is stored" in told) == (0, True), told
    status, told = await command(f"lance://{tmp_path}/other#docs", "--config", str(config))
    assert status == 2 and "no route" in told and json.dumps(url)[1:-1] in told.replace("\n", "")


async def test_a_broker_that_does_not_answer_is_said_and_the_rest_is_told(
    topic: Topic, tmp_path: Path
) -> None:
    url = f"lance://{tmp_path}/index#docs"
    await topic.produce([("d1", {"title": "one", "lang": "en"})])
    async with indexing(topic.route(url)):
        await until_committed(topic, 1)
    status, told = await command(url, "--source", "kafka://127.0.0.1:9/docs?group=g")
    assert status == 1, told
    assert "documents" in told and "not told: kafka://127.0.0.1:9/docs" in told
    assert "not asked" in told
    status, told = await command(url, "--source", "redis://127.0.0.1:9/docs")
    assert status == 1 and "kafka:// sources alone" in told


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h"), (100_000, "1 d 3 h")],
)
def test_an_age_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert age(seconds) == words

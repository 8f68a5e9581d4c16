"""Records over Redis that nobody can read: who can be told is told, and no line repeats them."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
import structlog

from actors.loggable import loggable_path
from pipeline.app import App
from pipeline.lifecycle import StopSignal
from pipeline.observe.logs import configure_logging
from pipeline.settings.load import RouteSettings, Settings
from schemas.codec import decode_reply
from schemas.results import FailureReply
from tests.conformance.redis_harness import RedisHarness
from tests.support.fakes import FakeRunner
from tests.support.servers import ServerInfo, unique

MARK = "XYZZY"


@pytest.mark.redis
async def test_unreadable_entries_are_answered_and_dead_lettered(redis_server: ServerInfo) -> None:
    """K46, K38, K50, K31: by the entry id, by the request-id header, and at reply-to."""
    harness, lines = RedisHarness(redis_server), io.StringIO()
    configure_logging("debug", "json", stream=lines)
    source = (
        f"redis://{redis_server.address}/{harness.stream}?group={harness.group}"
        f"&dead_letter_stream={harness.dead_letters}&block_ms=100"
    )
    settings = Settings(routes=(RouteSettings(name="r", source=source),))
    runner: Any = FakeRunner()
    app = App(settings, runner_factories={"fake": lambda: runner})
    stop, add = StopSignal(5.0), harness.redis.xadd
    by_header, named = unique("id"), unique("embedstream.reply")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        serving = group.create_task(app.run(stop))
        await app.ready.wait()
        by_entry = (await add(harness.stream, {"payload": "{}", MARK: MARK})).decode()
        await add(harness.stream, {"data": f"no record {MARK}", "request-id": by_header})
        await add(harness.stream, {"payload": "{}", "reply-to": f"list:{named}"})
        unknown = {"id": unique("id"), "input": "x", MARK: 1}
        await add(harness.stream, {"data": json.dumps(unknown)})
        answers = []
        for key in (by_entry, by_header, named, str(unknown["id"])):
            key = key if key == named else f"embedstream.reply.{key}"
            answers.append(decode_reply((await harness.redis.blpop([key], timeout=20))[1]))
        while await harness.redis.xlen(harness.dead_letters) < 3:
            await asyncio.sleep(0.01)
        stop.request()
        await serving
    structlog.reset_defaults()
    await harness.aclose()
    failures = [answer for answer in answers if isinstance(answer, FailureReply)]
    assert [failure.error.code for failure in failures] == ["invalid_request"] * 4
    assert [failure.id for failure in failures[:2]] == [by_entry, by_header]
    words = "no field named data; it has: 'payload', 'xyzzy'"
    assert failures[0].error.message == words
    assert failures[3].error.path == f"$.{MARK}"
    assert lines.getvalue().count("request_refused") == 4
    assert MARK not in lines.getvalue().upper()


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        (None, None),
        ("$", "$"),
        ("$.input[3].text", "$.input[3].text"),
        ("headers.reply-to", "headers.reply-to"),
        ("$.XYZZY", "$.<withheld>"),
        ("$.inputs", "$.<withheld>"),
        ("$.input[3].XYZZY", "$.input[3].<withheld>"),
        ("$.XYZZY.input", "$.<withheld>"),
        ("$.input XYZZY", "$.<withheld>"),
        ("XYZZY", "<withheld>"),
    ],
)
def test_only_names_of_the_contract_are_logged(path: str | None, logged: str | None) -> None:
    """K31: what a sender wrote is not."""
    assert loggable_path(path) == logged

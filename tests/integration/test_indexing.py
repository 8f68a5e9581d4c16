"""A topic of documents into a collection, through the whole service."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.indexing.sinks.base import StoreUnavailable
from pipeline.lifecycle import OperatorError
from tests.support.documents import (
    Record,
    Topic,
    expected_rows,
    indexing,
    status_of,
    stored_rows,
    until_committed,
    words_of,
)
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_ids
from tests.support.servers import ServerInfo, unique

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


@pytest.fixture
async def topic(kafka_server: ServerInfo) -> Topic:
    """A topic of the test's own."""
    made = Topic(kafka_server.address)
    await made.create()
    return made


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A collection of the test's own."""
    return f"lance://{tmp_path}/index#docs"


def document(name: str, version: int, n_words: int) -> dict[str, Any]:
    """A document of so many words, all different between versions."""
    words = " ".join(f"w{version}x{i}" for i in range(n_words))
    return {"title": f"{name} v{version}", "body": words, "lang": "de", "other": 1}


async def test_twenty_documents_of_ten_versions_end_on_the_last_one(topic: Topic, url: str) -> None:
    """Long early versions are embedded later than short late ones; order per key holds all the same."""
    records: list[Record] = []
    for version in range(10):
        for d in range(20):
            n_words = 300 - 30 * version if d % 2 else 3 + version
            records.append((f"d{d}", document(f"d{d}", version, n_words)))
    await topic.produce(records)
    async with indexing(topic.route(url)):
        await until_committed(topic, len(records))
    assert await stored_rows(url) == expected_rows(records)
    assert (await status_of(url)).n_documents == 20


async def test_deletes_rechunking_and_bad_records_leave_exactly_what_is_true(
    topic: Topic, url: str
) -> None:
    """H07, E14: a tombstone deletes, a re-insert comes back, what cannot be mapped is a dead letter
    with its path and never one of its neighbours."""
    records: list[Record] = [
        ("a", document("a", 1, 40)),
        ("b", document("b", 1, 40)),
        ("c", None),  # never there
        ("b", None),
        ("a", document("a", 2, 9)),
        ("b", document("b", 3, 5)),
        ("d", document("d", 1, 5)),
        ("d", None),
        ("blank", {"title": " "}),
    ]
    bad = [("a", b"{"), ("e", b'{"body": "no title"}')]
    await topic.produce([*records[:5], *bad, *records[5:]])
    async with indexing(topic.route(url)):
        await until_committed(topic, len(records) + 2)
    assert await stored_rows(url) == expected_rows(records)
    assert (await status_of(url)).n_documents == 3  # a, b, blank
    letters = await topic.read_dead_letters(2)
    assert {letter.value for letter in letters} == {body for _, body in bad}
    messages = [dict(letter.headers)["embedstream-error-message"] for letter in letters]
    assert any(b"$.title" in message for message in messages)


async def test_a_replay_changes_nothing_and_embeds_nothing(topic: Topic, url: str) -> None:
    records: list[Record] = [(f"d{i % 7}", document(f"d{i % 7}", i, 20)) for i in range(30)]
    records += [("d3", None)]
    await topic.produce(records)
    async with indexing(topic.route(url)):
        await until_committed(topic, len(records))
    before, status = await stored_rows(url), await status_of(url)
    runner, metrics = FakeRunner(), RecordingMetrics()
    async with indexing(topic.route(url, "another-group"), runner=runner, metrics=metrics):
        await until_committed(topic, len(records), "another-group")
    assert await stored_rows(url) == before == expected_rows(records)
    assert await status_of(url) == status
    assert not [item for batch in runner.batches for item in batch.items]


async def test_each_document_is_told_beside_the_collection_and_a_replay_tells_it_again(
    topic: Topic, url: str
) -> None:
    """A crash between the store and the report leaves the record: what the ledger knows is told, too."""
    reports = unique("indexed")
    records: list[Record] = [(f"d{i}", document(f"d{i}", 1, 12)) for i in range(6)]
    records += [("d0", None), ("d1", document("d1", 2, 3))]
    await topic.produce([*records, ("bad", b"{")])
    route = topic.route(url, report_to=f"kafka://{topic.address}/{reports}")
    async with indexing(route):
        await until_committed(topic, len(records) + 1)
    told = await topic.read(reports, len(records))
    bodies = [json.loads(record.value) for record in told]
    assert [record.key.decode() for record in told] == [body["document_id"] for body in bodies]
    assert all(body["collection"] == url and body["model"]["fingerprint"] for body in bodies)
    # Two versions of one batch are told in any order: the version says which is the later one.
    last = {
        body["document_id"]: body for body in sorted(bodies, key=lambda b: b["version"]["number"])
    }
    assert {name: body["outcome"] for name, body in last.items()} == {
        "d0": "deleted", "d1": "written", **{f"d{i}": "written" for i in range(2, 6)}
    }  # fmt: skip
    assert last["d1"]["chunks"] == 1 and last["d2"]["chunks"] == 2
    runner = FakeRunner()
    again = {**topic.route(url, "again"), "report_to": route["report_to"]}
    async with indexing(again, runner=runner):
        await until_committed(topic, len(records) + 1, "again")
    told = await topic.read(reports, 2 * len(records))
    every = Counter((record.key.decode(), json.loads(record.value)["outcome"]) for record in told)
    more = every - Counter((body["document_id"], body["outcome"]) for body in bodies)
    assert {outcome for _, outcome in more} <= {"unchanged", "stale"}
    assert {name for name, _ in more} == set(last) and more.total() == len(records)
    assert not [item for batch in runner.batches for item in batch.items]


async def test_documents_that_did_not_change_are_not_embedded_again(topic: Topic, url: str) -> None:
    first: list[Record] = [(f"d{i}", document(f"d{i}", 1, 5)) for i in range(10)]
    second: list[Record] = [(f"d{i}", document(f"d{i}", 1 if i else 2, 5)) for i in range(10)]
    await topic.produce(first)
    async with indexing(topic.route(url)):
        await until_committed(topic, 10)
    await topic.produce(second)
    runner = FakeRunner()
    async with indexing(topic.route(url), runner=runner):
        await until_committed(topic, 20)
    assert await stored_rows(url) == expected_rows([*first, *second])
    assert len([item for batch in runner.batches for item in batch.items]) == 1


async def test_two_routes_into_one_collection_share_it(topic: Topic, url: str) -> None:
    other = Topic(topic.address)
    await other.create()
    ours: list[Record] = [(f"a{i}", document("a", i, 12)) for i in range(20)]
    theirs: list[Record] = [(f"b{i}", document("b", i, 12)) for i in range(20)]
    await topic.produce(ours)
    await other.produce(theirs)
    live = other.route(url, name="live", lane="interactive")
    async with indexing(topic.route(url), live):
        await until_committed(topic, 20)
        await until_committed(other, 20)
    assert await stored_rows(url) == expected_rows([*ours, *theirs])


async def test_a_store_that_is_down_loses_nothing_and_ready_says_so(
    topic: Topic, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H08: full, read-only, unreachable: the records wait, and come in when it is back."""
    from pipeline.indexing.sinks.lance import LanceCollection

    down, refused = True, asyncio.Event()
    write = LanceCollection.put_chunks

    async def put_chunks(self: LanceCollection, writes: Any) -> None:
        if down:
            refused.set()
            raise StoreUnavailable("the disk is full")
        await write(self, writes)

    monkeypatch.setattr(LanceCollection, "put_chunks", put_chunks)
    records: list[Record] = [(f"d{i}", document(f"d{i}", i, 12)) for i in range(20)]
    await topic.produce(records)
    async with indexing(topic.route(url)) as app:
        await refused.wait()
        async with asyncio.timeout(20):
            while app.readiness().ready:
                await asyncio.sleep(0.01)
        [reason] = app.readiness().reasons
        assert "route docs" in reason and "the disk is full" in reason
        down = False
        await until_committed(topic, len(records))
        assert app.readiness().ready
    assert await stored_rows(url) == expected_rows(records)


async def test_another_model_does_not_start_on_this_collection(topic: Topic, url: str) -> None:
    """H03."""
    async with indexing(topic.route(url)):
        pass
    other = {**topic.route(url), "chunk": {"max_tokens": 16, "by": "tokens"}}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with indexing(other):
            pass
    matched, _ = caught.value.split(OperatorError)
    assert matched is not None and "reindex" in str(matched.exceptions[0])


async def test_a_chunk_without_a_vector_dead_letters_its_document_and_keeps_the_last_good_one(
    topic: Topic, url: str
) -> None:
    """A24, H09: NaN never reaches the store, and no half of a document either."""
    good, bad = document("a", 1, 20), {**document("a", 2, 20), "title": "zebra"}
    (zebra,) = fake_ids("zebra")
    assert all(zebra not in fake_ids(" ".join(words_of(d))) for d in (good, document("b", 3, 4)))
    runner = FakeRunner(nan_id=zebra)
    records: list[Record] = [("a", good), ("a", bad), ("b", document("b", 3, 4))]
    await topic.produce(records)
    async with indexing(topic.route(url), runner=runner):
        await until_committed(topic, 3)
    assert await stored_rows(url) == expected_rows([records[0], records[2]])
    [letter] = await topic.read_dead_letters(1)
    assert dict(letter.headers)["embedstream-error-code"] == b"non_finite"

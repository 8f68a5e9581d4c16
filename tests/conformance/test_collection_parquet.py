"""Parquet files under the suite of collections, and what only files suffer."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.indexing import parquet_log
from pipeline.indexing.identity import WrongCollection
from pipeline.indexing.records import Chunk, Version, Write
from pipeline.indexing.sinks.base import StoreUnavailable
from pipeline.indexing.sinks.parquet import ParquetCollection
from pipeline.indexing.sinks.registry import open_collection
from tests.conformance.collection_suite import (
    IDENTITY,
    CollectionConformance,
    contents,
    delete,
    entries_of,
    expected,
    put,
    vector_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the whole module."""
    return tmp_path_factory.mktemp("parquet")


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge after every third batch."""
    monkeypatch.setattr(parquet_log, "MAX_FILES", 3)


class TestParquet(CollectionConformance):
    """As it is."""

    @pytest.fixture
    def address(self, folder: Path) -> str:
        """A folder in the folder per collection."""
        return f"parquet://{folder}#NAME"

    @pytest.fixture
    def files(self, collection: ParquetCollection) -> Path:
        """Where the files of the collection are."""
        return collection.log.folder

    async def test_each_batch_is_one_file_and_many_are_merged_without_their_history(
        self, collection: ParquetCollection, files: Path, few_files: None
    ) -> None:
        model: dict[str, Write] = {}
        for number in range(1, 30):
            writes = [
                put(f"d{number % 5}", number, [f"t{number}", "x"]),
                put("same", number, ["s"]),
            ]
            if number % 7 == 0:
                writes[0] = delete(f"d{number % 5}", number)
            await collection.write(writes, now_ms=number)
            model |= {write.document_id: write for write in writes}
            assert await contents(collection) == expected(model)
            assert len(list(files.glob("*.parquet"))) <= 5
        ledger = await entries_of(collection)
        assert {name: e.version for name, e in ledger.items()} == {
            name: write.version for name, write in model.items()
        }
        # 29 batches with two entries and up to three chunks each would be 142 rows.
        assert sum(pq.read_metadata(one).num_rows for one in files.glob("*.parquet")) < 60
        again = open_collection(str(collection.where))
        await again.open(IDENTITY)
        assert await contents(again) == expected(model)
        assert (await again.search(vector_of("t29"), 1))[0].text == "t29"
        await again.aclose()

    async def test_a_replay_leaves_every_file_as_it_is(
        self, collection: ParquetCollection, files: Path
    ) -> None:
        writes = [put(f"d{i}", i, ["x", str(i)]) for i in range(20)]
        for write in writes:
            await collection.write([write], now_ms=1)
        before = {one.name: one.read_bytes() for one in files.glob("*.parquet")}
        for write in writes:
            await collection.write([write], now_ms=2)
        assert {one.name: one.read_bytes() for one in files.glob("*.parquet")} == before

    async def test_files_that_a_dead_merge_left_are_read_once_and_removed(
        self, collection: ParquetCollection, files: Path, few_files: None, url: str
    ) -> None:
        for number in range(1, 4):
            await collection.write(
                [put("a", number, [f"t{number}"]), put(f"d{number}", 1, ["x"])], now_ms=1
            )
        left = {one: one.read_bytes() for one in files.glob("*.parquet")}
        await collection.write([put("a", 4, ["t4"])], now_ms=1)
        wanted = await contents(collection)
        await collection.aclose()
        for one, data in left.items():  # renamed, and died before the old ones were removed
            one.write_bytes(data)
        (files / "77-1.tmp").write_bytes(b"half")
        reader = open_collection(url)
        await reader.open(IDENTITY)
        assert await contents(reader) == wanted and len(list(files.glob("*.parquet"))) == 4
        await reader.write([put("b", 1, ["y"])], now_ms=1)
        await reader.aclose()
        assert len(list(files.glob("*.parquet"))) == 2 and not list(files.glob("*.tmp"))

    async def test_a_reader_goes_on_while_another_process_merges(
        self, collection: ParquetCollection, url: str, few_files: None
    ) -> None:
        writes = {f"d{i}": put(f"d{i}", 1, ["x"]) for i in range(3)}
        for write in writes.values():
            await collection.write([write], now_ms=1)
        reader = open_collection(url)
        await reader.open_as_is()
        rows = reader.rows()
        first = await anext(rows)
        last = put("last", 1, ["y"])
        await collection.write([last], now_ms=1)  # merges, and removes what the reader reads
        seen = {first.document_id} | {row.document_id async for row in rows}
        assert seen == set(writes)
        assert await contents(reader) == expected({**writes, "last": last})
        await reader.aclose()

    async def test_one_process_writes_at_a_time_and_the_others_wait(
        self, collection: ParquetCollection, url: str
    ) -> None:
        await collection.write([put("a", 1, ["x"])], now_ms=1)
        other = open_collection(url)
        await other.open(IDENTITY)
        with pytest.raises(StoreUnavailable, match="another process writes it"):
            await other.write([put("b", 1, ["y"])], now_ms=1)
        assert len(await contents(other)) == 1
        await collection.aclose()
        outcomes = await other.write([put("b", 1, ["y"]), put("a", 1, ["x"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "unchanged"]
        await other.aclose()

    async def test_a_full_disk_holds_the_batch_back_and_leaves_no_half_of_it(
        self, collection: ParquetCollection, files: Path
    ) -> None:
        """K10: the limit on file size stands for the disk."""
        kept = put("kept", 1, ["x"])
        await collection.write([kept], now_ms=1)
        big = put("big", 1, [str(np.random.default_rng(1).bytes(200_000))])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            with pytest.raises(StoreUnavailable, match="File too large"):
                await collection.write([big], now_ms=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await contents(collection) == expected({"kept": kept})
        assert not list(files.glob("*.tmp"))
        assert [o.kind for o in await collection.write([big], now_ms=1)] == ["written"]

    async def test_a_merge_that_fails_costs_no_write(
        self,
        collection: ParquetCollection,
        few_files: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(collection.log, "merge", full)
            for i in range(5):
                await collection.write([put(f"d{i}", 1, ["x"])], now_ms=1)
        await collection.write([put("last", 1, ["x"])], now_ms=1)
        assert len(await contents(collection)) == 6 and len(collection.log.names) == 1

    async def test_a_file_that_was_cut_is_told_by_every_call(
        self, collection: ParquetCollection, files: Path, url: str
    ) -> None:
        await collection.write([put("a", 1, ["x"])], now_ms=1)
        (file,) = files.glob("*.parquet")
        data = file.read_bytes()
        file.write_bytes(data[:-20])
        reader = open_collection(url)
        await reader.open(IDENTITY)
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            await reader.status()
        await reader.aclose()
        file.write_bytes(data)

    async def test_a_write_whose_caller_gave_up_is_there_or_not_but_never_twice(
        self, collection: ParquetCollection
    ) -> None:
        """Each await cancelled: the thread goes on, and the next call waits for it."""
        for steps in range(12):
            write = put("a", steps + 1, [f"t{steps}", "x"])
            task = asyncio.get_running_loop().create_task(collection.write([write], now_ms=1))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            (outcome,) = await collection.write([write], now_ms=1)
            assert outcome.kind in ("written", "unchanged")
            assert await contents(collection) == expected({"a": write})

    async def test_values_that_no_parquet_holds_are_refused_alone(
        self, collection: ParquetCollection
    ) -> None:
        chunk = Chunk(0, "\ud800", vector_of("x"))
        bad = [
            Write("surrogate", Version("topic/0", 1), "h", (chunk,)),
            dataclasses.replace(put("huge", 1, ["x"]), version=Version("topic/0", 2**63)),
        ]
        outcomes = await collection.write([put("a", 1, ["x"]), *bad, put("b", 1, ["x"])], now_ms=1)
        assert [o.kind for o in outcomes] == ["written", "refused", "refused", "written"]
        assert len(await contents(collection)) == 2

    async def test_a_collection_made_anew_by_another_is_not_written_to(
        self, collection: ParquetCollection, url: str
    ) -> None:
        other = open_collection(url)
        await other.open(IDENTITY)
        await other.drop()
        await other.open(IDENTITY)
        await other.write([put("a", 1, ["theirs"])], now_ms=1)
        await other.aclose()
        with pytest.raises(StoreUnavailable, match="made anew"):
            await collection.write([put("a", 1, ["mine"])], now_ms=1)
        await collection.aclose()
        await collection.open(IDENTITY)

    async def test_any_reader_of_parquet_finds_the_live_chunks(
        self, collection: ParquetCollection, files: Path
    ) -> None:
        """The recipe of docs/indexing.md, in plain pyarrow."""
        writes = [put("a", 1, ["old", "older"]), put("b", 1, ["x"]), put("gone", 1, ["y"])]
        await collection.write(writes, now_ms=1)
        await collection.write([put("a", 2, ["new"]), delete("gone", 2)], now_ms=1)
        touched = dataclasses.replace(put("b", 3, ["x"]), chunks=None)
        await collection.write([touched], now_ms=1)
        rows = [row for one in files.glob("*.parquet") for row in pq.read_table(one).to_pylist()]
        entries = sorted((r for r in rows if r["ordinal"] == -1), key=lambda r: r["batch"])
        homes = {row["document_id"]: row["chunks_batch"] for row in entries}
        live = [r for r in rows if r["ordinal"] >= 0 and homes[r["document_id"]] == r["batch"]]
        assert {(r["document_id"], r["text"]) for r in live} == {("a", "new"), ("b", "x")}


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "theirs.parquet").write_bytes(b"PAR1")
    made = open_collection(f"parquet://{tmp_path}#docs")
    with pytest.raises(WrongCollection, match="another collection"):
        await made.open(IDENTITY)
    await made.aclose()


async def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    made = open_collection(f"parquet://{tmp_path}/file#docs")
    with pytest.raises(StoreUnavailable) as caught:
        await made.open(IDENTITY)
    assert str(caught.value) == "NotADirectoryError: Not a directory"


WRITES_UNTIL_KILLED = """
    import asyncio, sys
    from pipeline.indexing import parquet_log
    from pipeline.indexing.sinks.registry import open_collection
    from tests.conformance.collection_suite import IDENTITY, put
    parquet_log.MAX_FILES = 3

    async def main():
        made = open_collection(sys.argv[1])
        await made.open(IDENTITY)
        for number in range(int(sys.argv[2]), 10_000):
            write = put(f"d{number % 7}", number, [f"t{number}"] * (number % 4 + 1))
            await made.write([write], now_ms=1)
            print(number, flush=True)

    asyncio.run(main())
"""


async def test_a_kill_anywhere_leaves_what_was_told_as_written(tmp_path: Path) -> None:
    """SIGKILL, five times, while batches are written and merged."""
    url, number, model = f"parquet://{tmp_path}#docs", 1, {}
    for turn in range(5):
        command = [sys.executable, "-c", textwrap.dedent(WRITES_UNTIL_KILLED), url, str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(5 + turn)]
            process.kill()
            told += [int(line) for line in process.stdout if line.strip()]
        for one in range(number, told[-1] + 1):
            write = put(f"d{one % 7}", one, [f"t{one}"] * (one % 4 + 1))
            model[write.document_id] = write
        number = told[-1] + 1
        made: Any = open_collection(url)
        await made.open(IDENTITY)
        # The batch after the last that was told may be there as well.
        late = put(f"d{number % 7}", number, [f"t{number}"] * (number % 4 + 1))
        found = await contents(made)
        assert found in (expected(model), expected({**model, late.document_id: late}))
        await made.aclose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("parquet:///#docs", "no folder"),
        ("parquet:///x?compression=none#docs", "unknown parameter 'compression'"),
    ],
)
def test_a_faulty_address_is_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_collection(url)


def test_a_chunk_of_any_size_is_one_row() -> None:
    schema = parquet_log._schema(4)
    vector = np.ones(4, np.float32)
    write = Write("a", Version("t", 1), "h", (Chunk(0, "x" * 3_000_000, vector),))
    assert parquet_log._chunk_rows([write], 1, schema).num_rows == 1

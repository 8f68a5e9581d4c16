"""A second collection holds what the first one stores, whatever happens to the first meanwhile."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from gpu.batch import Float32
from pipeline.indexing.chunking import Chunker
from pipeline.indexing.options import ChunkOptions
from pipeline.indexing.records import DELETED, UNFINISHED, Version, Write, chunk_id
from pipeline.indexing.reindex import Reindexing, Totals
from pipeline.indexing.sinks.base import Row, StoreUnavailable
from schemas.errors import EmbedstreamError, ItemTooLarge
from schemas.requests import Text
from tests.conformance.collection_suite import (
    IDENTITY,
    contents,
    delete,
    entries_of,
    put,
    vector_of,
)
from tests.support.memory_collection import MemoryCollection
from tests.unit.pipeline.indexing.test_chunking import TOKENIZER


class Both:
    """An old collection with `writes`, an empty new one, and what fills it."""

    def __init__(self, writes: Sequence[Write] = (), max_tokens: int = 64) -> None:
        self.writes = list(writes)
        self.old = MemoryCollection(uuid.uuid4().hex)
        self.new = MemoryCollection(uuid.uuid4().hex)
        self.embedded: list[str] = []
        self.refused: set[str] = set()
        self.reindexing = Reindexing(
            self.old,
            self.new,
            chunker=Chunker(
                ChunkOptions(max_tokens=max_tokens, by="tokens"), tokenizer_json=TOKENIZER, room=64
            ),
            embed=self.embed,
            now_ms=lambda: 5,
        )

    async def embed(self, texts: Sequence[Text]) -> list[list[Float32] | EmbedstreamError]:
        self.embedded += [one.text for one in texts]
        return [
            ItemTooLarge("too large") if one.text in self.refused else [-vector_of(one.text)]
            for one in texts
        ]

    async def __aenter__(self) -> Both:
        await self.old.open(IDENTITY)
        await self.new.open(IDENTITY)
        if self.writes:
            await self.old.write(self.writes, now_ms=1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.old.drop()
        await self.new.drop()

    async def check_equal(self) -> None:
        """The new one has all of the old one's chunks, with vectors of its own, and its ledger."""
        old, new = await contents(self.old), await contents(self.new)
        assert {key: row[:4] for key, row in new.items()} == {k: r[:4] for k, r in old.items()}
        assert all(row[4] == (-vector_of(row[2])).tobytes() for row in new.values())
        mine, theirs = await entries_of(self.new), await entries_of(self.old)
        assert {k: (e.version, e.content_hash) for k, e in mine.items()} == {
            k: (e.version, e.content_hash) for k, e in theirs.items()
        }


async def test_texts_metadata_versions_and_deletes_are_taken_over() -> None:
    writes = [put(f"d{i}", i, [f"a{i}", f"b{i}"], n=i) for i in range(200)]
    async with Both([*writes, put("empty", 1, [])]) as both:
        await both.old.write([delete("d3", 900)], now_ms=2)
        totals = await both.reindexing.once()
        assert (totals.written, totals.there, totals.changing, totals.failed) == (201, 0, 0, [])
        await both.check_equal()
        assert (await entries_of(both.new))["d3"].content_hash == DELETED


async def test_a_second_run_embeds_nothing_and_a_topic_goes_on_where_it_was() -> None:
    async with Both([put("a", 7, ["x"]), put("b", 8, ["y"])]) as both:
        await both.reindexing.once()
        both.embedded.clear()
        assert await both.reindexing.once() == Totals(there=2)
        assert both.embedded == []
        # What the topic tells again is known, what it told before is late, what is new is written.
        kinds = [
            outcome.kind
            for write in (put("a", 7, ["x"]), put("a", 6, ["older"]), put("a", 9, ["newer"]))
            for outcome in await both.new.write([write], now_ms=6)
        ]
        assert kinds == ["unchanged", "stale", "written"]
        # And the old collection does not take it back.
        assert await both.reindexing.once() == Totals(there=2)
        assert {row[2] for row in (await contents(both.new)).values()} == {"newer", "y"}


async def test_a_version_that_moved_alone_is_moved_without_a_forward() -> None:
    async with Both([put("a", 1, ["x"])]) as both:
        await both.reindexing.once()
        await both.old.write(
            [dataclasses.replace(put("a", 1, ["x"]), version=Version("topic/0", 2), chunks=None)],
            now_ms=2,
        )
        both.embedded.clear()
        await both.reindexing.once()
        assert both.embedded == []
        assert (await entries_of(both.new))["a"].version.number == 2


async def test_what_changes_while_it_is_read_is_left_to_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger is read, then the document changes, then its chunks are read: old hash, new text."""
    async with Both([put("a", 1, ["old"]), put("b", 1, ["still"])]) as both:
        rows = both.old.rows

        async def changing() -> AsyncIterator[Row]:
            await both.old.write([put("a", 2, ["new"])], now_ms=2)
            async for row in rows():
                yield row

        monkeypatch.setattr(both.old, "rows", changing)
        totals = await both.reindexing.once()
        assert (totals.written, totals.changing) == (1, 1)
        assert {row[2] for row in (await contents(both.new)).values()} == {"still"}
        monkeypatch.setattr(both.old, "rows", rows)
        totals = await both.reindexing.once()
        assert (totals.written, totals.changing) == (1, 0)
        await both.check_equal()


async def test_a_document_that_is_half_written_is_not_taken() -> None:
    async with Both([put("a", 1, ["x", "y"]), put("b", 1, ["x", "y"])]) as both:
        stored = MemoryCollection.stores[both.old.name]
        stored.entries["a"] = dataclasses.replace(stored.entries["a"], content_hash=UNFINISHED)
        del stored.rows[chunk_id("b", 1)]
        totals = await both.reindexing.once()
        assert (totals.written, totals.changing) == (0, 2)
        assert await contents(both.new) == {}


async def test_a_run_that_was_cut_short_goes_on() -> None:
    async with Both([put(f"d{i:03}", 1, [f"t{i}"]) for i in range(200)]) as both:
        write, calls = both.new.transact, 0

        async def dies(writes: Sequence[Write], now_ms: int):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == 3:
                raise StoreUnavailable("gone")
            return await write(writes, now_ms)

        both.new.transact = dies  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await both.reindexing.once()
        both.embedded.clear()
        await both.reindexing.once()
        assert 0 < len(both.embedded) < 200
        await both.check_equal()


async def test_chunks_that_are_too_long_for_the_new_model_are_cut_again() -> None:
    async with Both([put("a", 1, ["the cat sat the cat sat", "the cat"])], max_tokens=8) as both:
        both.reindexing._chunker = Chunker(
            ChunkOptions(max_tokens=8, by="tokens"), tokenizer_json=TOKENIZER, room=8
        )
        long = "the cat sat " * 5
        await both.old.write([put("b", 1, [long.strip(), "the cat"])], now_ms=1)
        await both.reindexing.once()
        rows = sorted(
            (row[1], row[2]) for row in (await contents(both.new)).values() if row[0] == "b"
        )
        assert [ordinal for ordinal, _ in rows] == list(range(len(rows))) and len(rows) == 3
        assert " ".join(text for _, text in rows) == long + "the cat"
        assert all(both.reindexing._chunker.count(text) <= 8 for _, text in rows)


async def test_a_document_that_cannot_be_embedded_fails_alone_and_is_named() -> None:
    async with Both([put("bad", 1, ["x", "y"]), put("good", 1, ["z"])]) as both:
        both.refused = {"y"}
        totals = await both.reindexing.once()
        assert totals.written == 1 and totals.failed == [("bad", "item_too_large: too large")]
        assert {row[0] for row in (await contents(both.new)).values()} == {"good"}


async def test_agreement_is_one_for_the_same_neighbours_and_less_for_others() -> None:
    rng = random.Random(0)
    async with Both([put(f"d{i}", 1, [f"{rng.random()}"]) for i in range(60)]) as both:
        await both.reindexing.once()
        assert await both.reindexing.agreement() == 1.0  # all turned round: the same angles
        both.reindexing._embed = shuffled
        assert (await both.reindexing.agreement() or 0) < 0.6
    async with Both() as both:
        assert await both.reindexing.agreement() is None


async def shuffled(texts: Sequence[str]) -> list[Float32 | EmbedstreamError]:
    return [[vector_of(one.text[::-1])] for one in texts]

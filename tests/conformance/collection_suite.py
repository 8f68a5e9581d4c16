"""One behaviour suite for every store: a dict is the model, the store must equal it.

A test module per store subclasses `CollectionConformance` and names the address; hypothesis drives
`CollectionMachine` with random inserts, updates, re-chunkings, deletes, repeats, late versions,
writes that were cut short, and reopenings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pipeline.indexing.identity import CollectionIdentity, WrongCollection
from pipeline.indexing.records import DELETED, Chunk, Entry, Version, Write, chunk_id
from pipeline.indexing.sinks.base import Collection, StoreUnavailable
from pipeline.indexing.sinks.registry import open_collection
from pipeline.indexing.vectors import METRICS, TAKEN_BY, SparseVector, Vector
from schemas.requests import Output

DIMENSIONS = 4
VOCABULARY = 30_522
IDENTITY = CollectionIdentity(
    model="tiny", fingerprint="f1", dimensions=DIMENSIONS, chunking="by=sentences"
)
IDENTITIES: dict[Output, CollectionIdentity] = {
    "dense": IDENTITY,
    "sparse": msgspec.structs.replace(IDENTITY, dimensions=VOCABULARY, metric="dot"),
    "multivector": msgspec.structs.replace(IDENTITY, metric="maxsim"),
}
HOSTILE_IDS = (
    "a'b",
    'quo"te',
    "../x",
    "%s",
    "{}",
    "名前",
    "1-0",
    "18446744073709551616",
    "a" * 512,
)


def vector_of(text: str) -> np.ndarray:
    """A vector that the text decides, of length one."""
    rng = np.random.default_rng(abs(hash_of(text)))
    vector = rng.normal(size=DIMENSIONS).astype(np.float32)
    return vector / np.float32(np.linalg.norm(vector))


def vector_of_kind(text: str, kind: Output) -> Vector:
    """The same of another kind: up to six weights, or up to four vectors."""
    rng = np.random.default_rng(abs(hash_of(text)))
    if kind == "sparse":
        indices = np.sort(rng.choice(VOCABULARY, size=rng.integers(1, 7), replace=False))
        return SparseVector(
            indices.astype(np.int32), rng.uniform(0.1, 2, len(indices)).astype("f4")
        )
    if kind == "multivector":
        return np.stack([vector_of(f"{i}{text}") for i in range(rng.integers(1, 5))])
    return vector_of(text)


def score_of(question: Vector, chunk: Vector) -> float:
    """By the metric of their kind."""
    if isinstance(question, SparseVector) and isinstance(chunk, SparseVector):
        theirs = chunk.as_dict()
        return sum(weight * theirs.get(i, 0.0) for i, weight in question.as_dict().items())
    assert isinstance(question, np.ndarray) and isinstance(chunk, np.ndarray)
    if question.ndim == 1:
        return float(question @ chunk)
    return float((question @ chunk.T).max(axis=1).sum())


def as_bytes(vector: Vector) -> bytes:
    """To compare bit by bit."""
    return vector.tobytes() if isinstance(vector, SparseVector) else vector.astype("<f4").tobytes()


def hash_of(text: str) -> int:
    """A stable number for a text."""
    return int.from_bytes(text.encode()[:64], "little") % 2**32


def put(
    document_id: str, number: int, texts: list[str], kind: Output = "dense", **metadata: Any
) -> Write:
    """A write of these chunks."""
    content = repr((texts, sorted(metadata.items())))
    chunks = tuple(Chunk(i, text, vector_of_kind(text, kind)) for i, text in enumerate(texts))
    return Write(document_id, Version("topic/0", number), content, chunks, metadata)


def delete(document_id: str, number: int) -> Write:
    """A delete."""
    return Write(document_id, Version("topic/0", number), DELETED, ())


async def contents(
    collection: Collection,
) -> dict[str, tuple[str, int, str, dict[str, Any], bytes]]:
    """Everything a store holds, by chunk id; vectors as bytes of float32."""
    found: dict[str, tuple[str, int, str, dict[str, Any], bytes]] = {}
    async for row in collection.rows():
        assert row.chunk_id not in found, "a chunk is stored twice"
        found[row.chunk_id] = (
            row.document_id,
            row.ordinal,
            row.text,
            dict(row.metadata),
            as_bytes(row.vector),
        )
    return found


async def entries_of(collection: Collection) -> dict[str, Entry]:
    """The whole ledger, by document id."""
    found: dict[str, Entry] = {}
    async for entry in collection.entries():
        assert entry.document_id not in found, "a document has two entries"
        found[entry.document_id] = entry
    return found


def expected(model: dict[str, Write]) -> dict[str, tuple[str, int, str, dict[str, Any], bytes]]:
    """What a store must hold when these are the last writes."""
    return {
        chunk_id(name, chunk.ordinal): (
            name,
            chunk.ordinal,
            chunk.text,
            dict(write.metadata),
            as_bytes(chunk.vector),
        )
        for name, write in model.items()
        for chunk in write.chunks or ()
    }


def same(found: dict[str, Any], wanted: dict[str, Any], exact: bool) -> bool:
    """Whether rows are equal. exact False: the store normalizes, which moves the last bits."""
    if exact:
        return found == wanted
    if {key: row[:4] for key, row in found.items()} != {k: row[:4] for k, row in wanted.items()}:
        return False
    pairs = [(np.frombuffer(found[k][4], "<f4"), np.frombuffer(wanted[k][4], "<f4")) for k in found]
    return all(np.allclose(a, b, atol=1e-5) for a, b in pairs)


def _weights(*pairs: tuple[int, float]) -> SparseVector:
    return SparseVector(
        np.asarray([i for i, _ in pairs], np.int32), np.asarray([w for _, w in pairs], np.float32)
    )


MEANINGLESS: dict[Output, dict[str, Vector]] = {
    "dense": {
        "nan": np.asarray([np.nan, 0, 0, 1], np.float32),
        "inf": np.asarray([np.inf, 0, 0, 1], np.float32),
        "zero": np.zeros(4, np.float32),
        "short": np.ones(3, np.float32),
    },
    "sparse": {
        "empty": _weights(),
        "nan": _weights((1, np.nan)),
        "inf": _weights((1, 1.0), (2, np.inf)),
        "zero": _weights((1, 1.0), (2, 0.0)),
        "beyond": _weights((1, 1.0), (VOCABULARY, 1.0)),
        "turned": _weights((2, 1.0), (1, 1.0)),
        "dense": np.ones(4, np.float32),
    },
    "multivector": {
        "empty": np.zeros((0, 4), np.float32),
        "nan": np.asarray([[0, 0, 0, 1], [np.nan, 0, 0, 1]], np.float32),
        "zero": np.asarray([[0, 0, 0, 1], [0, 0, 0, 0]], np.float32),
        "short": np.ones((2, 3), np.float32),
        "dense": np.ones(4, np.float32),
    },
}
"""Vectors of each kind that no store may see."""


class CutShort(Exception):
    """The process died here."""


class CollectionMachine(RuleBasedStateMachine):
    """Compares a store with a dict after every step."""

    address: str
    exact: bool
    kind: Output

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        name = f"c{uuid.uuid4().hex[:12]}"
        self.url = self.address.replace("NAME", name)
        self.collection = self._open()
        self.model: dict[str, Write] = {}  # the last write of each document, deletes too
        self.clock = 0

    def _open(self) -> Collection:
        collection = open_collection(self.url)
        self.runner.run(collection.open(IDENTITIES[self.kind]))
        return collection

    def _write(self, writes: list[Write]) -> list[str]:
        outcomes = self.runner.run(self.collection.write(writes, now_ms=1))
        return [outcome.kind for outcome in outcomes]

    def put(self, name: str, number: int, texts: list[str], **metadata: Any) -> Write:
        """A write of this machine's kind."""
        return put(name, number, texts, self.kind, **metadata)

    def _next(self) -> int:
        self.clock += 1
        return self.clock

    names = st.sampled_from(["a", "b", *HOSTILE_IDS[:6]])
    texts = st.lists(
        st.text("ab' \"\\é\n", min_size=1, max_size=6).map(lambda t: "t" + t), max_size=5
    )
    metadata = st.dictionaries(
        st.sampled_from(["lang", "n"]), st.one_of(st.text("xy'", max_size=3), st.integers(0, 9))
    )

    @rule(
        batch=st.dictionaries(names, st.one_of(st.none(), st.tuples(texts, metadata)), min_size=1)
    )
    def write(self, batch: dict[str, tuple[list[str], dict[str, Any]] | None]) -> None:
        """Inserts, updates, re-chunkings and deletes in one batch."""
        writes = [
            delete(name, self._next())
            if value is None
            else self.put(name, self._next(), value[0], **value[1])
            for name, value in batch.items()
        ]
        kinds = self._write(writes)
        for write, kind in zip(writes, kinds, strict=True):
            before = self.model.get(write.document_id)
            same = before is not None and before.content_hash == write.content_hash
            assert kind == ("unchanged" if same else "written")
            self.model[write.document_id] = write

    @rule(name=names)
    def repeat(self, name: str) -> None:
        """The last write comes once more: nothing happens."""
        if name in self.model:
            assert self._write([self.model[name]]) == ["unchanged"]

    @rule(name=names, texts=texts, gone=st.booleans())
    def late(self, name: str, texts: list[str], gone: bool) -> None:
        """An older version comes after a newer one: it is dropped, also where the newer deleted."""
        if name in self.model:
            older = self.model[name].version.number - 1
            write = delete(name, older) if gone else self.put(name, older, ["late", *texts])
            assert self._write([write]) == ["stale"]

    @rule(name=names)
    def touch(self, name: str) -> None:
        """The content is the same under a newer version: only the version moves."""
        if name in self.model:
            newer = dataclasses.replace(
                self.model[name], version=Version("topic/0", self._next()), chunks=None
            )
            assert self._write([newer]) == ["unchanged"]
            self.model[name] = dataclasses.replace(self.model[name], version=newer.version)

    @rule(name=names, first=texts, then=st.one_of(st.none(), texts), at=st.integers(0, 2))
    def cut_short(self, name: str, first: list[str], then: list[str] | None, at: int) -> None:
        """The process dies inside a write, and another version is what comes next (a compacted
        topic does not give the first one again)."""
        step = ("put_chunks", "delete_surplus", "put_entries")[at]

        async def dies(*_: Any) -> None:
            raise CutShort

        write = self.put(name, self._next(), ["first", *first])
        setattr(self.collection, step, dies)
        try:
            self.runner.run(self.collection.write([write], now_ms=1))
        except CutShort:
            pass
        finally:
            delattr(self.collection, step)
        nxt = delete(name, self._next()) if then is None else self.put(name, self._next(), then)
        self._write([nxt])
        self.model[name] = nxt

    @rule()
    def reopen(self) -> None:
        """Another process opens it."""
        self.runner.run(self.collection.aclose())
        self.collection = self._open()

    @invariant()
    def the_store_equals_the_model(self) -> None:
        """Ids, texts, metadata and vectors."""
        found = self.runner.run(contents(self.collection))
        assert same(found, expected(self.model), self.exact)
        status = self.runner.run(self.collection.status())
        ledger = self.runner.run(entries_of(self.collection))
        assert {name: (e.version, e.content_hash) for name, e in ledger.items()} == {
            name: (write.version, write.content_hash) for name, write in self.model.items()
        }
        there = [w for w in self.model.values() if w.content_hash != DELETED]
        assert (status.n_documents, status.n_chunks) == (len(there), len(found))

    def teardown(self) -> None:
        """Delete what was made."""
        self.runner.run(self.collection.drop())
        self.runner.run(self.collection.aclose())
        self.runner.close()


class CollectionConformance:
    """What every store must do. `address` (a fixture) holds NAME where the collection's name goes."""

    kind: Output = "dense"
    exact = True
    """Whether vectors come back bit for bit."""
    examples = 15
    steps = 12
    one_client = False
    """The store serves one client at a time: what needs two is left out."""

    @property
    def identity(self) -> CollectionIdentity:
        """Of a collection of this kind."""
        return IDENTITIES[self.kind]

    def put(self, name: str, number: int, texts: list[str], **metadata: Any) -> Write:
        """A write of this kind."""
        return put(name, number, texts, self.kind, **metadata)

    @pytest.fixture
    def url(self, address: str) -> str:
        """A collection of the test's own."""
        return address.replace("NAME", f"c{uuid.uuid4().hex[:12]}")

    @pytest.fixture
    async def collection(self, url: str) -> Any:
        """An open one."""
        made = open_collection(url)
        await made.open(self.identity)
        yield made
        await made.drop()
        await made.aclose()

    @pytest.mark.timeout(300)
    def test_a_dict_is_what_the_store_holds_after_any_history(self, address: str) -> None:
        machine: Callable[[], CollectionMachine] = type(
            "Machine",
            (CollectionMachine,),
            {"address": address, "exact": self.exact, "kind": self.kind},
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=self.steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
                database=None,
            ),
        )

    async def test_ids_that_no_author_imagined_are_kept_apart(self, collection: Collection) -> None:
        """H01."""
        writes = [self.put(name, 1, [f"text {i}"]) for i, name in enumerate(HOSTILE_IDS)]
        assert {o.kind for o in await collection.write(writes, now_ms=1)} == {"written"}
        wanted = expected({write.document_id: write for write in writes})
        assert same(await contents(collection), wanted, self.exact)
        again = await collection.write(writes, now_ms=2)
        assert {o.kind for o in again} == {"unchanged"}
        assert (await collection.status()).n_chunks == len(HOSTILE_IDS)

    async def test_vectors_that_mean_nothing_are_refused_and_the_rest_is_written(
        self, collection: Collection
    ) -> None:
        """H06, H09, A24: each bad one has its reason, its neighbours are stored."""
        good, other = self.put("good", 1, ["x"]), self.put("other", 1, ["y"])
        bad = []
        for name, vector in MEANINGLESS[self.kind].items():
            bad.append(Write(name, Version("topic/0", 1), "h", (Chunk(0, "secret", vector),)))
        outcomes = await collection.write([good, *bad, other], now_ms=1)
        assert [o.kind for o in outcomes] == ["written", *["refused"] * len(bad), "written"]
        assert all(o.reason and "secret" not in o.reason for o in outcomes[1:-1])
        assert set(await contents(collection)) == {chunk_id("good", 0), chunk_id("other", 0)}

    async def test_another_model_is_refused_with_the_remedy(self, url: str) -> None:
        """H03: fingerprint, size, prompt and cutting are checked when the collection is opened."""
        first = open_collection(url)
        await first.open(self.identity)
        if self.one_client:
            await first.aclose()
        try:
            for change in (
                {"fingerprint": "f2"},
                {"dimensions": 8},
                *({"metric": METRICS[kind]} for kind in first.kinds - {self.kind}),
                {"prompt": "query: "},
                {"chunking": "by=tokens"},
            ):
                second = open_collection(url)
                with pytest.raises(WrongCollection, match="reindex"):
                    await second.open(msgspec.structs.replace(self.identity, **change))
                await second.aclose()
        finally:
            await first.connect()
            await first.drop()
            await first.aclose()

    async def test_a_kind_of_vectors_that_the_store_has_not_is_refused_with_those_that_have(
        self, url: str
    ) -> None:
        for kind, stores in TAKEN_BY.items():
            made = open_collection(url)
            if kind not in made.kinds:
                with pytest.raises(WrongCollection, match=f"no {kind} vectors.*{stores[0]}"):
                    await made.open(IDENTITIES[kind])
                await made.aclose()

    async def test_search_gives_the_nearest_chunk_first(self, collection: Collection) -> None:
        writes = [self.put(f"d{i}", 1, [f"a{i}", f"b{i}"], n=i) for i in range(20)]
        await collection.write(writes, now_ms=1)
        question = vector_of_kind("b7", self.kind)
        hits = await collection.search(question, 3)
        assert (hits[0].document_id, hits[0].ordinal, hits[0].text) == ("d7", 1, "b7")
        assert dict(hits[0].metadata) == {"n": 7}
        by_text = {chunk.text: chunk.vector for write in writes for chunk in write.chunks or ()}
        for hit in hits:
            score = score_of(question, by_text[hit.text])
            assert hit.score == pytest.approx(score, rel=1e-3, abs=1e-3)
        assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)

    async def test_a_batch_beyond_one_call_is_written_whole(self, collection: Collection) -> None:
        """H02: calls to the store are bounded by points and by bytes."""
        collection.limits = dataclasses.replace(collection.limits, max_points=7, max_bytes=2000)
        writes = [self.put(f"d{i}", 1, [f"{i}-{j}" for j in range(9)]) for i in range(11)]
        assert {o.kind for o in await collection.write(writes, now_ms=1)} == {"written"}
        assert (await collection.status()).n_chunks == 99
        shorter = [self.put(f"d{i}", 2, [f"{i}-0"]) for i in range(11)]
        assert {o.kind for o in await collection.write(shorter, now_ms=1)} == {"written"}
        assert (await collection.status()).n_chunks == 11

    async def test_a_ledger_beyond_one_page_is_read_whole(self, collection: Collection) -> None:
        writes = [self.put(f"d{i}", 1, [f"t{i}"]) for i in range(1100)]
        await collection.write(writes, now_ms=1)
        await collection.write([delete("d7", 2)], now_ms=2)
        ledger = await entries_of(collection)
        assert len(ledger) == 1100 and ledger["d7"].content_hash == DELETED

    async def test_an_alias_leads_readers_to_the_new_one_and_takes_no_writer(
        self, url: str
    ) -> None:
        first = open_collection(url)
        await first.open(self.identity)
        if not first.has_aliases:
            await first.drop()
            await first.aclose()
            return
        await first.write([self.put("a", 1, ["old"])], now_ms=1)
        alias = f"{url.partition('#')[0]}#a{uuid.uuid4().hex[:12]}"
        second = open_collection(url + "v2")
        for target, text in ((first, "old"), (second, "new")):
            if target is second and self.one_client:
                await first.aclose()
            await target.open(self.identity)
            await target.write([self.put("a", 2, [text])], now_ms=2)
            await target.lead_alias(alias.partition("#")[2])
            if self.one_client:
                await target.aclose()
            reader = open_collection(alias)
            await reader.open_as_is()
            assert {row[2] for row in (await contents(reader)).values()} == {text}
            assert (await reader.status()).n_documents == 1
            await reader.aclose()
            writer = open_collection(alias)
            with pytest.raises(WrongCollection, match="alias"):
                await writer.open(self.identity)
            await writer.aclose()
        for target in (first, second):
            await target.connect()
            await target.drop()
            await target.aclose()

    async def test_writes_into_a_collection_that_was_dropped_are_not_taken_for_stored(
        self, url: str
    ) -> None:
        first = open_collection(url)
        await first.open(self.identity)
        second = first if self.one_client else open_collection(url)
        if second is not first:
            await second.open(self.identity)
        await second.drop()
        if second is not first:
            await second.aclose()
        with pytest.raises(StoreUnavailable):
            await first.write([self.put("a", 1, ["x"])], now_ms=1)
        await first.aclose()

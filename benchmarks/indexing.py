"""Documents a second from a Kafka topic through the whole service into each store, and what a replay costs.

    python -m benchmarks.indexing [--documents 3000] [--minilm 300] [--sinks lance pgvector ...]

Who calls it: a person. Kafka is Apache Kafka where KAFKA_HOME says where it is, else the packaged broker. Stores are
those that run here from a package: LanceDB, Parquet files, Qdrant's client in local mode, PostgreSQL with pgvector,
Redis 8, Chroma, Milvus Lite, OpenSearch where OPENSEARCH_HOME says where it is.
What must stay true: records are in the topic before the clock starts; it runs from the first record handed out
to the last document stored; a replay is the same topic for a new group, and the collection is compared with itself,
all rows and the ledger. Service, broker and store share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks._common import table, write_results
from gpu.batch import ItemOutcome, ItemResult, PackedBatch
from gpu.model_runner import ModelRunner
from pipeline.app import App
from pipeline.bench.workload import WORDS
from pipeline.demo.fetch import ensure_model
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.indexing.sinks.registry import open_collection
from pipeline.lifecycle import StopSignal
from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.server import LocalServer
from pipeline.observe.logs import configure_logging
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import ModelSettings, RouteSettings, Settings
from tests.support import stores

WORDS_OF_A_DOCUMENT = 60
REPEATS = 0.37
"""Share of rows whose text another row has: as in one public corpus."""
STORES: dict[str, Callable[[], LocalServer] | None] = {
    "lance": None,
    "parquet": None,
    "qdrant": None,
    "pgvector": stores.new_postgres,
    "redis-vectors": stores.new_redis8,
    "chroma": stores.new_chroma,
    "milvus": stores.new_milvus,
    "opensearch": stores.new_opensearch,
}
VECTOR = np.full(384, 384**-0.5, dtype=np.float32)


class Tally(PrometheusMetrics):
    """The service's own metrics, and when its first record came and which documents are done."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.began: float | None = None
        self.ended = 0.0

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        super().count(name, value, **labels)
        if name == "source_records_total" and self.began is None:
            self.began = time.perf_counter()
        if name in ("index_documents_total", "index_skipped_total", "items_reused_total"):
            self.counts[labels.get("outcome") or labels.get("reason") or "reused"] += int(value)
            self.ended = time.perf_counter()

    @property
    def done(self) -> int:
        return sum(self.counts[name] for name in ("written", "stale", "refused", "replayed"))

    @property
    def seconds(self) -> float:
        assert self.began is not None
        return self.ended - self.began


def documents(n: int, seed: int, repeats: float = 0.0) -> list[tuple[str, bytes]]:
    """Key and body of `n` documents; that share of them has the text of an earlier one."""
    rng, texts = random.Random(seed), list[str]()
    for _ in range(n):
        fresh = not texts or rng.random() >= repeats
        words = " ".join(rng.choices(WORDS, k=WORDS_OF_A_DOCUMENT))
        texts.append(words if fresh else rng.choice(texts))
    return [(f"d{i}", json.dumps({"text": text}).encode()) for i, text in enumerate(texts)]


async def fill(broker: LocalServer, records: list[tuple[str, bytes]]) -> str:
    """A topic of three partitions that holds them."""
    topic = f"bench.{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 3, 1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=broker.address, linger_ms=5) as producer:
        sent = [await producer.send(topic, body, key=key.encode()) for key, body in records]
        await asyncio.gather(*sent)
    return topic


async def through(broker: LocalServer, topic: str, url: str, model: str, n: int) -> Tally:
    """The topic into the collection, from its beginning."""
    group = f"g{uuid.uuid4().hex[:8]}"
    route = RouteSettings(
        name="docs", source=f"kafka://{broker.address}/{topic}?group={group}", destination=url,
        document=DocumentOptions(text="{text}"), chunk=ChunkOptions(by="tokens"),
    )  # fmt: skip
    tally, stop = Tally(), StopSignal(20.0)
    settings = Settings(models={"m": ModelSettings(path=model)}, routes=(route,))
    running = asyncio.create_task(App(settings, metrics=tally).run(stop))
    while tally.done < n and not running.done():
        await asyncio.sleep(0.02)
    stop.request("measured")
    await running
    if tally.done < n:
        raise SystemExit(f"{url}: the service ended after {tally.done} of {n} documents")
    return tally


async def digest(url: str) -> str:
    """Of everything in a collection: ids, texts, vectors, and the ledger with its times."""
    collection = open_collection(url)
    await collection.open_as_is()
    try:
        rows = [
            f"{row.chunk_id} {row.text} {np.asarray(row.vector, np.float32).tobytes().hex()}"
            async for row in collection.rows()
        ]
        entries = [str(entry) async for entry in collection.entries()]
    finally:
        await collection.aclose()
    return hashlib.sha256("\n".join([*sorted(rows), *sorted(entries)]).encode()).hexdigest()


def no_forward(_: ModelRunner, batch: PackedBatch) -> list[ItemOutcome]:
    """What costs nothing."""
    return [ItemResult(dense=VECTOR)] * batch.n_items


@contextlib.contextmanager
def store(name: str) -> Iterator[str]:
    """An address without a collection, of a store that runs while the block does."""
    start = STORES[name]
    if start is None:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{name}://{folder}/index"
        return
    server = start()
    asyncio.run(server.start())
    try:
        if name == "redis-vectors":
            yield f"redis-vectors://{server.address}"
        else:
            yield server.url  # type: ignore[attr-defined]
    finally:
        server.close()


def measure(broker: LocalServer, base: str, model: str, n: int, quick: bool) -> list[str]:
    """Rate of the first pass, rate of a replay, and what it changed."""
    url = f"{base}#c{uuid.uuid4().hex[:8]}"
    topic = asyncio.run(fill(broker, documents(n, seed=1)))
    with (
        mock.patch.object(ModelRunner, "forward", no_forward) if quick else contextlib.nullcontext()
    ):
        first = asyncio.run(through(broker, topic, url, model, n))
        before = asyncio.run(digest(url))
        again = asyncio.run(through(broker, topic, url, model, n))
    changed = "nothing" if asyncio.run(digest(url)) == before else "SOMETHING"
    skipped = f"{100 * again.counts['replayed'] / n:.0f} %"
    return [f"{n / first.seconds:,.0f}", f"{n / again.seconds:,.0f}", skipped, changed]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--minilm", type=int, default=300)
    parser.add_argument("--sinks", nargs="*", default=list(STORES), choices=list(STORES))
    parser.add_argument("--out", default="indexing")
    arguments = parser.parse_args()
    configure_logging("info", "json", stream=io.StringIO())
    model = str(ensure_model("all-MiniLM-L6-v2"))
    home = os.environ.get("KAFKA_HOME")
    broker: LocalServer = ApacheKafka(home) if home else PackagedKafka()
    asyncio.run(broker.start())
    rows: list[list[str]] = []
    with contextlib.closing(broker):
        for name in arguments.sinks:
            try:
                with store(name) as base:
                    null = measure(broker, base, model, arguments.documents, quick=True)
                    real = measure(broker, base, model, arguments.minilm, quick=False)
            except pytest.skip.Exception as skipped:
                print(f"{name}: {skipped}", file=sys.stderr)
                continue
            rows.append([name, null[0], real[0], null[1], null[2], null[3]])
            assert real[2:] == null[2:], (real, null)
            print(rows[-1], flush=True)
        with store("lance") as base:
            repeated = documents(arguments.minilm, seed=2, repeats=REPEATS)
            topic = asyncio.run(fill(broker, repeated))
            tally = asyncio.run(through(broker, topic, f"{base}#r", model, len(repeated)))
    twins = len(repeated) - len({body for _, body in repeated})
    header = ["store", "no model: documents/s", "MiniLM: documents/s", "replay: documents/s",
              "of a replay skipped", "a replay changed"]  # fmt: skip
    kind = "Apache Kafka" if home else "the packaged broker"
    notes = (
        f"One run each, from a topic of three partitions on {kind}: {arguments.documents:,} documents without a model (the "
        f"tokenizer is MiniLM's, the forward costs nothing), {arguments.minilm:,} with MiniLM, {WORDS_OF_A_DOCUMENT} words "
        "each, one chunk a document. Service, broker and store share the machine's cores."
    )
    repeats = (
        f"Of {len(repeated)} documents {twins} have a text that another one has ({100 * twins / len(repeated):.0f} %): "
        f"{tally.counts['reused']} were not embedded, {n_rate(len(repeated), tally)} documents/s into LanceDB."
    )
    path = write_results(
        arguments.out,
        "Indexing: a topic through the service into a store",
        [notes, table(header, rows), repeats],
        {"rows": rows, "twins": twins, "reused": tally.counts["reused"]},
    )
    print(f"written to {path}")


def n_rate(n: int, tally: Tally) -> str:
    """Documents a second."""
    return f"{n / tally.seconds:,.0f}"


if __name__ == "__main__":
    main()

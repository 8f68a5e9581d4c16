"""What a user would write instead, beside this service: rate, and what a kill -9 costs.

    python -m benchmarks.alternatives rate [NAME ...]     # alone on the machine
    python -m benchmarks.alternatives kill [NAME ...]     # no time is measured: the machine may be busy
    python -m benchmarks.alternatives replicas [NAME ...] # kill -9 of what computes; Ray Serve starts it again

Who calls it: a person. Kafka is Apache Kafka where KAFKA_HOME says where it is, Redis a server of our own.
What must stay true: one broker, one model, the same texts for all in the same run; every worker is up and warm
before the first round, and rounds are interleaved; each is written as its documentation says
(`benchmarks/workers/`); a reply counts when its sender has it. Lost is what has no answer although the worker
was started again and nothing moved for `PATIENCE_S`. Names take part of a run; rows say when theirs was. Ray Serve
takes part where it is installed (`benchmarks/workers/ray_serve.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import psutil

from benchmarks._common import RESULTS, cores, median, table, write_results
from pipeline.demo.corpus import load_corpus
from pipeline.demo.fetch import resolve_model
from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServer

ROOT = Path(__file__).parents[1]
PARTITIONS = 4
PATIENCE_S = 150.0
"""Celery looks for what a dead worker held every 100 s (kombu), whatever its time-out is."""
WARM = 32
RAY = "ray_serve.py"


class Worker(ABC):
    """One contestant: a process, its queue, and the answers that came."""

    def __init__(self, name: str, command: list[str], page: str) -> None:
        self.name, self.command, self.page = name, command, page
        self.queue = f"bench.{uuid.uuid4().hex[:8]}"
        self.seen: Counter[str] = Counter()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, model: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        command = [self.fill(part, model) for part in self.command]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **environment, "BENCH_MODEL": model, "BENCH_ADDRESS": self.address, "BENCH_GROUP": self.queue,
                "BENCH_REQUESTS": self.queue, "BENCH_REPLIES": f"{self.queue}.replies",
                "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            },
        )  # fmt: skip

    def kill(self) -> None:
        """SIGKILL of all its processes, those in sessions of their own too."""
        process, self.process = self.process, None
        if process is not None:
            below = _below(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _sigkill(below)
            process.wait()

    def kill_replicas(self) -> int:
        """SIGKILL of the processes that compute, not of what watches them. Returns how many."""
        assert self.process is not None
        replicas = [p for p in _below(self.process.pid) if "ServeReplica" in " ".join(p.cmdline())]
        _sigkill(replicas)
        return len(replicas)

    def fill(self, part: str, model: str) -> str:
        return (
            part.replace("MODEL", model)
            .replace("QUEUE", self.queue)
            .replace("ADDRESS", self.address)
        )

    @property
    @abstractmethod
    def address(self) -> str: ...

    @abstractmethod
    async def open(self) -> None:
        """Make what has to be there."""

    @abstractmethod
    async def send(self, texts: dict[str, str]) -> None: ...

    @abstractmethod
    async def read(self) -> None:
        """Note what was answered; waits a moment when nothing was."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections."""

    async def until(self, ids: set[str], patience_s: float = 300.0) -> set[str]:
        """Until all are answered, or nothing moves any more; those that are not."""
        moved, known = time.monotonic(), len(self.seen)
        while missing := ids - set(self.seen):
            await self.read()
            if len(self.seen) != known:
                moved, known = time.monotonic(), len(self.seen)
            elif time.monotonic() - moved > patience_s:
                return missing
        return set()


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _sigkill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class OverKafka(Worker):
    """Requests and replies are topics, for every worker alike."""

    server: LocalServer

    @property
    def address(self) -> str:
        return self.server.address

    async def open(self) -> None:
        from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
        from aiokafka.admin import AIOKafkaAdminClient, NewTopic

        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        await admin.start()
        names = (self.queue, f"{self.queue}.replies")
        await admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names])
        await admin.close()
        self._producer = AIOKafkaProducer(bootstrap_servers=self.address, linger_ms=5)
        self._consumer = AIOKafkaConsumer(bootstrap_servers=self.address, fetch_max_wait_ms=20)
        await self._producer.start()
        await self._consumer.start()
        parts = [TopicPartition(names[1], n) for n in range(PARTITIONS)]
        self._consumer.assign(parts)
        await self._consumer.seek_to_beginning(*parts)

    async def send(self, texts: dict[str, str]) -> None:
        sent = [
            await self._producer.send(self.queue, _body(request_id, text), key=request_id.encode())
            for request_id, text in texts.items()
        ]
        await asyncio.gather(*sent)

    async def read(self) -> None:
        for records in (await self._consumer.getmany(timeout_ms=50)).values():
            self.seen.update(record.key.decode() for record in records)

    async def close(self) -> None:
        await self._consumer.stop()
        await self._producer.stop()


class OverStream(Worker):
    """This service over Redis: a stream in, a stream out."""

    server: LocalServer

    @property
    def address(self) -> str:
        return f"redis://{self.server.address}"

    async def open(self) -> None:
        from redis.asyncio import Redis

        self._client: Any = Redis.from_url(self.address, protocol=2)
        self._after = b"0"

    async def send(self, texts: dict[str, str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for request_id, text in texts.items():
            body = _body(request_id, text, reply_to=f"stream:embedstream.out.{self.queue}")
            pipe.xadd(self.queue, {"data": body})
        await pipe.execute()

    async def read(self) -> None:
        out = f"embedstream.out.{self.queue}"
        for _, entries in await self._client.xread({out: self._after}, count=1000, block=50):
            self._after = entries[-1][0]
            self.seen.update(msgpack.unpackb(fields[b"data"])["id"] for _, fields in entries)

    async def close(self) -> None:
        await self._client.aclose()


class OverResults(OverStream):
    """A library's own queue and results: each time one is stored, the server tells us."""

    told: str
    """Pattern of the channels, QUEUE.ID at their ends."""

    async def listen(self) -> None:
        self._heard = self._client.pubsub(ignore_subscribe_messages=True)
        await self._heard.psubscribe(f"{self.told}{self.queue}.*")

    async def read(self) -> None:
        while message := await self._heard.get_message(timeout=0.02):
            if self.counts(message["data"]):
                self.seen[message["channel"].decode().rpartition(f"{self.queue}.")[2]] += 1

    def counts(self, stored: bytes) -> bool:
        return True

    async def close(self) -> None:
        await self._heard.aclose()
        await super().close()


class OverArq(OverResults):
    """arq says nothing when it stores a result; the server's keyspace events do."""

    told = "__keyspace@0__:arq:result:"

    async def open(self) -> None:
        from arq import create_pool
        from arq.connections import RedisSettings

        self._client = await create_pool(
            RedisSettings.from_dsn(self.address), default_queue_name=self.queue
        )
        await self._client.config_set("notify-keyspace-events", "K$")
        await self.listen()

    async def send(self, texts: dict[str, str]) -> None:
        for request_id, text in texts.items():
            await self._client.enqueue_job("embed", text, _job_id=f"{self.queue}.{request_id}")


class OverCelery(OverResults):
    """Celery's result backend publishes what it stores, the first success of a task; a retry or a failure is no answer."""

    told = "celery-task-meta-"

    async def open(self) -> None:
        from celery import Celery
        from redis.asyncio import Redis

        self._app = Celery("bench", broker=self.address, backend=self.address)
        self._app.conf.task_default_queue = self.queue
        self._client = Redis.from_url(self.address)
        await self.listen()

    async def send(self, texts: dict[str, str]) -> None:
        def all_of_them() -> None:
            with self._app.connection_or_acquire() as connection:
                for request_id, text in texts.items():
                    self._app.send_task(
                        "embed", (text,), task_id=f"{self.queue}.{request_id}",
                        connection=connection, queue=self.queue,
                    )  # fmt: skip

        await asyncio.to_thread(all_of_them)

    def counts(self, stored: bytes) -> bool:
        return bool(json.loads(stored)["status"] == "SUCCESS")


def _body(request_id: str, text: str, **more: str) -> bytes:
    body: bytes = msgpack.packb({"id": request_id, "input": [text], **more})
    return body


def workers() -> list[Worker]:
    """Every contestant, ours beside them."""
    python = [sys.executable, "-m"]
    ours = [*python, "pipeline", "serve", "--model", "MODEL", "--health-port", "0", "--set",
            "batching.result_cache_bytes=0", "--source"]  # fmt: skip
    loops = [*python, "benchmarks.workers.aiokafka_loops"]
    stream = [*python, "benchmarks.workers.faststream_app"]
    consumer = [*python, "benchmarks.workers.ray_serve"]
    return [
        OverKafka(
            "embedstream, Kafka",
            [*ours, "kafka://ADDRESS/QUEUE?group=QUEUE&reply_topic=QUEUE.replies"],
            "README.md",
        ),
        OverKafka("aiokafka, encode a record", [*loops, "record"], "aiokafka_loops.py"),
        OverKafka("aiokafka, encode a poll", [*loops, "poll"], "aiokafka_loops.py"),
        OverKafka("FastStream, a record", [*stream, "record"], "faststream_app.py"),
        OverKafka("FastStream, a batch", [*stream, "batch"], "faststream_app.py"),
        OverStream(
            "embedstream, Redis", [*ours, "ADDRESS/QUEUE?group=QUEUE&claim_idle_ms=5000"], "README.md"
        ),
        OverArq(
            "arq", [*python, "arq", "benchmarks.workers.arq_worker.WorkerSettings"], "arq_worker.py"
        ),
        OverCelery(
            "Celery",
            [*python, "celery", "-A", "benchmarks.workers.celery_app", "worker", "-c", str(cores()), "-l", "ERROR"],
            "celery_app.py",
        ),
        OverCelery("Ray Serve, a task", [*consumer, "task"], RAY),
        OverCelery("Ray Serve, a batch behind", [*consumer, "batch"], RAY),
    ]  # fmt: skip


async def rate(
    plans: list[Worker], model: str, texts: list[str], rounds: int
) -> dict[str, list[float]]:
    """Texts/s of each round: from the first send to the last answer."""
    for worker in plans:
        worker.start(model)
    for worker in plans:
        await worker.open()
        await _warm(worker)
    per_round = len(texts) // rounds
    rates: dict[str, list[float]] = {worker.name: [] for worker in plans}
    for number in range(rounds):
        part = texts[number * per_round : (number + 1) * per_round]
        for worker in plans if number % 2 else plans[::-1]:
            ids = {f"{number}.{i}": text for i, text in enumerate(part)}
            started = time.perf_counter()
            await worker.send(ids)
            missing = await worker.until(set(ids))
            assert not missing, (worker.name, len(missing))
            rates[worker.name].append(len(ids) / (time.perf_counter() - started))
            print(
                f"round {number + 1}  {worker.name}: {rates[worker.name][-1]:.1f} texts/s",
                flush=True,
            )
    return rates


async def _warm(worker: Worker) -> None:
    ids = {f"warm.{i}": f"text {i}" for i in range(WARM)}
    await worker.send(ids)
    missing = await worker.until(set(ids), patience_s=120.0)
    assert not missing, f"{worker.name} does not answer"


async def killed(
    worker: Worker, model: str, texts: list[str], replicas: bool = False
) -> dict[str, Any]:
    """SIGKILL once a third is answered, a new start at once; what became of each.

    replicas: of what computes only, and no start: what watches it has to.
    """
    worker.start(model)
    await worker.open()
    await _warm(worker)
    worker.seen.clear()
    ids = {f"k.{i}": text for i, text in enumerate(texts)}
    await worker.send(ids)
    while len(worker.seen) < len(ids) // 3:
        await worker.read()
    at = time.monotonic()
    if replicas:
        assert worker.kill_replicas(), f"no replicas of {worker.name}"
    else:
        worker.kill()
        worker.start(model)
    before = len(worker.seen)
    missing = await worker.until(set(ids), PATIENCE_S)
    whole_s = time.monotonic() - at
    until = time.monotonic() + 3.0  # late twins
    while time.monotonic() < until:
        await worker.read()
    return {
        "sent": len(ids), "before": before, "lost": len(missing), "whole_s": whole_s,
        "twice": sum(worker.seen.values()) - len(worker.seen),
    }  # fmt: skip


async def _run(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # workers end too
    wanted = [w for w in workers() if not arguments.names or w.name in arguments.names]
    if arguments.part == "replicas":
        wanted = [w for w in wanted if w.page == RAY]
    if importlib.util.find_spec("ray") is None:
        print(f"Ray is not installed: see benchmarks/workers/{RAY}", flush=True)
        wanted = [w for w in wanted if w.page != RAY]
    if not wanted:
        raise SystemExit("no such worker")
    home = os.environ.get("KAFKA_HOME")
    kafka: LocalServer = ApacheKafka(home) if home else PackagedKafka()
    redis = RedisServer()
    await asyncio.gather(kafka.start(), redis.start())
    model = str(resolve_model("all-MiniLM-L6-v2"))
    long = [f"{d.title}\n{d.text}" for d in load_corpus(4000).documents]
    texts = [text for text in long if 30 <= len(text.split()) <= 100]
    run = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    for worker in wanted:
        worker.server = kafka if isinstance(worker, OverKafka) else redis  # type: ignore[attr-defined]
    try:
        if arguments.part == "rate":
            rates = await rate(wanted, model, texts[: arguments.texts], arguments.rounds)
            for name, found in rates.items():
                data.setdefault("rate", {})[name] = {"run": run, "texts_s": found}
            data["broker"] = kafka.kind
        else:
            for worker in wanted:
                try:
                    fate = await killed(
                        worker, model, texts[: arguments.texts], arguments.part == "replicas"
                    )
                finally:
                    worker.kill()
                data.setdefault(arguments.part, {})[worker.name] = {"run": run, **fate}
                print(worker.name, fate, flush=True)
    finally:
        for worker in wanted:
            worker.kill()
            if worker.seen:
                await worker.close()
        await asyncio.gather(kafka.stop(), redis.stop())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=["rate", "kill", "replicas"])
    parser.add_argument("names", nargs="*", help="of the contestants; default: all")
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="alternatives")
    arguments = parser.parse_args()
    kept = RESULTS / f"{arguments.out}.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data.pop("machine", None)
    asyncio.run(_run(arguments, data))
    title = "What a user would write instead: all-MiniLM-L6-v2 over Kafka and Redis"
    print(f"written to {write_results(arguments.out, title, _told(data), data)}")


def _told(data: dict[str, Any]) -> list[str]:
    return [
        "texts/s: dictionary entries of 30 to 100 words, one a request, sent at once and timed to the last answer; "
        "workers up and warm, rounds interleaved, medians. Rates compare within a run: its time stands beside each. "
        "Then, in another run, kill -9 of the worker with all its "
        "processes once a third is answered, and a new start: requests without an answer when nothing moved for "
        f"{PATIENCE_S:.0f} s, answers beyond the first of a request (Celery's backend, which Ray Serve uses too, keeps the first: what it computed again is not seen), seconds from "
        "the kill to the last answer (the start of Python and the load of the model included; time-outs that the "
        "files name are shortened to seconds).",
        _rows(data, "kill"),
        "Ray Serve watches its replicas: kill -9 of these alone (every process named `ServeReplica`), nothing started by hand.",
        _rows(data, "replicas"),
    ]


def _rows(data: dict[str, Any], part: str) -> str:
    rows = []
    for worker in workers():
        rates, fate = data.get("rate", {}).get(worker.name), data.get(part, {}).get(worker.name)
        if part == "replicas" and fate is None:
            continue
        rows.append(
            [
                worker.name,
                *([f"{median(rates['texts_s']):.1f}", rates["run"]] if rates else ["-"] * 2),
                *(
                    [fate["sent"], fate["lost"], fate["twice"], f"{fate['whole_s']:.0f}", fate["run"]]
                    if fate
                    else ["-"] * 5
                ),
                f"`{worker.page}`" if worker.page == "README.md" else f"`benchmarks/workers/{worker.page}`",
            ]
        )  # fmt: skip
    return table(
        ["worker", "texts/s", "run of the rate", "sent", "lost", "answered twice", "whole after s", "run of the kill", "written as"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()

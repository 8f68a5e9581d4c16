"""Two ways to a service for the demo: over real brokers in the background, or inside this process.

Who calls it: `pipeline.demo.run`.
What must stay true: both doors carry the same wire records, so that everything the demo checks is
checked through either; the background service stops with us, whatever ends us; when it does not
start, its own words are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from pipeline.demo.catalog import EMBEDDER, demo_models
from pipeline.demo.clients import KafkaIndexer, RedisAsker
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.local.up import Addresses, read_ready_file
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.oneoff import InprocService, run_inproc
from pipeline.settings.load import Settings

START_TIMEOUT_S = 180.0
"""From the start of the command to ready: brokers, and loading two models on a slow disk."""
STOP_TIMEOUT_S = 40.0
_POLL_S = 0.05
_CONCURRENT = 16


class Door(Protocol):
    """What the demo needs of a service."""

    facts: list[str]
    """Lines for the screen: what runs where."""
    max_batch_tokens: int
    """Token budget of a batch of the embedding model."""

    async def exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        on_reply: Callable[[str, bytes], bool],
        *,
        patience_s: float,
    ) -> None:
        """Send every request; hand over every reply until `on_reply` returns true."""
        ...

    async def ask(self, request_id: str, record: bytes, *, timeout_s: float) -> bytes:
        """One request, its reply."""
        ...

    async def metrics_text(self) -> str:
        """The service's metrics in the Prometheus text format."""
        ...


class BrokerDoor:
    """The service behind its Kafka topic and its Redis stream."""

    def __init__(self, addresses: Addresses, indexer: KafkaIndexer, asker: RedisAsker) -> None:
        self._health = addresses.health
        self._indexer = indexer
        self.ask = asker.ask
        self.exchange = indexer.exchange
        self.max_batch_tokens = addresses.max_batch_tokens.get(EMBEDDER, 0)
        self.facts = [
            f"Kafka   {addresses.kafka} ({addresses.kafka_kind}), topic {addresses.request_topic} "
            f"-> {addresses.reply_topic}",
            f"Redis   {addresses.redis} ({addresses.redis_kind}), stream {addresses.request_stream}",
            f"service pid {addresses.pid}, {addresses.health}",
        ]

    async def metrics_text(self) -> str:
        return await asyncio.to_thread(_get, f"{self._health}/metrics")


class InprocDoor:
    """The same service inside this process."""

    def __init__(self, service: InprocService, metrics: PrometheusMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self.max_batch_tokens = service.app.models[EMBEDDER].max_batch_tokens
        self.facts = ["no broker: everything runs inside this process"]

    async def exchange(
        self,
        requests: Sequence[tuple[str, bytes]],
        on_reply: Callable[[str, bytes], bool],
        *,
        patience_s: float,
    ) -> None:
        waiting = iter(requests)

        async def send_some() -> None:
            for request_id, record in waiting:
                async with asyncio.timeout(patience_s):
                    for reply in await self._service.request(record):
                        on_reply(request_id, reply.body)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_CONCURRENT):
                    group.create_task(send_some())
        except* TimeoutError:
            timed_out = True
        else:
            timed_out = False
        if timed_out:
            raise OperatorError(f"no reply for {patience_s:.0f} s")

    async def ask(self, request_id: str, record: bytes, *, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            replies = await self._service.request(record)
        if len(replies) != 1:
            raise OperatorError(f"{request_id} got {len(replies)} replies, expected one")
        return replies[0].body

    async def metrics_text(self) -> str:
        return self._metrics.exposition().decode()


@asynccontextmanager
async def inproc_door(settings: Settings | None = None) -> AsyncIterator[Door]:
    """A service in this process, running while the block runs."""
    metrics = PrometheusMetrics()
    async with run_inproc(with_demo_models(settings or Settings()), metrics=metrics) as service:
        yield InprocDoor(service, metrics)


def with_demo_models(settings: Settings) -> Settings:
    """The demo's questions need exactly its two models, whatever else is configured."""
    import msgspec

    return msgspec.structs.replace(settings, models=demo_models())


@asynccontextmanager
async def broker_door(command: Sequence[str] = ()) -> AsyncIterator[Door]:
    """`embedstream up` in the background and clients connected to its brokers.

    Args:
        command: how to start it; the ready file and `--stop-with-parent` are appended.

    Raises:
        OperatorError: it does not start, or did not stop in order; its own words are in the message.
    """
    start = list(command) or [sys.executable, "-m", "pipeline", "up"]
    with tempfile.TemporaryDirectory(prefix="embedstream-demo-") as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "up.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *start,
                *("--ready-file", str(ready), "--stop-with-parent"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C reaches us alone: we close our clients first, then tell it to stop.
                start_new_session=True,
            )
        try:
            addresses = await _wait_ready(process, ready, log)
            async with _clients(addresses) as door:
                yield door
        except BaseException:
            await _stop(process)
            raise
        status = await _stop(process)
        if status != ExitStatus.OK:
            raise OperatorError(f"the service ended with status {status}: {_tail(log)}")


async def _wait_ready(process: asyncio.subprocess.Process, ready: Path, log: Path) -> Addresses:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not ready.exists():  # noqa: ASYNC240 - a file has no event
                if process.returncode is not None:
                    raise OperatorError(f"`embedstream up` did not start: {_tail(log)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise OperatorError(
            f"`embedstream up` was not ready within {START_TIMEOUT_S:.0f} s: {_tail(log)}"
        ) from None
    return read_ready_file(ready)


@asynccontextmanager
async def _clients(addresses: Addresses) -> AsyncIterator[Door]:
    indexer = KafkaIndexer(
        addresses.kafka,
        request_topic=addresses.request_topic,
        reply_topic=addresses.reply_topic,
    )
    asker = RedisAsker(addresses.redis, stream=addresses.request_stream)
    try:
        await indexer.open()
        yield BrokerDoor(addresses, indexer, asker)
    finally:
        await indexer.aclose()
        await asker.aclose()


async def _stop(process: asyncio.subprocess.Process) -> int:
    """SIGTERM and wait for the drain; a service that does not end is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-3:])[-600:] or "it said nothing"


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own http address
        text: str = answer.read().decode()
        return text

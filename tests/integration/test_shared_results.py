"""Results in Redis: two services share what either computed; a bad Redis changes no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from pipeline.local.redis import RedisServer
from pipeline.settings.load import BatchingSettings, Settings
from pipeline.transports.redis.results import KEY_PREFIX
from tests.integration.test_service import ask, service, vectors
from tests.support.fakes import FakeRunner, RecordingMetrics, fake_ids, fake_vector

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]
TEXTS = ["a" * (i + 1) + " shared" for i in range(100)]  # no two have the same ids
BULK = {"id": "b", "input": TEXTS, "priority": "bulk"}


class Outcomes(RecordingMetrics):
    """Counts `result_cache_total` by its outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, int] = {}

    def count(self, name: str, value: float = 1.0, **labels: str) -> None:
        super().count(name, value, **labels)
        if name == "result_cache_total":
            outcome = labels["outcome"]
            self.results[outcome] = self.results.get(outcome, 0) + int(value)


@asynccontextmanager
async def own_redis(*arguments: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(arguments=arguments)
    await server.start()
    try:
        yield server
    finally:
        server.close()


def settings(url: str, memory: int = 0) -> Settings:
    """No memory, so that every result comes from Redis or the model."""
    return Settings(batching=BatchingSettings(result_cache_bytes=memory, result_cache_url=url))


def computed(runner: FakeRunner) -> int:
    return sum(len(batch.items) for batch in runner.batches)


def check(reply: Any) -> None:
    for text, vector in zip(TEXTS, vectors(reply), strict=True):
        np.testing.assert_array_equal(vector, fake_vector(fake_ids(text)))


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def filled(url: str) -> int:
    """A service computes all texts and stores them; returns how many results there are."""
    metrics = Outcomes()
    runner = FakeRunner()
    async with service(runner, settings=settings(url), metrics=metrics) as running:
        check(await ask(running, BULK))
        await until(lambda: metrics.results.get("stored", 0) >= computed(runner))
    return computed(runner)


async def test_what_one_service_computed_another_one_does_not() -> None:
    """Bulk items alone are asked for, a list at a time; keys are hashes, and everything goes in time."""
    async with own_redis() as server:
        n = await filled(server.url)
        client = _client(server)
        keys = await client.keys("*")
        assert len(keys) == n
        assert all(k.startswith(KEY_PREFIX) and len(k) == len(KEY_PREFIX) + 40 for k in keys)
        assert b"shared" not in b"".join(keys) + b"".join(await client.mget(keys))
        assert 0 < await client.ttl(keys[0]) <= 7 * 24 * 3600
        metrics, runner = Outcomes(), FakeRunner()
        async with service(runner, settings=settings(server.url), metrics=metrics) as running:
            check(await ask(running, BULK))
            assert computed(runner) == 0 and metrics.results == {"hit": 100}
            check(await ask(running, {**BULK, "id": "i", "priority": "interactive"}))
            assert computed(runner) > 0 and metrics.results["hit"] == 100
        await client.aclose()


async def test_a_hit_is_held_in_memory_too() -> None:
    async with own_redis() as server:
        await filled(server.url)
        metrics, runner = Outcomes(), FakeRunner()
        memory = settings(server.url, memory=1 << 20)
        async with service(runner, settings=memory, metrics=metrics) as running:
            check(await ask(running, BULK))
            check(await ask(running, {**BULK, "id": "again"}))
            assert computed(runner) == 0 and metrics.results["hit"] <= 100


async def test_other_files_share_nothing() -> None:
    async with own_redis() as server:
        await filled(server.url)
        metrics, runner = Outcomes(), FakeRunner()
        runner.info = _other(runner.info)
        async with service(runner, settings=settings(server.url), metrics=metrics) as running:
            check(await ask(running, BULK))
            assert computed(runner) > 0 and "hit" not in metrics.results


async def test_values_that_somebody_changed_are_computed_anew_and_written_over() -> None:
    async with own_redis() as server:
        n = await filled(server.url)
        client = _client(server)
        keys = sorted(await client.keys("*"))
        values = await client.mget(keys)
        for i, key in enumerate(keys):
            value = values[(i + 1) % n] if i % 3 == 0 else values[i][:-1] if i % 3 == 1 else b"junk"
            await client.set(key, value)
        metrics, runner = Outcomes(), FakeRunner()
        async with service(runner, settings=settings(server.url), metrics=metrics) as running:
            check(await ask(running, BULK))
            assert computed(runner) == n and "hit" not in metrics.results
            assert metrics.results["refused"] > 0
            await until(lambda: metrics.results.get("stored", 0) >= n)
        assert await client.mget(keys) == values
        await client.aclose()


@pytest.mark.parametrize(
    "trouble", ["down", "silent", "full", "no vectors there", "wrong password"]
)
async def test_a_redis_that_is_of_no_use_is_done_without_and_told_once(trouble: str) -> None:
    """Every answer is right; the log has one line for reading and one for writing at most."""
    metrics = Outcomes()
    async with _trouble(trouble) as url:
        with capture_logs() as logs:
            async with service(settings=settings(url), metrics=metrics) as running:
                for i in range(3):
                    check(await ask(running, {**BULK, "id": f"b{i}"}))
        told = [entry for entry in logs if entry["event"] == "result_cache_unavailable"]
    whats = [entry["what"] for entry in told]
    assert len(whats) == len(set(whats)), whats
    assert "hit" not in metrics.results and "stored" not in metrics.results
    if trouble != "full":
        assert "reading" in whats and metrics.results["skipped"] > 0


async def test_a_redis_that_dies_and_comes_back_is_used_again() -> None:
    async with own_redis() as server:
        metrics = Outcomes()
        async with service(settings=settings(server.url), metrics=metrics) as running:
            check(await ask(running, BULK))
            await until(lambda: metrics.results.get("stored", 0) >= 1)
            server.kill()
            check(await ask(running, {**BULK, "id": "down"}))
            assert metrics.results["skipped"] > 0
            await server.start()
            before, n = dict(metrics.results), 0
            async with asyncio.timeout(30):
                while metrics.results.get("hit", 0) == before.get("hit", 0):
                    n += 1
                    check(await ask(running, {**BULK, "id": f"up{n}"}))
                    await asyncio.sleep(0.05)


async def test_answers_that_come_too_late_are_nobody_elses() -> None:
    """The server stands still for longer than anybody waits: what it says then is not read as an answer
    to the next question."""
    async with own_redis() as server:
        await filled(server.url)
        client, metrics = _client(server), Outcomes()
        async with service(settings=settings(server.url), metrics=metrics) as running:
            await client.execute_command("CLIENT", "PAUSE", "400", "ALL")
            check(await ask(running, BULK))
            assert metrics.results["skipped"] > 0
            n = 0
            async with asyncio.timeout(30):
                while not metrics.results.get("hit"):
                    n += 1
                    turned = {**BULK, "id": f"t{n}", "input": TEXTS[::-1]}
                    for text, vector in zip(
                        TEXTS[::-1], vectors(await ask(running, turned)), strict=True
                    ):
                        np.testing.assert_array_equal(vector, fake_vector(fake_ids(text)))
                    await asyncio.sleep(0.05)
        assert "refused" not in metrics.results
        await client.aclose()


@asynccontextmanager
async def _trouble(kind: str) -> AsyncIterator[str]:
    if kind == "silent":
        held: list[Any] = []
        silent = await asyncio.start_server(lambda r, w: held.append(w), "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        finally:
            silent.close()
            for writer in held:
                writer.close()
        return
    limits = ("--maxmemory", "100kb", "--maxmemory-policy", "noeviction") if kind == "full" else ()
    login = ("--requirepass", "right") if kind == "wrong password" else ()
    async with own_redis(*limits, *login) as server:
        if kind == "down":
            server.kill()
        if kind == "no vectors there":
            # A proxy or another service of that name: it answers, and not as Redis does.
            odd = await asyncio.start_server(_nonsense, "127.0.0.1", 0)
            try:
                yield f"redis://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
            finally:
                odd.close()
            return
        yield server.url.replace("redis://", "redis://:wrong@") if login else server.url


async def _nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


def _client(server: RedisServer) -> Any:
    from redis.asyncio import Redis

    return Redis(host=server.host, port=server.port)


def _other(info: Any) -> Any:
    import dataclasses

    return dataclasses.replace(info, fingerprint="sha256:other")

"""What must not depend on history: numbers, memory, threads. Real (tiny) models in process."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gpu.batch import PackedBatch
from pipeline.oneoff import InprocService, run_inproc
from pipeline.settings.load import ExecutorSettings, HealthSettings, ModelSettings, Settings
from schemas.codec import decode_reply
from schemas.results import Reply
from tests.support.fakes import FakeRunner, fake_ids
from tests.support.models import write_model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    root = tmp_path_factory.mktemp("models")
    return Settings(
        models={
            "embed": ModelSettings(path=str(write_model(root / "embed")), default_for=("embed",)),
            "last": ModelSettings(
                path=str(write_model(root / "last", "qwen3", pooling="lasttoken"))
            ),
            "rank": ModelSettings(
                path=str(write_model(root / "rank", labels=1)), default_for=("rerank",)
            ),
        },
        health=HealthSettings(port=0),
    )


async def ask(service: InprocService, **record: Any) -> Reply:
    (reply,) = await service.request(msgpack.packb(record))
    decoded = decode_reply(reply.body, reply.headers)
    assert isinstance(decoded, Reply), decoded
    return decoded


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("model", ["embed", "last"])
async def test_the_second_identical_request_has_the_same_bytes(
    settings: Settings, model: str
) -> None:
    """A22: same text again, and a text that shares a long prefix with an earlier one."""
    prefix = "river mountain vector " * 8
    async with run_inproc(settings) as service:
        first = await ask(service, id="a", input=prefix + "red", model=model)
        other = await ask(service, id="b", input=prefix + "blue", model=model)
        again = await ask(service, id="c", input=prefix + "red", model=model)
        mixed = await ask(service, id="d", input=[prefix + "blue", prefix + "red"], model=model)
    assert first.items[0].embedding == again.items[0].embedding == mixed.items[1].embedding
    assert other.items[0].embedding == mixed.items[0].embedding
    assert first.items[0].embedding != other.items[0].embedding


async def test_a_non_finite_vector_is_never_remembered() -> None:
    """A24: the first forward gives NaN, later ones are good: the second answer is good."""
    runner = FakeRunner(nan_id=fake_ids("word")[0])

    def recover(batch: PackedBatch) -> None:
        if len(runner.batches) > 1:
            runner.nan_id = None

    runner.before_forward = recover
    async with run_inproc(Settings(), runner_factories={"fake": lambda: runner}) as service:
        bad = await ask(service, id="a", input="word")
        good = await ask(service, id="a", input="word")
    assert bad.items[0].error is not None and bad.items[0].error.code == "non_finite"
    assert good.items[0].error is None and good.items[0].embedding is not None


@pytest.mark.slow
async def test_memory_does_not_grow_with_requests(settings: Settings) -> None:
    """C05: rerank after rerank, 50 short pairs each: RSS after warm-up grows by less than 50 MB."""
    documents = [f"small document {i}" for i in range(50)]
    async with run_inproc(settings) as service:

        async def many(n: int) -> None:
            for start in range(0, n, 10):
                await asyncio.gather(
                    *(
                        ask(service, id=f"r{start + i}", query="red river", documents=documents)
                        for i in range(10)
                    )
                )

        await many(100)
        before = rss_bytes()
        await many(300)
        grown = rss_bytes() - before
    assert grown < 50 * 1024 * 1024, f"grew by {grown / 2**20:.1f} MB"


async def test_threads_are_what_the_settings_say(settings: Settings) -> None:
    """C07: executor threads as configured, one intra-op thread each; no pool is born per query."""
    import msgspec
    import torch

    two = msgspec.structs.replace(settings, executor=ExecutorSettings(cpu_workers=2))
    seen: list[int] = []
    async with run_inproc(two) as service:
        executor = service.app.graph.models.executor
        assert executor is not None and executor.width == 2
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("executor-") for name in names) == 2
        runner = executor._runners["embed"]
        real = runner.forward

        def forward(batch: PackedBatch) -> Any:
            seen.append(torch.get_num_threads())
            return real(batch)

        runner.forward = forward  # type: ignore[method-assign]
        await ask(service, id="warm", input="hello")
        before = len(os.listdir("/proc/self/task"))
        for i in range(30):
            await ask(service, id=f"q{i}", input="hello")
        after = len(os.listdir("/proc/self/task"))
    assert set(seen) == {1} and after <= before

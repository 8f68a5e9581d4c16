"""Several processes under one parent: started, kept alive, told apart, ended. Stand-ins, real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gpu.device.cores import usable_cores
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal
from pipeline.local.server import free_port
from pipeline.processes import parent as parent_module
from pipeline.processes.member import packed
from pipeline.processes.parent import Parent
from pipeline.processes.shares import shares
from pipeline.settings.load import HealthSettings, LifecycleSettings, ModelSettings, Settings, load
from pipeline.settings.records import ExecutorSettings

ROOT = Path(__file__).parents[4]
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(len(usable_cores()) < 2, reason="two processes need two cores"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_module, "LOOK_S", 0.05)
    monkeypatch.setattr(parent_module, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(parent_module, "_LONGEST_WAIT_S", 0.1)
    monkeypatch.chdir(ROOT)


class Whole:
    """A parent of two stand-ins, running."""

    def __init__(self, folder: Path, *plans: str, drain_budget_s: float = 20.0) -> None:
        for number, plan in enumerate(plans, 1):
            (folder / f"plan.{number}").write_text(plan)
        self.folder = folder
        self.port = free_port()
        settings = Settings(
            models={"secret": ModelSettings(path="/none")},
            lifecycle=LifecycleSettings(drain_budget_s=drain_budget_s),
            health=HealthSettings(port=self.port),
            executor=ExecutorSettings(processes=len(plans)),
        )
        self.stop = StopSignal(drain_budget_s)
        command = [sys.executable, "-m", "tests.support.member_main", str(folder)]
        self.parent = Parent(settings, command)
        self.status: ExitStatus | None = None

    async def run(self) -> None:
        self.status = await self.parent.run(self.stop)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(100):
            while not condition():
                await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        await self.until(lambda: self.parent.readiness().ready)

    def lives(self, number: int) -> list[str]:
        path = self.folder / f"lives.{number}"
        return path.read_text().splitlines() if path.exists() else []

    async def get(self, path: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self.port}{path}")


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@asynccontextmanager
async def running(whole: Whole) -> AsyncIterator[Whole]:
    async with asyncio.TaskGroup() as group:
        group.create_task(whole.run())
        try:
            yield whole
        finally:
            whole.stop.request("test over")


def alive(line: str) -> bool:
    """Whether the process of a life still runs."""
    try:
        state = Path(f"/proc/{line.split()[0]}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_each_has_its_cores_and_one_port_speaks_for_all(tmp_path: Path) -> None:
    async with running(Whole(tmp_path, "serve", "serve")) as whole:
        await whole.until_ready()
        assert (await whole.get("/ready"))[0] == 200
        assert (await whole.get("/live"))[0] == 200
        metrics = (await whole.get("/metrics"))[1].decode()
        shown = json.loads((await whole.get("/statistics"))[1])
    assert 'a{process="1"} 1\n' in metrics and 'a{process="2"} 1\n' in metrics
    assert metrics.count("# HELP a b\n") == 1
    assert 'embedstream_process_up{process="2"} 1.0' in metrics
    assert shown["processes"]["2"]["statistics"] == {"in_flight": 3}
    cores = [shown["processes"][n]["cores"] for n in ("1", "2")]
    assert sorted(cores[0] + cores[1]) == sorted(usable_cores())
    assert str(tuple(cores[0])) in whole.lives(1)[0]
    assert whole.lives(1)[0].endswith(f" {len(cores[0])}")  # its threads are its cores
    assert whole.status == ExitStatus.OK


async def test_one_that_dies_is_started_again_and_the_port_tells(tmp_path: Path) -> None:
    async with running(Whole(tmp_path, "serve", f"ready:{-signal.SIGKILL} serve")) as whole:
        await whole.until_ready()
        (tmp_path / "go").touch()
        await whole.until(lambda: not whole.parent.readiness().ready)
        status, body = await whole.get("/ready")
        if status == 503:  # else it is back already
            assert json.loads(body)["reasons"][0].startswith("process 2: ")
        await whole.until(lambda: len(whole.lives(2)) == 2)
        await whole.until_ready()
        restarts = 'embedstream_process_restarts_total{process="2"} 1.0'
        assert restarts in (await whole.get("/metrics"))[1].decode()
        assert len(whole.lives(1)) == 1
    assert whole.status == ExitStatus.OK


@pytest.mark.parametrize("status", [1, 2, 4])
async def test_what_is_wrong_at_the_start_is_the_status_and_is_said_once(
    status: int, tmp_path: Path
) -> None:
    """The others are not started while the first is not ready."""
    whole = Whole(tmp_path, str(status), "serve")
    await whole.run()
    assert whole.status == status
    assert len(whole.lives(1)) == 1 and not whole.lives(2)


async def test_processes_that_never_become_ready_again_end_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "GIVE_UP_AFTER", 2)
    async with running(Whole(tmp_path, "ready:4 1", "4")) as whole:
        await whole.until(lambda: len(whole.lives(2)) >= 1)
        (tmp_path / "go").touch()
        await whole.until(lambda: whole.status is not None)
    assert whole.status in (ExitStatus.ERROR, ExitStatus.FATAL)
    assert len(whole.lives(1)) >= 3 and len(whole.lives(2)) >= 2


async def test_one_that_fails_for_ever_does_not_end_those_that_serve(tmp_path: Path) -> None:
    async with running(Whole(tmp_path, "serve", "1")) as whole:
        await whole.until(lambda: len(whole.lives(2)) >= parent_module.GIVE_UP_AFTER + 2)
        assert whole.status is None and whole.parent.readiness().phase == "incomplete"
        assert alive(whole.lives(1)[0])
    assert whole.status == ExitStatus.OK


async def test_one_that_hangs_is_told_by_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G04: the platform restarts what only looks alive."""
    monkeypatch.setattr(parent_module, "HUNG_S", 0.5)
    monkeypatch.setattr(parent_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(parent_module, "BEYOND_BUDGET_S", 0.1)
    async with running(Whole(tmp_path, "serve", "hang", drain_budget_s=0.5)) as whole:
        await whole.until_ready()
        (tmp_path / "go").touch()
        await whole.until(lambda: whole.parent.hung() is not None)
        assert await whole.get("/live") == (503, b"process 2 does not answer\n")
    assert whole.status == ExitStatus.DRAIN_EXCEEDED, "it was killed, and its work comes again"
    assert not alive(whole.lives(2)[0])


async def test_a_second_signal_reaches_them_too(tmp_path: Path) -> None:
    """G01."""
    async with running(Whole(tmp_path, "serve", "deaf")) as whole:
        await whole.until_ready()
        whole.stop.request("first", signum=signal.SIGTERM)
        whole.stop.request("second", signum=signal.SIGINT)
    assert whole.status == ExitStatus.FORCED_INT
    assert not any(alive(line) for number in (1, 2) for line in whole.lives(number))


def test_more_processes_or_threads_than_cores_are_refused_by_name() -> None:
    def divided(cores: int, **executor: object) -> list[tuple[int, ...]]:
        return shares(Settings(executor=ExecutorSettings(**executor)), range(cores))  # type: ignore[arg-type]

    assert divided(5, processes=2) == [(0, 1), (2, 3, 4)]
    assert divided(4, processes=2, cpu_workers=2) == [(0, 1), (2, 3)]
    assert divided(4, cpu_workers=9) == [(0, 1, 2, 3)]
    with pytest.raises(OperatorError, match=r"executor\.processes \(3\).* 2 cores") as refused:
        divided(2, processes=3)
    assert refused.value.exit_status == ExitStatus.USAGE
    with pytest.raises(OperatorError, match=r"executor\.cpu_workers \(3\).* executor\.processes"):
        divided(4, processes=2, cpu_workers=3)


def test_only_a_parent_can_start_a_member() -> None:
    """G07: one line, status 2, no traceback."""
    place = '{"number":1,"of":2,"cores":[],"health":0}'
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline", "serve", "--member", place],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ},
    )  # fmt: skip
    assert ended.returncode == ExitStatus.USAGE, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("embedstream: --member is for processes")


def test_settings_reach_a_member_as_they_are(tmp_path: Path) -> None:
    """Also tables, tuples, secrets and where each value came from."""
    file = tmp_path / "service.toml"
    file.write_text(
        '[models.m]\npath = "x"\nprompts = { query = "q: " }\nmatryoshka_dimensions = [64, 128]\n'
        'default_for = ["embed"]\n[[routes]]\nname = "r"\nlimits = { max_items = 9 }\n'
        'source = "redis://:hunter2@localhost/in?reply_prefixes=a.,b."\n'
    )
    settings = load({"executor.processes": 2}, {}, file)
    body = packed(settings)
    assert int.from_bytes(body[:8], "big") == len(body) - 8
    assert msgspec.msgpack.decode(body[8:], type=Settings) == settings

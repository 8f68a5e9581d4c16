"""`embedstream check`: what is wrong first, brokers before models, the plan, one object for machines."""

from __future__ import annotations

import contextlib
import io
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import pipeline.model_pool
from gpu.batch import ModelInfo
from pipeline.cli import check
from pipeline.cli.commands import main
from pipeline.lifecycle import OperatorError

INFO = ModelInfo(
    name="m", fingerprint="sha256:ab", architecture="TinyModel", dtype="float32", device="cpu",
    tasks=frozenset({"embed", "score"}), max_tokens=64, max_batch_tokens=512, dimensions=8,
    honoured=("config.json: hidden_size",), notes=("a note of the model",),
)  # fmt: skip


@pytest.fixture
def settings_file(tmp_path: Path) -> Callable[..., str]:
    """Path of a settings file with one model and these sources as routes."""

    def write(*sources: str, more: str = "") -> str:
        path = tmp_path / "service.toml"
        routes = "".join(
            f'[[routes]]\nname = "r{i}"\nsource = "{source}"\n' for i, source in enumerate(sources)
        )
        path.write_text(f'[models.m]\npath = "{tmp_path}"\n{routes}{more}')
        return str(path)

    return write


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A source that works."""
    (tmp_path / "in.jsonl").touch()
    return f"file://{tmp_path}/in.jsonl?replies={tmp_path}/out.jsonl"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded, all of them `INFO`."""
    names: list[str] = []

    async def load_models(settings: Any, **_: Any) -> Any:
        names.extend(settings.models)
        return SimpleNamespace(infos=dict.fromkeys(settings.models, INFO), close=lambda: None)

    monkeypatch.setattr(pipeline.model_pool, "load_models", load_models)
    return names


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and what a terminal would show, stdout and stderr as they came."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        status = main(["check", *arguments])
    return status, shown.getvalue()


@contextlib.contextmanager
def silent_listeners(number: int) -> Iterator[list[int]]:
    """Ports where somebody takes connections and never answers."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        yield [one.getsockname()[1] for one in sockets]


def test_problems_come_first_then_the_plan_without_defaults(
    settings_file: Callable[..., str], source: str, loads: list[str]
) -> None:
    """K35: each problem in its own line before anything else; defaults only when asked for."""
    config = settings_file("redis://127.0.0.1:1/q", "kafka://127.0.0.1:1/q", source)
    status, shown = run("--config", config)
    lines = shown.splitlines()
    assert status == 1
    assert [line.partition(": Re")[0].partition(": Ka")[0] for line in sorted(lines[:2])] == [
        "problem: route r0",
        "problem: route r1",
    ]
    assert lines.index("model m") > 1 and "not loaded" in shown
    assert lines[-1] == "serve would not start: 2 problems, see above"
    assert "batching.linger_ms" not in shown and "models.m.path" in shown
    status, shown = run("--config", config, "--verbose")
    assert status == 1 and "batching.linger_ms" in shown and "# default" in shown


def test_brokers_come_before_models_and_are_given_up_soon(
    settings_file: Callable[..., str], loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K47: what never answers costs five seconds in all, not each, and no model is loaded first."""
    assert check.REACH_S == 5.0
    monkeypatch.setattr(check, "REACH_S", 0.3)
    with silent_listeners(3) as (first, second, third):
        config = settings_file(
            f"redis://127.0.0.1:{first}/q",
            f"kafka://127.0.0.1:{second}/q",
            f"kafka://127.0.0.1:{third}/q",
        )
        status, shown = run("--config", config)
    assert status == 1 and loads == []
    assert sum(" did not answer within 0.3 s" in line for line in shown.splitlines()) == 3


def test_every_wrong_setting_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = run("--set", "log.level=loud", "--set", "health.port=-1")
    assert status == 1
    assert [line[:9] for line in shown.splitlines()] == ["problem: "] * len(shown.splitlines())
    assert "log.level" in shown and "health.port" in shown


def test_the_plan_of_a_service_that_would_start(
    settings_file: Callable[..., str], source: str, loads: list[str]
) -> None:
    status, shown = run("--config", settings_file(source))
    assert status == 0 and loads == ["m"]
    assert "TinyModel, embed, score; float32 on cpu" in shown and "embed, score: m" in shown
    assert "note: a note of the model" in shown and "hidden_size" not in shown
    assert shown.splitlines()[-1] == "serve would start"
    assert "honoured config.json: hidden_size" in run("-v", "--config", settings_file(source))[1]


def test_a_model_that_does_not_load_is_a_problem(
    settings_file: Callable[..., str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_models(*_: Any, **__: Any) -> Any:
        raise OperatorError("model m: there is no config.json: give a model folder")

    monkeypatch.setattr(pipeline.model_pool, "load_models", load_models)
    status, shown = run("--config", settings_file(source))
    assert status == 1 and shown.startswith("problem: model m: there is no config.json")
    assert "does not load" in shown


def test_one_object_for_machines(
    settings_file: Callable[..., str],
    source: str,
    loads: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--json", "--config", settings_file(source)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == "" and list(report)[:3] == ["ok", "problems", "notes"]
    assert report["ok"] is True and report["problems"] == []
    assert report["models"]["m"]["tasks"] == ["embed", "score"]
    (route,) = report["routes"]
    assert route["reached"] and route["models"] == {"m": ["embed", "score"]}
    assert report["settings"]["batching.linger_ms"]["origin"] == "default"
    config = settings_file("redis://:hunter2@127.0.0.1:1/q")
    assert main(["check", "--json", "--config", config]) == 1
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err
    report = json.loads(captured.out)
    assert not report["ok"] and len(report["problems"]) == 1 and report["models"] == {"m": None}
    assert main(["check", "--json", "--set", "log.level=loud"]) == 1
    assert "log.level" in json.loads(capsys.readouterr().out)["problems"][0]


def test_colour_at_a_terminal_only(
    settings_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_file("redis://127.0.0.1:1/" + "q" * 150)
    assert "\x1b" not in run("--config", config)[1]
    shown = io.StringIO()
    monkeypatch.setattr(
        check, "console",
        lambda: Console(file=shown, force_terminal=True, color_system="standard", width=60),
    )  # fmt: skip
    run("--config", config)
    first = shown.getvalue().splitlines()[0]
    assert (
        "\x1b[1;31mproblem" in first and "Redis at" in first and "check that" in first
    )  # one line

"""What belongs to one process is refused in a service of several, by name and with both remedies."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.cli.check import Findings, _divide
from pipeline.cli.commands import main
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.model_pool import executor_workers
from pipeline.settings.load import ModelSettings, Settings, SettingsError, load
from pipeline.settings.records import ExecutorSettings


def settings_of(**route: str) -> Settings:
    flags = {f"routes.r.{name}": value for name, value in route.items()}
    if "#" in route.get("destination", ""):
        flags["routes.r.document.text"] = "{text}"
    return load({"models.m.path": "x", "executor.processes": 2, **flags}, {}, None)


@pytest.mark.parametrize(
    ("route", "named"),
    [
        ({"source": "-"}, "routes.0.source is for one: the lines of a file"),
        ({"source": "file:///in.jsonl?replies=/out.jsonl"}, "routes.0.source"),
        ({"source": "inproc://x"}, "one process"),
        ({"source": "kafka://h:1/t?group_instance_id=pod-1"}, "group_instance_id=pod-1"),
        ({"source": "redis://h/t", "destination": "file:///out.jsonl"}, "routes.0.destination"),
        ({"source": "redis://h/t", "destination": "parquet:///d#docs"}, "parquet files have one writer"),
        (
            {"source": "redis://h/t", "destination": "lance:///d#docs", "report_to": "file:///o"},
            "routes.0.report_to",
        ),
    ],
)  # fmt: skip
def test_ends_of_a_route(route: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings_of(**route)
    message = str(refused.value)
    assert "executor.processes" in message and named in message, message
    assert "set processes to 1" in message


@pytest.mark.parametrize(
    "source", ["kafka://h:1/t?group=g", "redis://h/t?group=g", "redis-list://h/key"]
)
def test_what_members_share_is_served(source: str) -> None:
    assert settings_of(source=source).executor.processes == 2
    assert settings_of(source=source, destination="lance:///d#docs").executor.processes == 2


def test_copies_of_a_model_on_one_cuda_device_are_meant_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = Settings(
        models={"m": ModelSettings(path="x")}, executor=ExecutorSettings(processes=2)
    )
    with pytest.raises(OperatorError, match=r'models\.m\.device is "auto".*cuda:0') as refused:
        executor_workers(settings)
    assert refused.value.exit_status == ExitStatus.USAGE
    meant = {"m": ModelSettings(path="x", device="cuda:0")}
    assert executor_workers(msgspec.structs.replace(settings, models=meant)) == 1
    alone = msgspec.structs.replace(settings, executor=ExecutorSettings())
    assert executor_workers(alone) == 1


def test_check_says_what_serve_would_refuse() -> None:
    findings = Findings(lambda kind, text: None)
    _divide(Settings(executor=ExecutorSettings(processes=1024)), findings)
    assert len(findings.problems) == 1
    assert findings.problems[0].startswith("executor.processes (1024) is more than the ")


def test_up_is_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--set", "executor.processes=2"]) == ExitStatus.USAGE
    assert "executor.processes is 2, and up is one process" in capsys.readouterr().err


def test_the_flag_is_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--source", "-", "--model", "m", "--processes"]
    assert main([*arguments, "2"]) == ExitStatus.USAGE
    assert "routes.0.source is for one" in capsys.readouterr().err
    assert main([*arguments, "0"]) == ExitStatus.USAGE
    assert "executor.processes" in capsys.readouterr().err

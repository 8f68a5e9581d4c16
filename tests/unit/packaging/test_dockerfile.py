"""The Dockerfile: pinned, unprivileged, offline at run time. It has not been built here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined, comments left out."""
    text = (ROOT / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (line.split(None, 1)[0].upper(), line.split(None, 1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def final_stage(instructions: list[tuple[str, str]]) -> list[tuple[str, str]]:
    last = max(i for i, (name, _) in enumerate(instructions) if name == "FROM")
    return instructions[last:]


def test_every_base_image_is_pinned_to_a_full_version(instructions: list[tuple[str, str]]) -> None:
    stages: set[str] = set()
    for name, arguments in instructions:
        if name == "FROM":
            base, *rest = arguments.split()
            if base not in stages:
                assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base), base
            stages.update(rest[1:])
    assert stages == {"build", "models"}


def test_the_service_does_not_run_as_root(instructions: list[tuple[str, str]]) -> None:
    users = [arguments for name, arguments in final_stage(instructions) if name == "USER"]
    assert users == ["10001:10001"]


def test_the_last_stage_installs_and_downloads_nothing(
    instructions: list[tuple[str, str]],
) -> None:
    for name, arguments in final_stage(instructions):
        assert name != "ADD"
        if name == "RUN":
            assert not re.search(r"\b(pip|curl|wget|apt-get)\b", arguments), arguments


def test_installs_are_held_to_the_constraints(instructions: list[tuple[str, str]]) -> None:
    installs = [args for name, args in instructions if name == "RUN" and "pip install" in args]
    assert len(installs) == 3
    for install in installs:
        assert "pip install -c constraints.txt" in install


def test_what_is_copied_reaches_the_builder(instructions: list[tuple[str, str]]) -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert "*" in ignored
    for name, arguments in instructions:
        if name == "COPY" and "--from" not in arguments:
            for source in shlex.split(arguments)[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_health_and_stop_are_declared(instructions: list[tuple[str, str]]) -> None:
    """G07: healthy means ready, and loading has its time."""
    stage = dict(final_stage(instructions))
    assert "/ready" in stage["HEALTHCHECK"]
    period = re.search(r"--start-period=(\d+)s", stage["HEALTHCHECK"])
    assert period is not None and int(period[1]) >= 60
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["ENTRYPOINT"] == '["embedstream"]', "exec form: signals reach the service"

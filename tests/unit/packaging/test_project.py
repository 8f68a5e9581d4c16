"""Packaging: pins cover everything, the licence is there, CI runs what the README says."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9._+!]+)$")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [PIN.match(line) for line in lines if line and not line.startswith("#")]
    assert all(found), "every line is one exact pin"
    return {canonicalize_name(m[1]): m[2] for m in found if m is not None}


def requirements(name: str, extras: set[str]) -> list[Requirement]:
    """Direct requirements in force here; extras of ours are followed."""
    found: list[Requirement] = []
    if name == "embedstream":
        texts = list(PROJECT["dependencies"])
        for extra in extras:
            texts += PROJECT["optional-dependencies"][extra]
    else:
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return []  # of an extra that is not installed here; its own pin was checked
    for text in texts:
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}
        )
        if applies:
            found.append(requirement)
    return found


def test_constraints_pin_everything_that_gets_installed() -> None:
    pinned = pins()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[str, frozenset[str]]] = [("embedstream", frozenset({"bench"}))]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for requirement in requirements(name, set(extras)):
            wanted = canonicalize_name(requirement.name)
            if wanted.startswith(("nvidia-", "cuda-")) or wanted in ("triton", "setuptools"):
                continue  # a CUDA build's own, or pip's
            if wanted not in ("embedstream", "embedstream-client"):  # both are in this tree
                assert wanted in pinned, f"{name} needs {requirement}, which is not pinned"
                assert requirement.specifier.contains(pinned[wanted], prereleases=True), wanted
            waiting.append((wanted, frozenset(requirement.extras)))
    assert pinned["torch"] == "2.13.0", "no build tag: CPU and CUDA builds both satisfy it"


def test_every_floor_is_below_its_pin() -> None:
    pinned = pins()
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for text in group:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name in pinned:
                assert requirement.specifier.contains(pinned[name]), text


def test_the_licence_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_the_changelog_has_a_place_for_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## \[Unreleased\]$", text, re.M)


def test_no_registry_host_is_named() -> None:
    """Where packages come from is the installer's business."""
    hosts = re.compile(
        "|".join(("py" + "pi\\.org", "python" + "hosted", "npm" + "js\\.", "deb\\.deb" + "ian"))
    )
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".txt", ""} and path.is_file():
            assert not hosts.search(path.read_text("utf-8", "ignore")), name


def test_ci_runs_the_readme_commands() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text("utf-8")
    assert script.stat().st_mode & stat.S_IXUSR
    assert all(f"make {target}" in text for target in ("check", "test", "stores", "faults"))
    assert "--require-servers=" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    "target", ["demo", "up", "test", "stores", "faults", "check", "bench", "clean"]
)
def test_make_targets_set_up_their_own_environment(target: str, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    shown = subprocess.run(
        ["make", "--dry-run", target, f"VENV={venv}", f"PYTHON={sys.executable}", "ARGS=--x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert shown.returncode == 0, shown.stderr
    if target == "clean":
        assert f"rm -rf {venv}" in shown.stdout
        return
    assert f"-m venv {venv}" in shown.stdout
    assert "-c constraints.txt" in shown.stdout
    extra = {"demo": "demo", "up": "demo", "bench": "bench"}.get(target, "dev")
    assert f"-e '.[{extra}]'" in shown.stdout


SKIPPING = """
import pytest

@pytest.mark.redis
def test_a():
    pytest.skip("{reason}")

@pytest.mark.kafka
def test_b():
    pass

@pytest.mark.kafka
@pytest.mark.real_kafka
def test_c():
    pytest.skip("no real Kafka")
"""


@pytest.mark.parametrize(
    ("option", "reason", "status", "words"),
    [
        ("", "no server", 0, "2 skipped"),
        ("--require-servers=kafka", "no server", 0, "2 skipped"),
        ("--require-servers=redis", "no server", 1, "was skipped: Skipped: no server"),
        ("--require-servers=redis,kafka", "has just run", 1, "no test with marker 'redis' ran"),
        (
            "--require-servers=kafka,real_kafka",
            "no server",
            1,
            "was skipped: Skipped: no real Kafka",
        ),
        ("--require-servers=docker", "no server", 1, "no test with marker 'docker' ran"),
        ("--require-servers=nonsense", "no server", 4, "unknown markers"),
    ],
)
def test_a_skipped_server_suite_is_a_failure_where_it_is_required(
    option: str, reason: str, status: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "test_x.py").write_text(SKIPPING.format(reason=reason))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  redis\n  kafka\n  real_kafka\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c"),
            *(str(tmp_path / "pytest.ini"), "-q", "-p", "no:cacheprovider", str(tmp_path)),
            *([option] if option else []),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout + done.stderr

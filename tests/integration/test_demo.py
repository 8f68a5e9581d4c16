"""`embedstream demo` as a newcomer runs it: real models, real brokers, no terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]


def run_demo(*arguments: str) -> str:
    environment = {**os.environ, "COLUMNS": "120"}
    environment.pop("KAFKA_HOME", None)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "demo", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=260,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def models(packaged_model: Callable[[str], Path]) -> None:
    packaged_model("all-MiniLM-L6-v2")
    packaged_model("ms-marco-MiniLM-L-12-v2")


@pytest.mark.kafka
@pytest.mark.redis
def test_documents_through_kafka_and_questions_through_redis() -> None:
    shown = run_demo("--documents", "48")
    assert "Kafka   127.0.0.1:" in shown and "(packaged)" in shown
    assert "48/48" in shown
    assert re.search(r"documents embedded, every one answered +│ +48 │", shown)
    assert shown.count("vector #") == 6, "a first answer, then five questions"
    assert "Everything shown above was checked." in shown


def test_the_quick_look_needs_no_broker() -> None:
    shown = run_demo("--documents", "24", "--in-process")
    assert "everything runs inside this process" in shown
    assert "Everything shown above was checked." in shown

"""Starting, signalling and killing service processes in tests.

Who calls it: fault tests.
What must stay true: every process started here is killed by its own pid at the end of the test;
waiting for readiness reads the process's own line, never sleeps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class ServiceProcess:
    """One service; its log goes to a file that failures show."""

    def __init__(self, config: dict[str, Any], folder: Path, name: str = "service") -> None:
        self.config_path = folder / f"{name}.json"
        self.config_path.write_text(json.dumps(config))
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.service_main", str(self.config_path)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait_ready(self) -> None:
        """Until the process says so; its log in the error when it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == b"ready", f"service did not start: {self.log()}"

    def log(self) -> str:
        """The end of its log."""
        return self.log_path.read_text(errors="replace")[-6000:]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Gone, and its pipe closed."""
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def service_process(
    config: dict[str, Any], folder: Path, name: str = "service"
) -> Iterator[ServiceProcess]:
    """A ready service that is gone after the block, whatever happened."""
    service = ServiceProcess(config, folder, name)
    try:
        service.wait_ready()
        yield service
    finally:
        service.close()

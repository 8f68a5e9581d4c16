"""What every parity test needs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The executor's habit, and the only setting under which bits are promised."""
    from gpu.device.pick import init_executor_thread

    init_executor_thread()

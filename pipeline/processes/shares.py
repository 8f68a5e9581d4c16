"""The cores of this machine, divided between the processes of one service.

Who calls it: `pipeline.processes.parent`; `embedstream check`, to say what would be refused.
What must stay true: each core belongs to one process; siblings of one physical core, and cores of one
socket, stay together as far as the numbers allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.settings.records import Settings


def shares(settings: Settings, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """The cores of each process, as many as `executor.processes` says.

    Raises:
        OperatorError: there are more processes than cores, or their threads are more than the cores.
    """
    n, available = settings.executor.processes, len(cores)
    if n > available:
        raise OperatorError(
            f"executor.processes ({n}) is more than the {available} cores that this process may use: "
            "processes that share a core only wait for each other; lower it",
            exit_status=ExitStatus.USAGE,
        )
    workers = settings.executor.cpu_workers
    if n > 1 and workers != "auto" and workers * n > available:
        raise OperatorError(
            f"executor.cpu_workers ({workers}) is for each of the {n} of executor.processes, together more "
            f"threads than the {available} cores: lower one of the two, or leave cpu_workers at auto",
            exit_status=ExitStatus.USAGE,
        )
    bounds = [available * i // n for i in range(n + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(bounds)]

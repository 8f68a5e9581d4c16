"""The cores of this machine that the process may use, and how much of their time.

Who calls it: `gpu.executor` and `pipeline.model_pool` for the number of threads, `pipeline.processes` to divide
cores between processes.
What must stay true: a container's CPU limit counts as well as its cores (`docker run --cpus`, `limits.cpu` of
Kubernetes): threads beyond it use the time of a period up and then stand still together, the event loop too; what
the system does not tell is no limit. No torch here.

Source of the files: the kernel's cgroup-v2.rst (`cpu.max`) and sched-bwc.rst (`cpu.cfs_quota_us`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_TOPOLOGY = Path("/sys/devices/system/cpu")
_LEVELS = ("physical_package_id", "die_id", "core_id")
_GROUPS, _MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use, neighbours beside each other."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=_place)


def _place(core: int) -> tuple[int, ...]:
    """Socket, die and physical core, as far as the kernel tells, then the number itself."""
    found = []
    for level in _LEVELS:
        try:
            found.append(int((_TOPOLOGY / f"cpu{core}/topology/{level}").read_text()))
        except (OSError, ValueError):
            found.append(0)
    return (*found, core)


def n_threads(cores: int, processes: int = 1) -> int:
    """Threads that compute at the same time, of each of so many processes on so many cores each. A part of a
    core is left to the event loop."""
    limit = cpu_limit()
    return cores if limit is None else max(1, min(cores, int(limit / processes)))


def cpu_limit() -> float | None:
    """Cores whose time this process and its group may use together; None: no limit, or none that is told."""
    return min(_limits(), default=None)


def _limits() -> Iterator[float]:
    """Of the process's group and those around it, by either version of cgroups."""
    try:
        lines = _GROUPS.read_text().splitlines()
        mounts = _MOUNTS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in mounts:
            place = _mounted(mount, "cpu" if controllers else None)
            if place is None:
                continue
            folder, root = place
            # A container sees its own group as the mount's root, or under the host's path.
            inner = PurePosixPath(own)
            inner = inner.relative_to(root) if inner.is_relative_to(root) else PurePosixPath()
            at = folder / inner
            for group in (at, *at.parents):
                if group.is_relative_to(folder) and (limit := _limit(group)) is not None:
                    yield limit


def _mounted(line: str, controller: str | None) -> tuple[Path, PurePosixPath] | None:
    """Where a hierarchy is mounted, and which group is its root there: the one of a controller (version 1), or
    version 2's (None)."""
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(), [*after.split(), "", "", ""][:3]
    wanted = "cgroup2" if controller is None else "cgroup"
    if len(fields) < 5 or kind != wanted:
        return None
    if controller is not None and controller not in options.split(","):
        return None
    return Path(fields[4]), PurePosixPath(fields[3])


def _limit(group: Path) -> float | None:
    """Cores of one group; None: unlimited, or not said."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:  # "max"
        return None

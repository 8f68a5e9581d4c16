"""Cores and a container's CPU limit, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.device import cores


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose mounts are below a folder of our own; nothing is limited."""
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_MOUNTS", tmp_path / "mountinfo")
    return tmp_path


def told(system: Path, groups: str, *mounts: tuple[str, str, str, str]) -> None:
    """mounts: root, folder, kind, options of each."""
    (system / "cgroup").write_text(groups)
    lines = [
        f"{n} 1 0:2{n} {root} {system / folder} rw,nosuid shared:9 - {kind} {kind} {options}\n"
        for n, (root, folder, kind, options) in enumerate(mounts)
    ]
    (system / "mountinfo").write_text("22 1 0:5 / /proc rw - proc proc rw\n" + "".join(lines))


def v2(system: Path, group: str, text: str) -> None:
    (system / "sys" / group).mkdir(parents=True, exist_ok=True)
    (system / "sys" / group / "cpu.max").write_text(text)


def v1(system: Path, group: str, quota: int, period: int = 100_000) -> None:
    folder = system / "cpu" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


def test_a_container_sees_its_limit_at_the_root_of_its_own_mount(system: Path) -> None:
    """`docker run --cpus 1.5` with a cgroup namespace."""
    told(system, "0::/\n", ("/", "sys", "cgroup2", "rw"))
    v2(system, "", "150000 100000\n")
    assert cores.cpu_limit() == 1.5
    assert cores.n_threads(64) == 1
    assert cores.n_threads(1) == 1


def test_the_tightest_group_above_counts(system: Path) -> None:
    """A pod of Kubernetes: the container may use 4 cores, the pod 2."""
    told(system, "0::/kubepods/pod1/one\n", ("/", "sys", "cgroup2", "rw"))
    v2(system, "kubepods", "max 100000\n")
    v2(system, "kubepods/pod1", "200000 100000\n")
    v2(system, "kubepods/pod1/one", "400000 100000\n")
    assert cores.cpu_limit() == 2.0
    assert cores.n_threads(64) == 2
    assert cores.n_threads(16, processes=4) == 1


def test_version_one_is_read_by_its_controller(system: Path) -> None:
    told(
        system, "9:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/\n",
        ("/docker/ab", "memory", "cgroup", "rw,memory"),
        ("/docker/ab", "cpu", "cgroup", "rw,cpu,cpuacct"),
        ("/", "sys", "cgroup2", "rw"),
    )  # fmt: skip
    v1(system, "", 300_000)
    assert cores.cpu_limit() == 3.0
    v1(system, "", -1)
    assert cores.cpu_limit() is None


def test_version_one_without_a_namespace_is_found_below_its_mount(system: Path) -> None:
    told(system, "4:cpu:/slice/one\n", ("/", "cpu", "cgroup", "rw,cpu"))
    v1(system, "slice", 250_000, 50_000)
    v1(system, "slice/one", -1)
    assert cores.cpu_limit() == 5.0


@pytest.mark.parametrize("text", ["max 100000\n", "", "much 1\n", "1\n", "100000 0\n", "-1 100000"])
def test_what_says_no_limit_is_none(system: Path, text: str) -> None:
    told(system, "0::/\n", ("/", "sys", "cgroup2", "rw"))
    v2(system, "", text)
    assert cores.cpu_limit() is None
    assert cores.n_threads(7) == 7


def test_a_system_that_tells_nothing_has_no_limit(system: Path) -> None:
    assert cores.cpu_limit() is None
    (system / "cgroup").write_text("strange\n\n::\n0::/\n")
    (system / "mountinfo").write_text("strange\n - \n1 2 3 - cgroup2\n")
    assert cores.cpu_limit() is None


def test_a_part_of_a_core_is_one_thread(system: Path) -> None:
    told(system, "0::/\n", ("/", "sys", "cgroup2", "rw"))
    v2(system, "", "20000 100000\n")
    assert cores.cpu_limit() == 0.2 and cores.n_threads(8) == 1

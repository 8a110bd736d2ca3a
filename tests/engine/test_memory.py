"""Free memory as the kernel and its control groups tell it, from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine.memory import free_memory

GIB = 1 << 30


def machine(root: Path, available: int, cgroup: str = "") -> None:
    (root / "proc/self").mkdir(parents=True)
    lines = f"MemTotal: {99 << 20} kB\nMemAvailable:   {available // 1024} kB\n"
    (root / "proc/meminfo").write_text(lines)
    (root / "proc/self/cgroup").write_text(cgroup)


def group_v2(folder: Path, limit: int | None, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def group_v1(folder: Path, limit: int, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 3\ntotal_inactive_file {inactive}\n")


def test_without_control_groups(tmp_path: Path) -> None:
    machine(tmp_path, 7 * GIB)
    assert free_memory(tmp_path) == 7 * GIB


def test_version_2_counts_every_level(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "0::/system/job\n")
    mount = tmp_path / "sys/fs/cgroup"
    group_v2(mount / "system/job", None, 4 * GIB)
    group_v2(mount / "system", 10 * GIB, 6 * GIB, inactive=GIB)
    assert free_memory(tmp_path) == 5 * GIB
    group_v2(mount / "system/job", 3 * GIB, 1 * GIB)
    assert free_memory(tmp_path) == 2 * GIB


def test_version_2_in_a_container_whose_path_is_outside(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "0::/docker/0123456789\n")
    group_v2(tmp_path / "sys/fs/cgroup", 8 * GIB, 2 * GIB)
    assert free_memory(tmp_path) == 6 * GIB


def test_version_1(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    group_v1(tmp_path / "sys/fs/cgroup/memory/docker/abc", 4 * GIB, 3 * GIB, inactive=2 * GIB)
    group_v1(tmp_path / "sys/fs/cgroup/memory", 0x7FFFFFFFFFFFF000, 30 * GIB)
    assert free_memory(tmp_path) == 3 * GIB


@pytest.mark.parametrize("usage", [9 * GIB, 10 * GIB])
def test_more_used_than_allowed_is_nothing_free(tmp_path: Path, usage: int) -> None:
    machine(tmp_path, 50 * GIB, "0::/\n")
    group_v2(tmp_path / "sys/fs/cgroup", 9 * GIB, usage)
    assert free_memory(tmp_path) == 0


def test_this_machine_has_some() -> None:
    assert free_memory() > 1 << 20

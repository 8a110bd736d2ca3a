"""How much memory this process may still take, containers included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a cgroup version keeps its numbers."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    inactive: str  # key in memory.stat: page cache that is given back without being asked twice


_VERSION_2 = _Names(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", "inactive_file"
)
_VERSION_1 = _Names(
    ("sys/fs/cgroup/memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken before the machine, or any control group around this process, runs out.

    The least of the kernel's MemAvailable and, for the process's cgroup (version 1 or 2) and each one above
    it, limit - usage + inactive page cache. `root` is the root of the file system (tests give their own).
    """
    return max(min([_machine(root), *_groups(root)]), 0)


def _machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            names = _VERSION_2
        elif "memory" in controllers.split(","):
            names = _VERSION_1
        else:
            continue
        for mount in names.mounts:
            # In a container the path may lie outside of what is mounted; then only the mount's root is there.
            folder = root / mount / path.lstrip("/")
            for level in (folder, *folder.parents):
                yield from _room(level, names)
                if level == root / mount:
                    break


def _room(folder: Path, names: _Names) -> Iterator[int]:
    limit, usage = _read(folder / names.limit).strip(), _read(folder / names.usage).strip()
    if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _UNLIMITED:
        return
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    yield int(limit) - int(usage) + int(stat.get(names.inactive, "0"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

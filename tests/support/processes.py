"""Processes as Linux tells of them: children, memory, open files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path


def children(pid: int) -> list[int]:
    """Every process below `pid`, whatever the depth."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone meanwhile
            continue
        below.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    line = [pid]
    while line:
        line = [child for parent in line for child in below.get(parent, ())]
        found += line
    return found


def gone_within(pids: Sequence[int], seconds: float) -> bool:
    """Whether all of these processes have ended (or are only waited for) before so long."""
    return within(seconds, lambda: not any(_lives(pid) for pid in pids))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it came to pass in so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def memory(pid: int) -> int:
    """Bytes of anonymous memory, in RAM and swapped out: what a leak would add to."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


def open_files(pid: int) -> int:
    """How many file descriptors it has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))

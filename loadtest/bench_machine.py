"""The machine and the software of a benchmark, as far as they decide its figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from server import __version__
from server.tools.compare.machine import this_machine

_TELLING = ("amx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "asimd", "bf16", "sve")  # of CPU flags


@dataclass(frozen=True, slots=True)
class About:
    """`cpu` is the kernel's name for it with its family, model and stepping; `flags` those that kernels look
    for; `cores` those that this process may use."""

    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_bytes: int | None
    system: str
    python: str
    torch: str
    headroom: str


def about() -> About:
    """Of this machine and this process."""
    machine = this_machine("cpu", None)
    fields = cpu_fields(Path("/proc/cpuinfo"))
    numbers = [f"{name} {fields[key]}" for name, key in _NUMBERS if key in fields]
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return About(
        cpu=machine.cpu + (f" ({', '.join(numbers)})" if numbers else ""),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        flags=tuple(sorted(flag for flag in flags if flag.startswith(_TELLING))),
        memory_bytes=machine.memory_bytes,
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=machine.python,
        torch=torch.__version__,
        headroom=__version__,
    )


_NUMBERS = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))


def cpu_fields(path: Path) -> dict[str, str]:
    """The fields of the first CPU in `path`; empty where there is no such file (proc(5))."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}

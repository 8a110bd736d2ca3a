"""Where and with what a comparison was made."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from server.tools.compare.results import Machine

_ROOT = Path(__file__).resolve().parents[3]


def this_machine(device: str, threads: int | None) -> Machine:
    """The machine that this process runs on; `threads` None is torch's own choice."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads() if threads is None else threads,
        memory_bytes=_memory(),
        gpu=gpu,
        system=platform.system(),
        python=platform.python_version(),
        torch=torch.__version__,
    )


def commit() -> str | None:
    """The commit of the clone that this runs from, marked if files differ from it; None without a clone."""
    if not (_ROOT / ".git").exists():
        return None
    words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def now() -> str:
    """The time in UTC, as ISO 8601 has it, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu() -> str:
    """The name that the kernel has for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.startswith("model name")), "")
    return found.partition(":")[2].strip() or platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None

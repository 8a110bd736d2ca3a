"""Runs `headroom` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def headroom(
    *words: str, env: Mapping[str, str] | None = None, stdin: str = "", timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """The finished command; its output is no terminal. `env` adds to the environment."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *words],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        cwd=ROOT,
        env=settings,
        check=False,
    )


def check_one_line(done: subprocess.CompletedProcess[str], *parts: str, code: int = 1) -> str:
    """The command failed with one line, on standard error, which holds `parts`."""
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (code, 1), done.stderr
    assert done.stdout == ""
    for part in parts:
        assert part in lines[0], lines[0]
    return lines[0]

"""Runs the locustfile, as shipped, against the fake server; locust patches a process, so it gets its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_sse import fake_sse

ROOT = Path(__file__).resolve().parents[2]

needs_locust = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is not installed (extra `load`)"
)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished locust run: its samples, failures and refusals, requests sent, busy share of the client's
    core by the second, and locust's own rows by (type, name)."""

    samples: dict[str, list[float]]
    failures: dict[str, int]
    refused: int
    asked: int
    cpu: list[float]
    rows: dict[tuple[str, str], dict[str, float]]


def locust(
    model: str, folder: Path, users: str = "ChatUser", seconds: int = 2, count: int = 1, rate: float = 0.0
) -> Run:
    """`count` users of one class for so long; `model` says how the server behaves."""
    samples = folder / "samples.json"
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", users]
    command += ["--headless", "--json", "--skip-log", "-u", str(count), "-r", str(count), "-t", f"{seconds}s"]
    command += ["--model", model, "--samples", str(samples), "--rate", str(rate)]
    with fake_sse() as url:
        done = subprocess.run(
            [*command, "--host", url], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert samples.is_file(), done.stderr
    rows = json.loads(done.stdout[done.stdout.index("[") :])
    kept = json.loads(samples.read_text())
    by_name = {(row["method"], row["name"]): row for row in rows}
    return Run(kept["values"], kept["failures"], kept["refused"], kept["asked"], kept["cpu"], by_name)

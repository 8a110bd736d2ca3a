"""Ctrl-C and SIGTERM at any moment of a command's start: it ends, with its code, and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.processes import within

# Seconds after the handlers are there; torch and numpy are imported for the first second or so.
MOMENTS = (0.0, 0.03, 0.07, 0.12, 0.18, 0.25, 0.32, 0.4, 0.5, 0.6, 0.75, 0.9)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("command", ["plan", "serve"])
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_of_the_start(command: str, number: signal.Signals, tiny_served: Path) -> None:
    words = [command, str(tiny_served), *(["--port", "0"] if command == "serve" else [])]
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda moment: interrupted(words, number, moment), MOMENTS)
        for moment, (code, out, err) in zip(MOMENTS, ends, strict=True):
            over = "Listening" in out if command == "serve" else "bytes" in out
            assert code == CODES[number] or (code == 0 and over), (moment, code, err)  # or it had ended
            assert "Traceback" not in err and "Error" not in err, (moment, err)
            assert "headroom: interrupted" in err or code != 130 or over, (moment, err)


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_its_echo_changes_nothing(number: signal.Signals, tiny_served: Path) -> None:
    """`timeout` and `make` pass a signal on to a process that has had it already."""
    words = ["serve", str(tiny_served), "--port", "0"]
    for moment in (0.3, 0.6, 0.9, 1.2):
        code, out, err = interrupted(words, number, moment, echo=0.004)
        assert code == CODES[number] or "Listening" in out, (moment, code, err)
        assert "Traceback" not in err and err.count("interrupted") <= 1, (moment, err)


def interrupted(
    words: list[str], number: signal.Signals, moment: float, echo: float | None = None
) -> tuple[int, str, str]:
    """What becomes of a command that gets the signal so many seconds after its handlers are there, and once
    more after `echo`. One that was lost would let a server run on: it is killed, which is another code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert within(20, lambda: catches(process.pid, signal.SIGTERM) or process.poll() is not None)
        time.sleep(moment)
        process.send_signal(number)
        if echo is not None:
            time.sleep(echo)
            process.send_signal(number)
        out, err = process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return process.returncode, out, err


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_nothing_of_ours_is_imported_before_the_handlers_are_there() -> None:
    """An import that a Ctrl-C breaks off is told with a traceback."""
    code = "import sys, server.cli; print(*sorted(m for m in sys.modules if m.startswith(('server', 'arg'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["server", "server.cli", "server.commands", "server.commands.interrupts"]

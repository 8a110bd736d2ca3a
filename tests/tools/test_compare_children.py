"""A job in a process of its own: its result, its progress, its errors, and what Ctrl-C does to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.context import SpawnProcess

import pytest

from model.errors import ModelError
from model.progress import Progress, Silent
from server.engine.errors import ConfigError
from server.tools.compare.children import in_a_process


class Heard:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int | None]] = []
        self.updates: list[int] = []

    def start(self, label: str, total: int | None) -> None:
        self.started.append((label, total))

    def update(self, done: int) -> None:
        self.updates.append(done)


@dataclass(frozen=True)
class Job:
    """Does what `kind` says; a class of the module, so that a new process can find it."""

    kind: str

    def __call__(self, progress: Progress) -> object:
        progress.start("working", 3)
        if self.kind == "interrupt":  # as a terminal's Ctrl-C does
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        elif self.kind == "model":
            raise ModelError("no such head")
        elif self.kind == "odd":
            raise _OddError("one", "two")
        elif self.kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        elif self.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        for done in range(1, 4):
            progress.update(done)
        return os.getpid(), self.kind


class _OddError(Exception):
    """Cannot be unpickled: its constructor wants two words and gives Exception one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_result_and_progress() -> None:
    heard = Heard()
    pid, kind = in_a_process(Job("work"), heard)  # type: ignore[misc]
    assert (pid != os.getpid(), kind) == (True, "work")
    assert heard.started == [("working", 3)]
    assert heard.updates[:1] == [1]  # those that follow at once are not worth a message


def test_ctrl_c_does_not_reach_it() -> None:
    assert in_a_process(Job("interrupt"), Silent())[1] == "interrupt"  # type: ignore[index]
    # And here it is let through again.
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("when", ["half begun", "begun"])
def test_a_signal_while_it_starts_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    raised: type[BaseException],
    when: str,
) -> None:
    """As soon as the child is there, before it has its job or before anybody listens to it: it is ended and
    waited for, and says nothing."""
    pids: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    spawn, start = util.spawnv_passfds, SpawnProcess.start  # type: ignore[attr-defined]

    def spawned(path: bytes, args: list[str], fds: list[int]) -> int:
        pid: int = spawn(path, args, fds)
        if "resource_tracker" not in " ".join(map(os.fsdecode, args)):
            pids.append(pid)
            if when == "half begun":
                os.kill(os.getpid(), number)
        return pid

    def started(self: SpawnProcess) -> None:
        start(self)
        if when == "begun":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(util, "spawnv_passfds", spawned)
    monkeypatch.setattr(SpawnProcess, "start", started)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the command line does
    try:
        with pytest.raises(raised):
            in_a_process(Job("work"), Silent())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask  # a signal in the midst of it, too
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert capfd.readouterr().err == ""


def test_a_signal_while_signals_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it just after Ctrl-C is let through again: all the rest is put back even so."""
    mask, before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)
    real, pressed = signal.signal, []

    def press() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    def put(number: int, handler: object) -> object:
        found = real(number, handler)  # type: ignore[arg-type]
        if handler is signal.default_int_handler and not pressed:
            pressed.append(number)
            thread = threading.Thread(target=press)
            thread.start()
            thread.join()
        return found

    monkeypatch.setattr(signal, "signal", put)
    with pytest.raises(KeyboardInterrupt):
        in_a_process(Job("work"), Silent())
    monkeypatch.undo()
    found = signal.pthread_sigmask(signal.SIG_SETMASK, mask), signal.signal(signal.SIGTERM, before)
    assert (pressed, *found) == ([signal.SIGINT], mask, before)


def test_sigterm_ends_it() -> None:
    with pytest.raises(ConfigError, match="killed by SIGTERM"):
        in_a_process(Job("terminate"), Silent())


def test_errors_are_raised_here() -> None:
    with pytest.raises(ModelError, match=r"^no such head$"):
        in_a_process(Job("model"), Silent())
    with pytest.raises(RuntimeError, match=r"^_OddError: one and two$"):
        in_a_process(Job("odd"), Silent())


def test_a_killed_process_is_one_line() -> None:
    with pytest.raises(ConfigError) as raised:
        in_a_process(Job("die"), Silent())
    assert "killed by SIGKILL" in str(raised.value) and "lower --context or --users" in str(raised.value)
    assert "\n" not in str(raised.value)

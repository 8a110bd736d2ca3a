"""Runs a job in a fresh process and brings back its result, its progress or its error.

Fresh (spawned), so that nothing is left over from the job before: no weights, no pool, no warm caches. The
terminal's Ctrl-C goes to every process of the group; a child never sees it, and ends when its parent says so
or is gone.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import TypeVar, cast

from model.progress import Progress
from server.engine.errors import ConfigError

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EVERY = 0.1  # seconds between two messages about progress


def in_a_process(job: Callable[[Progress], T], progress: Progress) -> T:
    """`job(progress)` in a process of its own; what it raises is raised here.

    The job and its result must pickle. For the main thread. Raises ConfigError if the process is killed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, job), daemon=True)
    try:
        with _undisturbed():  # a child keeps what its parent blocked
            process.start()
        theirs.close()  # else the end of the child would not be the end of the pipe
        return cast(T, _listen(ours, progress))
    except EOFError:
        process.join()
        raise ConfigError(
            f"the process that measures ended early ({_ending(process.exitcode)}); if the machine ran out of "
            "memory, lower --context or --users"
        ) from None
    finally:
        ours.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _listen(pipe: Connection, progress: Progress) -> object:
    while True:
        kind, value = pipe.recv()
        if kind == "start":
            progress.start(*value)
        elif kind == "update":
            progress.update(value)
        elif kind == "raised":
            raise value
        else:
            return value


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait meanwhile: a child that has only half begun would be nobody's, and complain.

    They are blocked, which the child keeps, and caught, as another thread may take what this one blocks.
    """
    waiting: list[int] = []

    def wait(number: int, _: FrameType | None) -> None:
        waiting.append(number)

    def pass_on() -> None:
        for number in waiting:
            signal.raise_signal(number)

    # Last in, first out; a signal that comes in between raises, and what follows is put back all the same.
    with ExitStack() as back:
        back.callback(pass_on)
        for number in _SIGNALS:
            back.callback(signal.signal, number, signal.signal(number, wait))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        back.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        yield


def _work(pipe: Connection, job: Callable[[Progress], object]) -> None:
    """The child's side: one job, one answer."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        try:
            pipe.send(("done", job(_Told(pipe))))
        except BrokenPipeError:
            raise
        except Exception as error:
            pipe.send(("raised", _portable(error)))
    except BrokenPipeError:
        return  # nobody waits for it any more


def _portable(error: Exception) -> Exception:
    """The error if it survives pickling, else one that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")


class _Told:
    """A Progress that tells the parent, not too often."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._last = 0.0

    def start(self, label: str, total: int | None) -> None:
        self._pipe.send(("start", (label, total)))
        self._last = 0.0

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last = now
            self._pipe.send(("update", done))
